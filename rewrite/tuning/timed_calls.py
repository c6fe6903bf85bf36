"""Times calls of one operator: in a graph on a GPU, so that the host's time is not in the figures."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

ROUNDS = 11
GRAPH_US = 400.0
"""Length of a graph, at 20 µs a call."""


def in_turn(timers: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median of what each timer says, asked in turn."""
    values: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(ROUNDS + 1):
        for name, timed in timers.items():
            value = timed()
            if turn:
                values[name].append(value)
    return {name: median(found) for name, found in values.items()}


def timer(
    run: Callable[[Any], Any],
    arguments: Sequence[Any],
    device: Any,
    kept: object = None,
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    calls: int | None = None,
) -> Callable[[], float] | None:
    """Return what times calls with each of `arguments` once, in µs a call; None if they cannot be captured.

    Args:
        run: what is called.
        arguments: as many as do not fit into a cache.
        device: a CPU's calls are timed by the clock.
        kept: lives as long as the graph.
        around: what the capture runs in.
        calls: in a graph; `GRAPH_US` long as a rule.
    """
    import torch

    if device.type != "cuda":
        return lambda: _wall_us(run, arguments)
    launches = calls or len(arguments) * max(1, math.ceil(GRAPH_US / 20 / len(arguments)))
    graph = torch.cuda.CUDAGraph()
    graph.kept = kept  # type: ignore[attr-defined]
    try:
        for argument in arguments:  # each may have something to prepare
            run(argument)
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph), around():
            for number in range(launches):
                run(arguments[number % len(arguments)])
    except RuntimeError:
        return None

    def timed() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(stop)) * 1e3 / launches

    return timed


def _wall_us(run: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    started = time.perf_counter()
    for argument in arguments:
        run(argument)
    return (time.perf_counter() - started) * 1e6 / len(arguments)
