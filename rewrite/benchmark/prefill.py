"""Prefill: a whole prompt into a cache, as `generate()` begins. Ours both ways; the original also compiled.

Ours is what `generate()` does, which reads a short prompt in a graph where the package decodes through one; its plain
forward, which is what a caller of the model gets, is a side of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.measure import timing

from .benchmark_plan import ORIGINAL, OURS, Plan
from .overhead import new_graph
from .token_parity import keeping

if TYPE_CHECKING:
    from torch import Tensor

COMPILED, FORWARD = "compiled", "forward"
WARM_UP = 3


def measure(plan: Plan, ours: Any, theirs: Any, prompts: Callable[[int], Tensor], compiled: bool) -> dict[str, Any]:
    """Times of ours and of the original, eager or compiled by `torch.compile` with its defaults; ms and ratios."""
    reading, forward = _reading(ours, max(prompts(0).shape[1], 1)), _forward(ours)
    forwards = {OURS: reading or forward, ORIGINAL: _forward(theirs)}
    if reading is not None:
        forwards[FORWARD] = forward
    if compiled:
        import torch

        torch._dynamo.reset()
        forwards = {OURS: forwards[OURS], COMPILED: torch.compile(_forward(theirs), dynamic=False)}
    sides: dict[str, Any] = {}
    for name, forward in list(forwards.items()):
        try:
            for number in range(WARM_UP):
                timing.wall_ms(plan.device, lambda: forward(prompts(-1 - number)))  # noqa: B023
        except Exception as error:  # compilers and the code under test raise what they like
            sides[name] = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
            del forwards[name]
    calls = {name: _timer(plan.device, forward, prompts) for name, forward in forwards.items()}
    most = plan.rounds[1] if plan.device == "cpu" else 3 * plan.rounds[1]
    times = timing.interleaved(calls, (plan.rounds[0], most), plan.seconds / 3) if calls else {}
    for name, values in times.items():
        low, high = timing.interval(values)
        sides[name] = {"ms": median(values), "low_ms": low, "high_ms": high, "rounds": len(values)}
        if name != OURS and OURS in times:
            sides[name]["ours"] = timing.ratio(values, times[OURS])
    if compiled and OURS in sides:
        sides["ours beside compiled"] = sides.pop(OURS)
    return sides


def _reading(model: Any, length: int) -> Callable[[Tensor], Any] | None:
    """The package's own way to read a prompt of `length` tokens; None where it decodes without a graph."""
    graph = new_graph(model, 1, length)
    return None if graph is None else graph.prefill


def _forward(model: Any) -> Callable[[Tensor], Any]:
    keep = keeping(model, 1)
    return lambda ids: model(input_ids=ids, use_cache=True, **keep).logits


def _timer(device: str, forward: Callable[[Tensor], Any], prompts: Callable[[int], Tensor]) -> Callable[[int], float]:
    def timed(number: int) -> float:
        ids = prompts(number)
        return timing.wall_ms(device, lambda: forward(ids))

    return timed
