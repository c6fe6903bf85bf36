"""`--explain-missing`: what a change of the user's file would gain, from the places that a rewriting left alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rewrite.transform import COMMON_REASONS, Stage

if TYPE_CHECKING:
    from rewrite.codemod.build import Build
    from rewrite.console.console import Screen
    from rewrite.transform import SkippedSite, Transform

CHANGES: Mapping[str, str] = {
    "argument_changes": "give all of them the same local, with nothing written in between",
    "conditional": "put the sum and the norm into one block, or the whole under the condition",
    "control_flow": "write it as assignments and one return, in a function of its own",
    "different_blocks": "call them in one block",
    "in_place": "write the sum to a name: `x = x + y`, not `x += y`",
    "loses_comment": "move the comment to a line of its own in front of the statement",
    "name_taken": "rename what has the name in the file",
    "no_module": "make it the `forward` of a class that holds the weight and the eps",
    "norm_not_fused": "let the class compute what nn.RMSNorm or nn.LayerNorm does, or be one of these",
    "not_linear": "build each as nn.Linear in `__init__`, whatever the configuration says",
    "not_proven": "call only modules and functions whose code is in this file, or torch's",
    "order": "put the sum directly in front of the norm",
    "other_use": "read the repeated heads only in the product, or in torch's attention",
    "rebound": "bind the name once, and use it for nothing else",
    "unknown_norm": "build the norm in `__init__` as nn.LayerNorm, nn.RMSNorm or a class of this file",
}
"""What to change, by the reason of a skip; of other reasons, the reason itself says it."""
MOST_GROUPS = 7
MOST_PLACES = 2
LONGEST = 110
"""Characters of a line."""
_ORDER = (Stage.GRAPH, Stage.OPERATOR, Stage.STEP)


@dataclass(frozen=True)
class Missing:
    """Places that one change would make sites of one transform."""

    transform: str
    gain: str
    why: str
    change: str
    places: tuple[Place, ...]
    stage: Stage


@dataclass(frozen=True)
class Place:
    """A place that was left alone."""

    line: int
    """Of the user's file."""
    site: str
    detail: str


def missing(built: Build, transforms: Sequence[Transform]) -> list[Missing]:
    """Return what is missing, what speeds up most first."""
    known = {transform.name: transform for transform in transforms}
    lines = _Lines(built.source.text)
    groups: dict[tuple[str, str], list[SkippedSite]] = {}
    for report in built.rewritten.transforms:
        for skip in report.skipped:
            groups.setdefault((report.name, skip.reason), []).append(skip)
    found = []
    for (name, reason), skips in groups.items():
        transform = known[name]
        why = {**COMMON_REASONS, **transform.reasons}[reason]
        change = transform.needs.get(reason) or CHANGES.get(reason, "")
        places = tuple(Place(lines.of(skip), skip.site, skip.detail) for skip in skips)
        found.append(Missing(name, transform.summary, why, change, places, transform.stage))
    return sorted(found, key=lambda one: (_ORDER.index(one.stage), -len(one.places), one.transform))


def show_missing(screen: Screen, built: Build, transforms: Sequence[Transform]) -> None:
    """Say in one screen what is missing, and which change would gain it."""
    found = missing(built, transforms)
    places = sum(len(one.places) for one in found)
    screen.line("sites", f"{built.rewritten.sites} rewritten, {places} left as they are")
    for one in found[:MOST_GROUPS]:
        screen.line("missing", f"{one.transform} × {len(one.places)}: {one.gain}", "bold")
        screen.line("", _cut(f"since {one.why}"))
        if one.change:
            screen.line("change", _cut(one.change))
        for place in one.places[:MOST_PLACES]:
            detail = f": {place.detail}" if place.detail else ""
            screen.line("", _cut(f"line {place.line}, {place.site}{detail}"))
        if len(one.places) > MOST_PLACES:
            rest = ", ".join(str(place.line) for place in one.places[MOST_PLACES:])
            screen.line("", _cut(f"and lines {rest}"))
    if len(found) > MOST_GROUPS:
        screen.line("", f"and {len(found) - MOST_GROUPS} more kinds: --json has them all")


def of_missing(built: Build, transforms: Sequence[Transform]) -> list[dict[str, Any]]:
    """Return what is missing for a report."""
    return [
        {
            "transform": one.transform,
            "why": one.why,
            "change": one.change,
            "places": [{"line": place.line, "site": place.site, "detail": place.detail} for place in one.places],
        }
        for one in missing(built, transforms)
    ]


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


class _Lines:
    """Where the skipped sites of a file are in its text."""

    def __init__(self, text: str):
        self.text = text.splitlines()
        self.ranges = dict(_ranges(ast.parse(text), ""))

    def of(self, skip: SkippedSite) -> int:
        """Return the line of what stands in the way, else of the site, else of the function or class around it."""
        where, _, label = skip.site.partition(": ")
        first, last = self.ranges.get(where) or self.ranges.get(where.split(".")[0]) or (1, len(self.text))
        quoted = re.findall(r"`([^`\n]+)`|(self\.\w+)", skip.detail)
        wanted = [next(filter(None, found)) for found in quoted] + [skip.detail.split("\n")[0], label.split(",")[0]]
        inside = range(first, last + 1)
        for text in filter(None, (want.strip() for want in wanted)):
            pattern = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
            if (line := next((n for n in inside if pattern.search(self.text[n - 1])), None)) is not None:
                return line
        return first


def _ranges(node: ast.AST, around: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{around}{inner.name}"
            yield name, (inner.lineno, inner.end_lineno or inner.lineno)
            yield from _ranges(inner, f"{name}.")
        else:
            yield from _ranges(inner, around)
