"""Which of several ways to compute the same is the fastest on the card at hand: a trial of a few milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

import torch

ROUNDS = 5
"""Measurements of each way, in turn, whose median counts."""
CALLS = 4
"""Calls of one measurement."""
GAIN = 0.95
"""What a way takes, as a share of the usual one, to be preferred to that: less is noise, and would make the numbers of
two processes differ for nothing."""
SLEEP = 2_000_000
"""Cycles that the device waits before a measurement, so that the host is ahead of it: about a millisecond."""

Way = TypeVar("Way")


def fastest(ways: Mapping[Way, Callable[[], object]], usual: Way) -> Way:
    """Return the way that takes the least of the device's time on the current stream, outside of a capture.

    Args:
        ways: what to call; each may be called a few dozen times.
        usual: the one that another has to beat clearly.
    """
    for run in ways.values():  # compiles, and builds plans
        run()
    times: dict[Way, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            times[name].append(_ms(run))
    return choose({name: median(found) for name, found in times.items()}, usual)


def choose(times: Mapping[Way, float], usual: Way) -> Way:
    """Return the way of the shortest time; the usual one unless another is clearly faster."""
    best = min(times, key=lambda name: times[name])
    return best if times[best] < GAIN * times[usual] else usual


def _ms(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS
