"""Launch a Triton kernel with less Python per call than `kernel[grid](...)`.

Triton decides on every call which compiled variant the arguments need. Here the variant is remembered under a key made
of what Triton specialises on: dtypes, 16-byte alignment of pointers, strides that are 1 or divisible by 16 or need 64
bits, and the constants. On ROCm Triton also specialises on the size of each tensor's storage; there its own path runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

WAVE = 64 if torch.version.hip else 32
_REMEMBERS = torch.version.hip is None


Collector = Callable[[tuple[object, ...], Callable[[], object]], object]


class _Thread(threading.local):
    """What this thread's launches do."""

    rehearses: bool = False
    collector: Collector | None = None


_THREAD = _Thread()


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Launch as inside a graph: the same variants, so that each is compiled once and before the capture."""
    before, _THREAD.rehearses = _THREAD.rehearses, True
    try:
        yield
    finally:
        _THREAD.rehearses = before


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether a kernel may start before the one before it has ended (programmatic dependent launch).

    Only inside a captured graph or its rehearsal, where nothing but the step's own kernels writes: what is loaded
    before the wait (weights, older cache slots) was there when the step began. NVIDIA cards from compute capability 9.
    """
    return (
        tensor.is_cuda
        and (_THREAD.rehearses or torch.cuda.is_current_stream_capturing())
        and _has_dependent_launch(tensor.get_device())
    )


@functools.cache
def _has_dependent_launch(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def grid(blocks: int, row_count: int) -> tuple[int, int, int]:
    """Return a grid of all blocks of all rows, the blocks of a row next to each other.

    A row is `program_id(2) * num_programs(1) + program_id(1)`, as an axis but the first ends at 65,535. With the rows
    first, neighbouring programs touch distant memory: 7% slower at 768 MiB (H100).
    """
    return blocks, min(row_count, 32768), -(-row_count // 32768)


def collect(collector: Collector | None) -> None:
    """Launch nothing in this thread: tell `collector` of every variant, by a key, and how to compile it.

    None launches again. `compile_ahead` is the user of this.
    """
    _THREAD.collector = collector


def collects() -> bool:
    """Return whether this thread's launches are told to a collector."""
    return _THREAD.collector is not None


class Kernel:
    """A kernel whose signature is pointers, counts (not specialised), strides, floats, constants, in this order."""

    def __init__(self, jit_function: Any):
        self.jit_function = jit_function
        self._variants: dict[tuple[object, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        num_warps: int,
        tensors: tuple[torch.Tensor, ...],
        counts: tuple[int, ...],
        strides: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[object, ...],
        *,
        overlap: bool = False,
    ) -> None:
        """Run the kernel on the current device and stream, with `overlap` as a programmatic dependent launch."""
        key = (
            num_warps,
            overlap,
            constants,
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % 16 == 0 for tensor in tensors],
            *[stride if stride < 2 else (stride % 16 == 0, stride >> 31) for stride in strides],
        )
        if _THREAD.collector is not None:
            pdl = {"launch_pdl": True} if overlap else {}
            arguments = (*tensors, *counts, *strides, *floats, *constants)
            warm_up = functools.partial(self.jit_function.warmup, *arguments, grid=grid, num_warps=num_warps, **pdl)
            _THREAD.collector((self, *key), warm_up)
            return
        variant = self._variants.get(key)
        if variant is not None:
            variant[grid](*tensors, *counts, *strides, *floats, *constants)
            return
        options = {"launch_pdl": True} if overlap else {}
        variant = self.jit_function[grid](
            *tensors, *counts, *strides, *floats, *constants, num_warps=num_warps, **options
        )
        if _REMEMBERS and variant is not None:  # the interpreter returns None
            self._variants[key] = variant
