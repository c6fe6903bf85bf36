"""Launch a Triton kernel with less Python per call than `kernel[grid](...)`.

Triton decides on every call which compiled variant the arguments need. Here the variant is remembered under a key made
of what Triton specialises on: dtypes, 16-byte alignment of pointers, strides that are 1 or divisible by 16 or need 64
bits, and the constants. On ROCm Triton also specialises on the size of each tensor's storage; there its own path runs.
"""

from __future__ import annotations

from typing import Any

import torch

WAVE = 64 if torch.version.hip else 32
_REMEMBERS = torch.version.hip is None


class Kernel:
    """A kernel whose signature is pointers, counts (not specialised), strides, floats, constants, in this order."""

    def __init__(self, jit_function: Any):
        self.jit_function = jit_function
        self._variants: dict[tuple[object, ...], Any] = {}

    def launch(
        self,
        grid: tuple[int, int],
        num_warps: int,
        tensors: tuple[torch.Tensor, ...],
        counts: tuple[int, ...],
        strides: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[object, ...],
    ) -> None:
        """Run the kernel on the current device and stream."""
        key = (
            num_warps,
            constants,
            tensors[0].get_device(),
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() % 16 == 0 for tensor in tensors],
            *[stride if stride < 2 else (stride % 16 == 0, stride >> 31) for stride in strides],
        )
        variant = self._variants.get(key)
        if variant is not None:
            variant[(grid[0], grid[1], 1)](*tensors, *counts, *strides, *floats, *constants)
            return
        variant = self.jit_function[grid](*tensors, *counts, *strides, *floats, *constants, num_warps=num_warps)
        if _REMEMBERS and variant is not None:  # the interpreter returns None
            self._variants[key] = variant
