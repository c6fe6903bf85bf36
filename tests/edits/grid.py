"""The table of a run, within 80 columns, and what failed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .ways import WAYS, Row

WIDTH = 80
LEGEND = {
    "=": "says what the file says",
    "~": "does so by transformers' loop, or by the plain forward, as it may",
    "<": "the same, where nothing in the edit asks for it",
    "x": "says something else",
    "!": "raises",
    ".": "not run",
}
"""What a mark means; all but the first two are failures."""


def table(rows: Sequence[Row]) -> str:
    """Return a line for each edit, and in it a mark for each family and way."""
    marks = {(row.edit, row.family, row.way): row.mark for row in rows}
    edits, families = dict.fromkeys(row.edit for row in rows), dict.fromkeys(row.family for row in rows)
    size = max(len(WAYS), *(len(family) for family in families))
    first = max(len(edit) for edit in edits)
    lines = ["  ".join([" " * first, *(family.ljust(size) for family in families)]).rstrip()]
    for edit in edits:
        cells = ["".join(marks.get((edit, family, way), ".") for way in WAYS).ljust(size) for family in families]
        lines.append("  ".join([edit.ljust(first), *cells]).rstrip())
    used = {mark for line in lines[1:] for mark in line[first:]}
    lines += ["", *_wrapped(f"A mark for each way: {', '.join(WAYS)}.")]
    return "\n".join(lines + [f"  {mark}  {meaning}" for mark, meaning in LEGEND.items() if mark in used])


def failures(rows: Sequence[Row]) -> str:
    """Return what failed, one paragraph a cell."""
    found = [f"{row.family}, {row.edit}, {row.way}: {row.wrong}" for row in rows if row.wrong]
    return "\n".join(line for text in found for line in _wrapped(text, "    "))


def summary(rows: Sequence[Row]) -> str:
    """Return how many cells hold."""
    wrong, left = sum(bool(row.wrong) for row in rows), sum(row.mark == "~" for row in rows)
    return f"{len(rows) - wrong} of {len(rows)} hold, {left} of them by transformers' loop or the plain forward"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent)
