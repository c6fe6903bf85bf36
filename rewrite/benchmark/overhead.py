"""What the loop costs: a token of `generate()` against a bare replay of the graph that it replays."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.measure import timing
from rewrite.measure.runtime_part import runtime_part

if TYPE_CHECKING:
    from torch import Tensor

    from .benchmark_models import Subject

ROUNDS = 7
ROUNDING = 256
"""As in `runtime/decode/graph_cache.py`: capacities are multiples of this."""


def new_graph(model: Any, rows: int, tokens: int) -> Any:
    """The package's `DecodeGraph` with room for `tokens` a row; None where the package decodes without one.

    Its class has no decode loop, or nothing is captured on the model's device.
    """
    package = type(model).__module__.rpartition(".")[0]
    if not isinstance(model, runtime_part(package, "generate/generation").GraphGeneration):
        return None
    graph = runtime_part(package, "decode/step_graph").DecodeGraph(model, rows, -(-tokens // ROUNDING) * ROUNDING)
    return graph if graph.captures else None


def replays(subject: Subject, model: Any, prompt: Tensor, steps: int, room: int) -> Callable[[int], float] | None:
    """A function that replays a greedy step `steps` times after `prompt` and returns ms a replay.

    The cache has as many slots as `generate()` gives one for `room` more tokens. None where the package decodes
    without a graph: its class has no decode loop, or the model's step is not captured.
    """
    rows, length = prompt.shape
    graph = new_graph(model, rows, length + room)
    if graph is None:
        return None
    package = subject.rewritten.__module__.rpartition(".")[0]
    sampling = runtime_part(package, "sampling/sampling").Sampling([], False, None, None)
    tokens = graph.prefill(prompt).argmax(-1)
    program = graph.program(sampling)
    position_ids = prompt.new_full((rows, 1), length)

    def run() -> None:
        for _ in range(steps):
            program.replay()

    def timed(number: int) -> float:
        graph.begin(position_ids, None)
        graph.state.input_ids.copy_(tokens[:, None])
        return timing.wall_ms(str(prompt.device), run) / steps

    return timed


def measure(subject: Subject, model: Any, side: Any, prompt: Tensor) -> dict[str, float] | None:
    """ms of a bare replay and of a token of `generate()`, taken in turn, and what the loop adds."""
    device = str(prompt.device)
    bare = replays(subject, model, prompt, side.steps, side.short + side.steps)
    if bare is None:
        return None

    def token(number: int) -> float:
        short = timing.wall_ms(device, lambda: side.generate(prompt, side.short))
        long = timing.wall_ms(device, lambda: side.generate(prompt, side.short + side.steps))
        return (long - short) / float(side.steps)

    for warm in (bare, token):
        warm(0)
    times = timing.interleaved({"bare": bare, "token": token}, (ROUNDS, ROUNDS), 0.0)
    ratio = timing.ratio(times["token"], times["bare"])
    return {
        "replay_ms": median(times["bare"]),
        "token_ms": median(times["token"]),
        "overhead": ratio["value"] - 1,
        "overhead_low": ratio["low"] - 1,
        "overhead_high": ratio["high"] - 1,
    }
