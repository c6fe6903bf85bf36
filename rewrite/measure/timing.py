"""Times of several sides taken in turn, their medians, and bootstrap intervals of the ratios."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

RESAMPLES = 2000


def wall_ms(device: str, call: Callable[[], Any]) -> float:
    """Milliseconds of a call between device-wide synchronisations, by the wall clock."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    with torch.no_grad():
        call()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3


def interleaved(
    calls: Mapping[str, Callable[[int], float]], rounds: tuple[int, int], seconds: float
) -> dict[str, list[float]]:
    """Call every side in turn, each round in another order, until `seconds` are over; each call returns its figure.

    Args:
        calls: by side; the argument is the number of the round.
        rounds: fewest and most rounds.
        seconds: when to stop between those.
    """
    names = list(calls)
    values: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + seconds
    for number in range(rounds[1]):
        if number >= rounds[0] and time.perf_counter() > deadline:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            values[name].append(calls[name](number))
    return values


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def ratio(theirs: Sequence[float], ours: Sequence[float], *, in_turn: bool = True) -> dict[str, float]:
    """median(theirs) / median(ours) and its 95% interval over resampled rounds.

    Args:
        theirs: figures of the one side.
        ours: of the other, in the same rounds.
        in_turn: whether there were such rounds; sides that ran one after the other are resampled apart.

    Raises:
        ValueError: if sides that ran in turn have not as many figures.
    """
    generator = random.Random(0)
    pairs = list(zip(theirs, ours, strict=True)) if in_turn else []
    drawn = []
    for _ in range(RESAMPLES):
        if in_turn:
            first, second = zip(*generator.choices(pairs, k=len(pairs)), strict=True)
        else:
            first, second = (tuple(generator.choices(values, k=len(values))) for values in (theirs, ours))
        drawn.append(median(first) / median(second))
    value = median(theirs) / median(ours)
    return {"value": value, "low": percentile(drawn, 0.025), "high": percentile(drawn, 0.975)}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median over resampled rounds."""
    generator = random.Random(0)
    drawn = [median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return percentile(drawn, 0.025), percentile(drawn, 0.975)
