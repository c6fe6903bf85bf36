"""Kernels with one thing wrong with each, for test_ahead_of_time.py: what `python -m rewrite.kernels` must find."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from hf_rewrite_runtime.device.split_k_semaphores import publish
from hf_rewrite_runtime.launching.launch import HIP, WAVE, Kernel, wait_for_stores
from rewrite.kernels.kernel_cases import Case, tensor


@triton.jit
def _spills_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x - tl.max(x, 0))


@triton.jit
def _scalar_loads_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + 3 * at))


@triton.jit
def _ring_kernel(x_ptr, y_ptr, out_ptr, STEP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    square = at[:, None] * BLOCK + at[None, :]
    y = tl.load(y_ptr + square)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    begin, end = tl.load(y_ptr).to(tl.int64), tl.load(y_ptr + 1).to(tl.int64)
    for step in tl.range(begin, end, STEP, num_stages=3):
        x = tl.load(x_ptr + step * BLOCK + square)
        total = tl.dot(y, x, total, input_precision="ieee")
    tl.store(out_ptr + square, total)


@triton.jit
def _shared_memory_kernel(x_ptr, y_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    square = at[:, None] * BLOCK + at[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in tl.range(0, STEPS, num_stages=4):
        x = tl.load(x_ptr + step * BLOCK * BLOCK + square)
        y = tl.load(y_ptr + step * BLOCK * BLOCK + square)
        total = tl.dot(x, y, total, input_precision="ieee")
    tl.store(out_ptr + square, total)


@triton.jit
def _fine_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def _last_arrival_kernel(counts_ptr, out_ptr, WAIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + at, at)
    publish(WAIT)
    if tl.atomic_add(counts_ptr, 1, sem="acq_rel", scope="gpu") == 1:
        tl.store(counts_ptr + BLOCK + at, tl.load(out_ptr + at, cache_modifier=".cg"))


@triton.jit
def _relaxed_kernel(counts_ptr, out_ptr, WAIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + at, at)
    publish(WAIT)
    if tl.atomic_add(counts_ptr, 1, sem="relaxed", scope="gpu") == 1:
        tl.store(counts_ptr + BLOCK + at, tl.load(out_ptr + at, cache_modifier=".cg"))


class _Fatal:
    """Stands for a kernel that a compiler dies of."""

    __name__ = "_fatal_kernel"

    def warmup(self, *arguments: object, **options: object) -> None:
        os.abort()


def cases() -> list[Case]:
    """A case for each, and one with nothing wrong; a process has to be started anew after the one that is fatal."""

    def launching(function: object, num_warps: int, dtype: torch.dtype, *constants: object) -> Callable[[], object]:
        kernel = Kernel(function, dot=function in (_shared_memory_kernel, _ring_kernel))
        count = 3 if kernel.dot else 2
        tensors = tuple(tensor(1 << 20, dtype=dtype) for _ in range(count))
        return lambda: kernel.launch((1, 1, 1), num_warps, tensors, (), (), (), constants)

    wait = wait_for_stores(tensor(1))
    fatal = [Case("planted", launching(_Fatal(), 4, torch.float32))] if HIP else []
    return [
        *fatal,
        Case("planted", launching(_spills_kernel, 1, torch.float32, 512 * WAVE)),
        Case("planted", launching(_scalar_loads_kernel, 4, torch.bfloat16, 1024)),
        Case("planted", launching(_shared_memory_kernel, 8, torch.bfloat16, 8, 128)),
        Case("planted", launching(_ring_kernel, 4, torch.bfloat16, 32, 32)),
        Case("planted, many threads", launching(_fine_kernel, 32, torch.bfloat16, 16384)),
        Case("planted, no wait", launching(_last_arrival_kernel, 4, torch.int32, "", 1024)),
        Case("planted, nothing", launching(_last_arrival_kernel, 4, torch.int32, wait, 1024)),
        Case("planted", launching(_relaxed_kernel, 4, torch.int32, wait, 1024)),
        Case("planted, nothing", launching(_fine_kernel, 4, torch.bfloat16, 2048)),
    ]
