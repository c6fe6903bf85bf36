"""Which of several ways computes each size of a call the fastest, and how that is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

LEAST_GAIN = 0.02
"""A way has to be faster than the usual one by this share of its time."""


@dataclass(frozen=True)
class Choice:
    """What came of one size."""

    size: str
    calls: int
    way: str
    us: dict[str, float]
    """Microseconds of a call by each way that computes it, the usual one among them."""


@dataclass(frozen=True)
class Outcome:
    """What was found, on which chip, and where it was written."""

    chip: str
    choices: list[Choice]
    path: Path


class Bench(Protocol):
    """Something that times calls."""

    def times(self, size: Any) -> dict[str, float]:
        """Return the microseconds of a call by each way that computes a size, the usual one among them."""
        ...


def choose(
    bench: Bench, sizes: Mapping[Any, int], usual: str, progress: Callable[[str], None] = lambda message: None
) -> list[Choice]:
    """Return the fastest way of every size; the usual one where none is faster beyond the noise."""
    choices = []
    for size in sorted(sizes):
        progress(str(size))
        us = bench.times(size)
        fastest = min(us, key=lambda name: (us[name], name))
        way = fastest if us[fastest] < us[usual] * (1 - LEAST_GAIN) else usual
        choices.append(Choice(str(size), sizes[size], way, us))
    return choices


def rows(choices: Sequence[Choice], usual: str) -> list[tuple[str, ...]]:
    """A row of text for each size: calls, the usual time, the way taken (`=` for the usual one) and its time."""
    return [
        (c.size, str(c.calls), f"{c.us[usual]:.4g}", c.way if c.way != usual else "=", f"{c.us[c.way]:.4g}")
        for c in choices
    ]
