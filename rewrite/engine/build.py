"""Text in, text out: a source becomes the text of a rewritten modeling file and the report of what was done."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import libcst as cst

from rewrite.engine.layout import laid_out
from rewrite.engine.passes import rewrite_text
from rewrite.engine.relocate import is_rewritten, relocate
from rewrite.errors import AlreadyRewritten, NothingToRewrite, SourceDoesNotParse
from rewrite.transform import Rewritten, Transform
from rewrite.upstream.source import Source

DEEP = 200
"""Levels of a syntax tree; the deepest modeling file of transformers 5.23 has 23."""


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
    if is_rewritten(source.text):
        raise AlreadyRewritten(source.path)
    _check_parses(source)
    try:
        relocated = relocate(source)
    except cst.ParserSyntaxError as error:
        raise SourceDoesNotParse(source.path, error.raw_line, error.message.splitlines()[0]) from error
    except RecursionError as error:
        raise _too_deep(source, error) from error
    try:
        rewritten = rewrite_text(relocated.text, transforms, relocated.uses)
    except RecursionError as error:
        raise _too_deep(source, error) from error
    if not rewritten.sites:
        raise NothingToRewrite(source.path, _reasons(rewritten))
    return Build(source, replace(rewritten, text=laid_out(rewritten.text, source.text)))


def _check_parses(source: Source) -> None:
    """Ask Python's own parser first: it points closer than libcst's, which deep nesting ends without an error."""
    try:
        ast.parse(source.text)
    except SyntaxError as error:
        raise SourceDoesNotParse(source.path, error.lineno or 1, error.msg) from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise SourceDoesNotParse(source.path, 1, str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise SourceDoesNotParse(source.path, 1, "an expression in it is nested too deeply") from error


def _too_deep(source: Source, error: RecursionError) -> Exception:
    """Return what to say of a file that ended a walk over its tree: that it is nested deeply, or our own error."""
    level: list[ast.AST] = [ast.parse(source.text)]
    depth = 0
    while level:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
    return SourceDoesNotParse(source.path, 1, "an expression in it is nested too deeply") if depth > DEEP else error


def _reasons(rewritten: Rewritten) -> list[str]:
    counts = Counter((report.name, skip.reason) for report in rewritten.transforms for skip in report.skipped)
    return [f"{name} skipped {count} ({reason})" for (name, reason), count in sorted(counts.items())]
