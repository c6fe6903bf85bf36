"""Which lines of a text changed, and where they stand in an edited copy of it. Numbers are from 1."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

Range = tuple[int, int]
"""First and last line."""


def changed(before: str, after: str) -> list[Range]:
    """Return every block of `before` that is otherwise in `after`; what was added stands at the line that follows."""
    opcodes = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False).get_opcodes()
    return [(i1 + 1, max(i2, i1 + 1)) for tag, i1, i2, _, _ in opcodes if tag != "equal"]


def carried(before: str, after: str, ranges: Iterable[Range]) -> list[Range]:
    """Return the lines of `after` that stand where `ranges` of `before` stood."""
    new = after.split("\n")
    blocks = difflib.SequenceMatcher(None, before.split("\n"), new).get_opcodes()
    starts: list[int] = []
    ends: list[int] = []
    for tag, i1, i2, j1, j2 in blocks:  # of every line of `before`: the first and the last line it stands for
        equal = tag == "equal"
        starts += [j1 + offset if equal else j1 for offset in range(i2 - i1)]
        ends += [j1 + offset if equal else max(j2 - 1, j1) for offset in range(i2 - i1)]
    found = []
    for first, last in ranges:
        low = starts[min(first, len(starts)) - 1] + 1
        high = ends[min(last, len(ends)) - 1] + 1
        found.append((min(low, len(new)), min(max(low, high), len(new))))
    return found
