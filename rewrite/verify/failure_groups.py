"""Failed checks that likely have one cause: those of a gate that fail in the same way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .judging.verdict import Check, Gate, Verdict

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|\bnan\b|\binf\b")
MOST_FAMILIES = 3


@dataclass(frozen=True)
class Cause:
    """Checks that fail in the same way: the same figure is too large, or the same error is raised."""

    gate: str
    kind: str
    """`relative error`, `TypeError: forward() got …`."""
    checks: tuple[Check, ...]

    @property
    def worst(self) -> Check:
        """The one with the largest error; the first where none is measured."""
        return max(self.checks, key=lambda check: _error(check))

    @property
    def cheapest(self) -> Check:
        """The one that took the least time."""
        return min(self.checks, key=lambda check: check.seconds)

    def others(self) -> str:
        """Say how many there are beside the worst, and of which families (`fp64 sdpa, base`)."""
        worst = self.worst
        families = Counter(check.name.partition(": ")[0] for check in self.checks if check is not worst)
        shown = [f"{name} × {count}" if count > 1 else name for name, count in families.most_common(MOST_FAMILIES)]
        rest = sum(families.values()) - sum(count for _, count in families.most_common(MOST_FAMILIES))
        return f"{len(self.checks) - 1} more ({self.kind}): {'; '.join(shown)}{f'; {rest} others' if rest else ''}"


def causes(gate: Gate) -> list[Cause]:
    """Group the failures of a gate, the largest group first."""
    found: dict[str, list[Check]] = {}
    for check in gate.failures:
        found.setdefault(kind(check.detail), []).append(check)
    several = [Cause(gate.name, name, tuple(checks)) for name, checks in found.items()]
    return sorted(several, key=lambda cause: -len(cause.checks))


def of_verdict(verdict: Verdict) -> list[Cause]:
    """Group the failures of every gate."""
    return [cause for gate in verdict.gates for cause in causes(gate)]


def kind(detail: str) -> str:
    """Return in which way a check failed: which error is too large, else its words up to a place or number."""
    measured = re.search(r"\b[A-Za-z]+ error (?=[\d.])", detail)
    if measured:
        return measured.group().strip()
    head = re.split(r" at |: expected| \(", detail, maxsplit=1)[0]
    number = _NUMBER.search(head)
    words = head[: number.start()] if number else head
    return " ".join(words.split()).rstrip(":,") or "wrong"


def _error(check: Check) -> float:
    value = check.figures.get("max", 0.0)
    return float(value) if isinstance(value, (int, float)) else float("inf")


def names(found: Sequence[Cause]) -> tuple[str, ...]:
    """Return the names of all checks of some causes."""
    return tuple(dict.fromkeys(check.name for cause in found for check in cause.checks))
