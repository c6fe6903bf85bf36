"""The difference of both modeling files with the time of each line, before and now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewrite.console import differences

Times = Mapping[int, float]
"""µs of a step by the number of a line."""


def timed(original: Path, rewritten: Path, sides: Mapping[str, Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The hunks of the difference, each a list of lines.

    Args:
        original: a modeling file.
        rewritten: the file made of it.
        sides: of a profile's record, with their `lines`.

    Returns:
        Lines with `sign` (`-`, `+` or a space), `code`, their numbers `before` and `now`, and µs of a step,
        `before_us` and `now_us`; None where a side has no such line, or spends no time there.
    """
    before, now = (path.read_text(encoding="utf-8") for path in (original, rewritten))
    old, new = _times(sides["original"], original), _times(sides["ours"], rewritten)
    return [list(_lines(hunk, old, new)) for hunk in differences.rows(before, now)]


def _times(side: Mapping[str, Any], file: Path) -> dict[int, float]:
    found: dict[int, float] = {}
    for each in side["lines"]:
        name, _, number = str(each["line"] or "").rpartition(":")
        if name == file.name:
            found[int(number)] = each["us"]
    return found


def _lines(hunk: Sequence[differences.Row], old: Times, new: Times) -> Iterable[dict[str, Any]]:
    """A hunk as one column: of each change what went, then what came."""
    went: list[dict[str, Any]] = []
    came: list[dict[str, Any]] = []
    for row in hunk:
        if row.changed:
            went += [_line("-", row.left, None, old, new)] if row.left else []
            came += [_line("+", None, row.right, old, new)] if row.right else []
            continue
        yield from (*went, *came, _line(" ", row.left, row.right, old, new))
        went, came = [], []
    yield from (*went, *came)


def _line(
    sign: str, left: tuple[int, str] | None, right: tuple[int, str] | None, old: Times, new: Times
) -> dict[str, Any]:
    shown = right or left
    assert shown is not None
    return {
        "sign": sign,
        "before": left[0] if left else None,
        "now": right[0] if right else None,
        "before_us": old.get(left[0]) if left else None,
        "now_us": new.get(right[0]) if right else None,
        "code": shown[1],
    }
