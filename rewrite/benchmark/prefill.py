"""Prefill: the forward of a whole prompt into a new cache, as `generate()` begins; the original also compiled."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from . import timing
from .parity import keeping
from .plan import ORIGINAL, OURS, Plan

if TYPE_CHECKING:
    from torch import Tensor

COMPILED = "compiled"
WARM_UP = 3


def measure(plan: Plan, ours: Any, theirs: Any, prompts: Callable[[int], Tensor], compiled: bool) -> dict[str, Any]:
    """Times of ours and of the original, eager or compiled by `torch.compile` with its defaults; ms and ratios."""
    forwards = {OURS: _forward(ours), ORIGINAL: _forward(theirs)}
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


def _forward(model: Any) -> Callable[[Tensor], Any]:
    keep = keeping(model, 1)
    return lambda ids: model(input_ids=ids, use_cache=True, **keep).logits


def _timer(device: str, forward: Callable[[Tensor], Any], prompts: Callable[[int], Tensor]) -> Callable[[int], float]:
    def timed(number: int) -> float:
        ids = prompts(number)
        return timing.wall_ms(device, lambda: forward(ids))

    return timed
