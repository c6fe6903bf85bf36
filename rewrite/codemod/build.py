"""Text in, text out: a source becomes the text of a rewritten modeling file and the report of what was done.

Reading on: `rewrite/package/assemble.py`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import libcst as cst

from rewrite import gc_paused
from rewrite.codemod.passes import rewrite_text
from rewrite.codemod.relocate import is_rewritten, relocate
from rewrite.codemod.text_layout import laid_out
from rewrite.errors import AlreadyRewritten, NothingToRewrite, SourceDoesNotParse, SourceTooDeep, UsageError
from rewrite.source import neighbours as upstream_neighbours
from rewrite.source.layers_elsewhere import layer_files
from rewrite.source.neighbours import Neighbour
from rewrite.source.resolve import Source
from rewrite.transform import Rewritten, Transform

DEEP = 60
"""Levels of a syntax tree; the deepest modeling file of transformers 5.23 has 23."""
MOST_TOKENS = 100_000
"""Of a file that is rewritten in minutes; the largest modeling file of transformers 5.23 has 31,000."""


@dataclass(frozen=True)
class Build:
    """A rewritten modeling file, not yet written anywhere."""

    source: Source
    rewritten: Rewritten
    """Text and report; `rewritten.text` is the whole generated file, header included."""
    neighbours: tuple[Neighbour, ...] = ()
    """The files beside it that it imports, as they are."""


def build(source: Source, transforms: Sequence[Transform]) -> Build:
    """Rewrite `source` with `transforms`.

    Raises:
        NothingToRewrite: if no transform matched.
        RewriteError: what `tried` raises.
    """
    built = tried(source, transforms)
    require_sites(built)
    return built


def require_sites(built: Build) -> None:
    """Check that something was rewritten.

    Raises:
        NothingToRewrite: if no transform matched.
    """
    if not built.rewritten.sites:
        raise NothingToRewrite(built.source.path, _reasons(built.rewritten), layer_files(built.source))


@gc_paused.paused()
def tried(source: Source, transforms: Sequence[Transform]) -> Build:
    """Rewrite `source` with `transforms`, whether or not one of them matches.

    Raises:
        SourceDoesNotParse: if the source is not valid Python.
        UsageError, SourceTooDeep: if it is larger, or nested deeper, than what can be rewritten.
        AlreadyRewritten: if the source is an output of this tool.
        NeighbourMissing, RelativeImport: if it imports what does not lie beside it.
    """
    if is_rewritten(source.text):
        raise AlreadyRewritten(source.path)
    _check_size(source)
    _check_parses(source)
    neighbours = () if source.imported_as is not None else upstream_neighbours.of(source.path, source.text)
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
    return Build(source, replace(rewritten, text=laid_out(rewritten.text, source.text)), neighbours)


def _check_size(source: Source) -> None:
    if len(source.text) <= MOST_TOKENS:  # a token has a character at least
        return
    try:
        tokens = sum(1 for _ in tokenize.generate_tokens(io.StringIO(source.text).readline))
    except (tokenize.TokenError, SyntaxError):
        return  # the parser says it better
    if tokens > MOST_TOKENS:
        raise UsageError(
            f"{source.path} is too large to be rewritten, {tokens:,} tokens and {MOST_TOKENS:,} is the most: move its "
            "tables of data into a module of their own."
        )


def _check_parses(source: Source) -> None:
    """Ask Python's own parser first: it points closer than libcst's, which deep nesting ends without an error."""
    try:
        ast.parse(source.text)
    except SyntaxError as error:
        raise SourceDoesNotParse(source.path, error.lineno or 1, error.msg) from error
    except ValueError as error:  # null bytes, before Python 3.12
        raise SourceDoesNotParse(source.path, 1, str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise SourceTooDeep(source.path, 1) from error


def _too_deep(source: Source, error: RecursionError) -> Exception:
    """Return what to say of a file that ended a walk over its tree: where it is nested deeply, or our own error."""
    level: list[ast.AST] = [ast.parse(source.text)]
    for _ in range(DEEP):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    lines = [line for node in level if (line := getattr(node, "lineno", None)) is not None]
    return SourceTooDeep(source.path, min(lines)) if lines else error


def _reasons(rewritten: Rewritten) -> list[str]:
    counts = Counter((report.name, skip.reason) for report in rewritten.transforms for skip in report.skipped)
    return [f"{name} skipped {count} ({reason})" for (name, reason), count in sorted(counts.items())]
