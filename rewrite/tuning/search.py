"""Coordinate descent over the entries of a step: one name at a time, judged by the time of the whole step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from rewrite.measure.timing import ratio

from .candidates import Entry

Table = dict[str, Entry]

SCREENING, CONFIRMING = 5, 15
"""Blocks of replays that each table gets."""
LEAST_GAIN = 0.001
"""A step has to get faster by this share at the lower end of the 95% interval."""
CONFIRMATIONS = 2
"""How often it has to: the best of 15 screened by chance alone passes once in 40 times, twice in 1600."""


class Bench(Protocol):
    """Something that times steps."""

    def in_use(self, table: Mapping[str, Entry]) -> dict[str, tuple[Entry, int]]:
        """Return what a step asks for with `table`: by name, what it got and how often."""
        ...

    def times(self, tables: Sequence[Mapping[str, Entry]], blocks: int) -> list[list[float] | None]:
        """Return ms of a step for each table, `blocks` figures each, taken in turn; None where it cannot run."""
        ...


@dataclass(frozen=True)
class Change:
    """What came of one name: `after` is `before` where nothing was faster. Times are of the whole step, in ms."""

    name: str
    calls: int
    before: Entry
    after: Entry
    step_before: float
    step_after: float

    @property
    def saved(self) -> float:
        """Microseconds a call."""
        return (self.step_before - self.step_after) * 1e3 / self.calls


def search(
    bench: Bench,
    options: Callable[[str, Entry], Sequence[Entry]],
    seconds: float = float("inf"),
    progress: Callable[[str], None] = lambda message: None,
) -> list[Change]:
    """Try the options of every name that the step uses; names that come into use on the way have their turn too."""
    deadline = time.perf_counter() + seconds
    best: Table = {}
    changes: list[Change] = []
    while time.perf_counter() < deadline:
        used = bench.in_use(best)
        name = next((name for name in used if all(change.name != name for change in changes)), None)
        if name is None:
            break
        entry, calls = used[name]
        progress(name)
        best[name] = entry
        change = _one(bench, best, name, calls, options(name, entry))
        best[name] = change.after
        changes.append(change)
    return changes


def _one(bench: Bench, best: Table, name: str, calls: int, options: Sequence[Entry]) -> Change:
    before = best[name]
    tables = [best, *({**best, name: option} for option in options)]
    screened = [(median(found), number) for number, found in enumerate(bench.times(tables, SCREENING)) if found]
    now = next(figure for figure, number in screened if number == 0)
    figure, winner = min(screened)
    unchanged = Change(name, calls, before, before, now, now)
    if winner == 0 or figure > now * (1 - LEAST_GAIN):
        return unchanged
    blocks: tuple[list[float], list[float]] = ([], [])
    for _ in range(CONFIRMATIONS):
        old, new = bench.times([best, tables[winner]], CONFIRMING)
        if old is None or new is None or ratio(old, new)["low"] <= 1 + LEAST_GAIN:
            return unchanged
        blocks[0].extend(old)
        blocks[1].extend(new)
    return Change(name, calls, before, tables[winner][name], median(blocks[0]), median(blocks[1]))
