"""The difference of two texts: a patch that git applies, its statistics by class and function, aligned rows."""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

STYLES = ("unified", "side-by-side", "stat", "none")
CONTEXT = 3
_NO_NEWLINE = "\n\\ No newline at end of file\n"


@dataclass(frozen=True)
class Change:
    """Lines added and removed in one class, method or function."""

    where: str
    added: int
    removed: int


@dataclass(frozen=True)
class Row:
    """One line of a side-by-side view; None where a side has no line."""

    left: tuple[int, str] | None
    right: tuple[int, str] | None
    changed: bool


def unified(before: str, after: str, path: str) -> str:
    """Return a patch of the file `path`, empty if the texts are equal.

    Lines end at `\\n` only, so that carriage returns and form feeds are part of a line as they are for git.
    """
    lines = difflib.unified_diff(_lines(before), _lines(after), _header("a", path), _header("b", path), n=CONTEXT)
    return "".join(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines)


def statistics(before: str, after: str) -> list[Change]:
    """Return what changed by class and function, in the order of the texts."""
    old, new = _owners(before), _owners(after)
    added, removed = Counter[str](), Counter[str]()
    matcher = difflib.SequenceMatcher(None, _lines(before), _lines(after))
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            removed.update(old[i1:i2])
            added.update(new[j1:j2])
    places = dict.fromkeys([*new, *old])
    return [Change(place, added[place], removed[place]) for place in places if added[place] or removed[place]]


def total(changes: Sequence[Change], path: str) -> str:
    """Return in one line how much changed in the file `path`."""
    added, removed = sum(change.added for change in changes), sum(change.removed for change in changes)
    return f"{path}: {len(changes)} places changed, {added} insertions(+), {removed} deletions(-)"


def hunks_in(before: str, after: str, places: Sequence[str]) -> Iterator[str]:
    """Yield the changed lines, with one line around them, of the classes and functions named."""
    old, new = _owners(before), _owners(after)
    matcher = difflib.SequenceMatcher(None, _lines(before), _lines(after))
    for group in matcher.get_grouped_opcodes(1):
        owners = {old[i] for tag, i1, i2, _, _ in group for i in range(i1, i2) if tag != "equal"}
        owners |= {new[j] for tag, _, _, j1, j2 in group for j in range(j1, j2) if tag != "equal"}
        if found := owners & set(places):
            yield f"@@ {sorted(found)[0]} @@\n"
            for tag, i1, i2, j1, j2 in group:
                if tag == "equal":
                    yield from (f" {line}" for line in _lines(before)[i1:i2])
                else:
                    yield from (f"-{line}" for line in _lines(before)[i1:i2])
                    yield from (f"+{line}" for line in _lines(after)[j1:j2])


def rows(before: str, after: str) -> Iterator[list[Row]]:
    """Yield hunks of aligned rows with `CONTEXT` equal lines around each change."""
    old, new = before.split("\n"), after.split("\n")
    for group in difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(CONTEXT):
        hunk: list[Row] = []
        for tag, i1, i2, j1, j2 in group:
            for offset in range(max(i2 - i1, j2 - j1)):
                left = (i1 + offset + 1, old[i1 + offset]) if i1 + offset < i2 else None
                right = (j1 + offset + 1, new[j1 + offset]) if j1 + offset < j2 else None
                hunk.append(Row(left, right, tag != "equal"))
        yield hunk


def _lines(text: str) -> list[str]:
    """Return the lines of `text` with their `\\n`."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _header(side: str, path: str) -> str:
    """Return a file name for a patch header; git ends names that hold a space with a tab."""
    return f"{side}/{path}\t" if " " in path else f"{side}/{path}"


def _owners(text: str) -> list[str]:
    """Return for every line the class, method or function that it is part of; of a text that is no Python, none."""
    owners = ["(top of the file)"] * len(_lines(text))
    try:
        body = ast.parse(text.removeprefix("\ufeff")).body
    except (SyntaxError, ValueError):  # conflict markers, an edit that is not finished: its lines differ all the same
        return owners
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            _own(owners, node, node.name)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    _own(owners, inner, f"{node.name}.{inner.name}")
    return owners


def _own(owners: list[str], node: ast.ClassDef | ast.FunctionDef, name: str) -> None:
    decorators: Sequence[ast.expr] = node.decorator_list
    start = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    end = node.end_lineno or node.lineno
    owners[start:end] = [name] * (end - start)
