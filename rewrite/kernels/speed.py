"""A speed model on paper: how long each launch of a decode step takes on a card, and what bounds it. Nothing is run.

    time = ramp (+ gap)  +  the longest of

        memory      bytes / what the card's memory reaches, by kind of kernel
        processor   bytes of the busiest processor / `OVERLOAD` even shares of that
        in flight   bytes / (bytes on their way / latency)
        units       cycles of the busiest processor's vector, matrix or LDS units or cache / clock (AMD alone)
        path        vector cycles of one program and, where programs count themselves, of the last one's sum / clock

The constants are in `cards`, the cycles are read from the assembly (`issued`). What is left out: instructions of
NVIDIA's kernels, the L2 cache (what one launch writes and the next reads counts for nothing), and clocks that fall
under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import cards
from .cards import Card
from .chips import MODELLED, SIMDS
from .planned import LIBRARY, Planned

LEAST_FILL = 0.85
REST = 4
"""Launches of a step beside its layers and head: the embedding, the rotary tables, and two that choose the token."""

Bound = Literal["memory", "processor", "in flight", "vector", "matrix", "LDS", "cache", "path", "start"]


@dataclass(frozen=True)
class Timed:
    """A launch with what the model says of it."""

    planned: Planned
    fill: float | None
    """Average over greatest number of programs of a processor; None for what is not ours or moves nothing."""
    flight: float | None
    """Bytes on their way over those that the card's memory wants; None likewise."""
    us: float
    """Of one launch."""
    over: float | None
    """What takes the most of it, without the ramp, over its bytes at the card's rate; None likewise."""
    bound: Bound
    """What takes the most of it; `start` where the ramp does."""

    def to_json(self) -> dict[str, Any]:
        """The launch as plain JSON values."""
        return {**vars(self.planned), "fill": self.fill, "in_flight": self.flight, "us": self.us, "over": self.over,
                "bound": self.bound}  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A step by the model."""

    card: Card
    model: str
    rows: int
    launches: tuple[Timed, ...]

    @property
    def ms(self) -> float:
        """Of the whole step."""
        rest = REST * (cards.RAMP_SMALL + _gap(self.card, self.card.arch.startswith("sm_")))
        return (sum(one.us * one.planned.count for one in self.launches) + rest) / 1e3

    @property
    def limit_ms(self) -> float:
        """Of reading weights and cache at the rate that the card reaches."""
        return sum(one.planned.moved * one.planned.count for one in self.launches) / self.card.rate / 1e3


def predict(card: Card, model: str, rows: int, planned: Sequence[Planned]) -> Predicted:
    """Return the model's times of the launches of a step."""
    return Predicted(card, model, rows, tuple(timed(card, one) for one in planned))


def timed(card: Card, one: Planned) -> Timed:
    """Return the model's time of one launch."""
    ramp, share = _kind(one)
    ramp += _gap(card, one.overlaps or one.kernel == LIBRARY)
    if not one.moved:
        return Timed(one, None, None, ramp, None, "start")
    terms: dict[Bound, float] = {"memory": one.moved / (card.rate * share)}
    if one.kernel == LIBRARY:
        return Timed(one, None, None, ramp + terms["memory"], None, _bound(ramp, terms))
    most = -(-one.programs // card.processors)
    terms["processor"] = one.moved / one.programs * most / (card.rate / card.processors * cards.OVERLOAD)
    on_the_way = in_flight(card, one)
    terms["in flight"] = one.moved * card.latency / on_the_way
    terms |= _units(card, one, most)
    fill = one.programs / (card.processors * most)
    longest = max(terms.values())
    over = longest * card.rate / one.moved
    return Timed(one, fill, on_the_way / card.wanted, ramp + longest, over, _bound(ramp, terms))


def _units(card: Card, one: Planned, most: int) -> dict[Bound, float]:
    """Return how long the units of the processor with the most programs are busy."""
    waves = one.threads / MODELLED[card.arch].wave
    cycles: dict[Bound, float] = {
        "vector": one.vector / SIMDS, "matrix": one.multiply / SIMDS, "LDS": one.lds, "cache": one.cache
    }  # fmt: skip
    us = {unit: most * waves * taken / (card.clock * 1e3) for unit, taken in cycles.items() if taken}
    if one.tail:  # waves of one program share the SIMD units, and there is nothing else to run
        us["path"] = max(waves / SIMDS, 1.0) * (one.vector + one.tail) / (card.clock * 1e3)
    return us


def in_flight(card: Card, one: Planned) -> float:
    """Return how many bytes are on their way while all processors are busy: as read, else what can be held."""
    held = one.threads * one.flight or max(one.shared, one.threads * one.registers * 4 * cards.IN_REGISTERS)
    there = min(one.programs, max(one.resident, 1) * card.processors)
    return there * min(held, one.moved / one.programs)


def _kind(one: Planned) -> tuple[float, float]:
    """Return the ramp of a launch in µs, and its part of the card's rate."""
    if one.kernel == LIBRARY:
        return cards.RAMP_LIBRARY, cards.SHARE_MATRIX
    if one.part == "attention":
        return cards.RAMP_ATTENTION, cards.SHARE_ATTENTION
    if not one.moved:
        return cards.RAMP_SMALL, 1.0
    return (cards.RAMP_MATRIX, cards.SHARE_MATRIX) if one.matrix else (cards.RAMP, 1.0)


def _gap(card: Card, overlaps: bool) -> float:
    return 0.0 if overlaps and card.arch.startswith("sm_") else cards.GAP


def _bound(ramp: float, terms: dict[Bound, float]) -> Bound:
    longest = max(terms, key=lambda name: terms[name])
    return longest if terms[longest] > ramp else "start"
