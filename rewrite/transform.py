"""The contract between the engine and a transform: a transform proposes, the engine applies.

A transform names every place that looks like its business (`candidates`, broad), and for each says what it would
change (`Found`) or why it leaves it alone (`Skip`, with a reason from its own closed set). It never edits the tree.

Reading on: `transforms/fuse_gate_up.py`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.proposal import Candidate, Edit, Found, Skip

__all__ = [
    "COMMON_REASONS",
    "Candidate",
    "Edit",
    "Found",
    "Numerics",
    "Rewritten",
    "Skip",
    "SkippedSite",
    "Stage",
    "Transform",
    "TransformReport",
    "order",
]


class Numerics(enum.Enum):
    """What a transform does to the numbers."""

    EXACT = "exact"
    """The same operations in the same order: equal bits."""
    REORDERED = "reordered"
    """The same mathematics; sums are taken in another order or intermediate roundings are left out."""
    APPROXIMATE = "approximate"
    """Another, close result; only on request."""


class Stage(enum.Enum):
    """What a transform speeds up; the ladder of `rewrite bench` climbs in this order."""

    OPERATOR = "operator"
    """Operators, in any forward."""
    GRAPH = "graph"
    """The loop: what lets a decode step be captured in a graph."""
    STEP = "step"
    """The step inside that graph."""


COMMON_REASONS: Mapping[str, str] = {
    "loses_comment": "rewriting would drop a comment",
    "name_taken": "the file has a name of its own that the new code would call, or a method would be called",
}
"""Reasons of every transform. The engine looks at what is written: comments, and the names in `Found.uses`."""


class Transform(ABC):
    """One rewrite rule.

    The class docstring has the headings What it does, Why, What it needs, Numerics and Known limits.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    numerics: ClassVar[Numerics]
    reasons: ClassVar[Mapping[str, str]]
    """Every reason that `match` may skip with beside `COMMON_REASONS`, and what it means."""
    after: ClassVar[tuple[str, ...]] = ()
    """Names of the transforms whose output this one reads."""
    on_request: ClassVar[bool] = False
    stage: ClassVar[Stage] = Stage.OPERATOR
    in_decode_loop: ClassVar[bool] = False
    """Whether what it writes does something in the decode loop alone."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Of the transform that gives classes a decode loop: what it would take where it skips one, by reason."""
    keeps_from_graph: ClassVar[tuple[str, ...]] = ()
    """Reasons of sites that, left as they are, ask the device how to go on: a step with one is in no graph."""

    @abstractmethod
    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Name every place in `module` that looks like this transform's business, in source order."""

    @abstractmethod
    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Say what to change at `candidate`, or why not."""


@dataclass(frozen=True)
class SkippedSite:
    """A candidate that stays as it was."""

    site: str
    reason: str
    detail: str = ""


@dataclass(frozen=True)
class TransformReport:
    """What one transform did to one file."""

    name: str
    rewritten: tuple[str, ...] = ()
    skipped: tuple[SkippedSite, ...] = ()
    unreached: tuple[str, ...] = ()
    """Of the rewritten ones, those that do something in a decode loop alone, and no class with one reaches them."""


@dataclass(frozen=True)
class Rewritten:
    """The engine's result: the new text and what happened at every candidate."""

    text: str
    transforms: tuple[TransformReport, ...]
    runtime: tuple[str, ...] = field(default=())
    """What the text imports of the runtime, as `room.function`."""
    decode_loops: Mapping[str, str] = field(default_factory=dict)
    """Of every class that generates whether it has a decode loop: `yes`, or `no`, why, and what it would take."""

    @property
    def sites(self) -> int:
        """Number of rewritten sites."""
        return sum(len(report.rewritten) for report in self.transforms)


def order(transforms: Sequence[Transform]) -> list[Transform]:
    """Sort transforms so that each comes after those it reads from, alphabetically otherwise."""
    waiting = sorted(transforms, key=lambda transform: transform.name)
    present = {transform.name for transform in waiting}
    done: list[Transform] = []
    while waiting:
        placed = {transform.name for transform in done}
        ready = next((t for t in waiting if all(n in placed or n not in present for n in t.after)), None)
        if ready is None:
            raise ValueError(f"transforms wait for each other: {', '.join(t.name for t in waiting)}")
        waiting.remove(ready)
        done.append(ready)
    return done
