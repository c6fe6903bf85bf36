"""What runs on the GPU for one token: kernels, counted and timed by CUPTI, in graphs too."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import categories

if TYPE_CHECKING:
    from torch import Tensor

    from .contender import Contender

TOP = 16
_COPY = re.compile(r"copy|CatArray|Memcpy DtoD", re.IGNORECASE)
_TRANSFER = ("Memcpy", "Memset")


def is_kernel(name: str) -> bool:
    """Return whether a GPU activity is a kernel: copies and fills of the driver are none."""
    return not name.startswith(_TRANSFER)


def is_copy(name: str) -> bool:
    """Return whether a GPU activity only moves memory: torch's copies and concatenations, and the driver's."""
    return bool(_COPY.search(name)) and not name.startswith(("Memcpy HtoD", "Memcpy DtoH", "Memset"))


def kernels(side: Contender, prompt: Tensor) -> dict[str, Any]:
    """Kernels per token, GPU ms per token, also by category, the largest kernels and all copies.

    All from the difference of two generations.
    A graph's replay is counted kernel by kernel.
    """
    steps = min(side.steps, 64)
    long, short = (_census(side, prompt, side.short + more) for more in (steps, 0))
    counts, times = _difference(long[0], short[0], steps), _difference(long[1], short[1], steps)
    ranked = sorted(times, key=lambda name: -times[name])
    row = lambda name: {"name": name[:120], "per_token": counts.get(name, 0.0), "us": times[name]}
    kernels = [name for name in ranked if is_kernel(name)]
    return {
        "kernels_per_token": sum(count for name, count in counts.items() if is_kernel(name)),
        "gpu_ms_per_token": sum(times[name] for name in kernels) / 1e3,
        "largest": [row(name) for name in kernels[:TOP]],
        "copies": [row(name) for name in ranked if is_copy(name)],
        "categories": by_category(times),
    }


def by_category(times: Mapping[str, float]) -> dict[str, float]:
    """Sum µs by what each kernel is for; as `rewrite profile` divides them, in its order."""
    sums: defaultdict[str, float] = defaultdict(float)
    for name, us in times.items():
        sums[categories.category(name)] += us
    return {kind: sums[kind] for kind in categories.CATEGORIES if kind in sums}


def _difference(long: Mapping[str, float], short: Mapping[str, float], steps: int) -> dict[str, float]:
    """Per token; what is missing in one is 0."""
    return {name: (long[name] - short[name]) / steps for name in {**long, **short} if long[name] != short[name]}


def _census(side: Contender, prompt: Tensor, new: int) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """How often each kernel, copy and fill ran in a generation not the first of its length, and for how many µs."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    counts: defaultdict[str, float] = defaultdict(float)
    times: defaultdict[str, float] = defaultdict(float)
    with torch.no_grad():
        side.generate(prompt, new)  # what captures and proves has its own kernels
    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        side.generate(prompt, new)
        torch.cuda.synchronize()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            counts[event.name] += 1
            times[event.name] += event.time_range.elapsed_us()
    return counts, times
