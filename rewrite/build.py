"""Text in, text out: a source becomes the text of a rewritten modeling file and the report of what was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewrite.source import Source
from rewrite.transform import Rewritten, Transform


@dataclass(frozen=True)
class Build:
    """A rewritten modeling file, not yet written anywhere."""

    source: Source
    rewritten: Rewritten
    """Text and report; `rewritten.text` is the whole generated file, header included."""


def build(source: Source, transforms: Sequence[Transform]) -> Build:
    """Rewrite `source` with `transforms`.

    Raises:
        SourceDoesNotParse: if the source is not valid Python.
        AlreadyRewritten: if the source is an output of this tool.
        NothingToRewrite: if no transform matched.
    """
    raise NotImplementedError
