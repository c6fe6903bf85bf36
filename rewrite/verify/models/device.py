"""Measurements on a device: synchronisation, memory bandwidth, kernels, peak memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rewrite.errors import DeviceNotUsable
from rewrite.measure.profiling import is_copy, is_kernel


def usable_device(name: str | None) -> str:
    """`name`; without one `cuda` (which is also what torch calls a ROCm device) if there is one, else `cpu`.

    Raises:
        DeviceNotUsable: torch cannot use the device asked for.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceNotUsable(name, str(error).splitlines()[0]) from error
    return name


@dataclass(frozen=True)
class Devices:
    """Devices of one kind, as torch names them, and the card they are."""

    names: tuple[str, ...] = ("cpu",)
    card: str = "a CPU"


def every(device: str) -> Devices:
    """`cpu`, one device, or with `cuda` all cards.

    Raises:
        DeviceNotUsable: torch cannot use it.
    """
    if device == "cpu":
        return Devices()
    import torch

    card = torch.cuda.get_device_name(usable_device(device))
    if device != "cuda":
        return Devices((device,), card)
    return Devices(tuple(f"cuda:{index}" for index in range(torch.cuda.device_count())), card)


def synchronise(device: str) -> None:
    """Wait for every stream of the device, whichever the code under test used."""
    import torch

    if device != "cpu":
        torch.cuda.synchronize(device)


def stopwatch(device: str, call: Callable[[Any, Any], Any], model: Any, ids: Any) -> tuple[float, float]:
    """Time a call without gradients. Returns ms by the wall clock between synchronisations, and by events or 0."""
    import torch

    start, stop = None, None
    synchronise(device)
    if device != "cpu":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
    started = time.perf_counter()
    with torch.no_grad():
        call(model, ids)
    if stop is not None:
        stop.record()
    synchronise(device)
    wall = (time.perf_counter() - started) * 1e3
    return wall, 0.0 if start is None or stop is None else float(start.elapsed_time(stop))


def memory_bandwidth(device: str) -> float:
    """Bytes per second that a large reduction reads: the memory limit, measured in the same run."""
    import torch

    values = torch.empty(
        2**31 if torch.cuda.mem_get_info(device)[0] > 2**34 else 2**28, dtype=torch.bfloat16, device=device
    )
    values.zero_()
    best = float("inf")
    for _ in range(8):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        values.view(torch.int32).amax()
        stop.record()
        torch.cuda.synchronize(device)
        best = min(best, start.elapsed_time(stop) / 1e3)
    return values.numel() * values.element_size() / best


def kernels_per_token(run: Callable[[Any, int], Any], model: Any) -> tuple[float, dict[str, float]]:
    """GPU kernels between a 9-token and a 25-token generation, over the 16 tokens; and the copies, by name."""
    long, short = (_activities(run, model, new) for new in (25, 9))
    per_token = {name: (long[name] - short[name]) / 16 for name in long | short if long[name] != short[name]}
    kernels = sum(count for name, count in per_token.items() if is_kernel(name))
    return kernels, {name: count for name, count in sorted(per_token.items()) if is_copy(name)}


def _activities(run: Callable[[Any, int], Any], model: Any, new: int) -> Counter[str]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    run(model, new)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run(model, new)
        torch.cuda.synchronize()
    return Counter(event.name for event in profiler.events() if event.device_type.name == "CUDA")


def peak_memory(device: str, run: Callable[[Any], Any], model: Any) -> int:
    """Bytes allocated at the peak of a run, above what was allocated before it."""
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(model)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
