"""Counters in which the programs that share a sum count themselves, so that the last one adds up the parts.

A kernel finds zeros in its counters and leaves zeros. Kernels of one stream follow each other and may share them;
kernels of two streams may not, and a graph runs on whichever stream replays it. So a graph of ours brings counters of
its own, every stream has some, and a graph that somebody else captures clears new ones before each kernel.

What a program has stored belongs to the last arrival only where all of it can be read there. On NVIDIA's chips the
barrier orders it: an atomic operation of one thread releases what its whole program stored before (PTX ISA, "Memory
Consistency Model", causality order). On AMD's the wave that counts waits for its own stores only, and no other wave
waits for its own before the barrier (LLVM's pull request 161638 describes it for gfx10). So there every wave waits
itself, by `launch.wait_for_stores`. That every kernel does is read from its assembly (docs/amd.md).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core import backend

COUNT = 8192
"""Counters that streams and graphs start with."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def publish(WAIT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let an atomic operation that comes next, `acq_rel` and of the whole GPU, release what all waves have stored.

        `WAIT` is `launch.wait_for_stores`.
        """
        if WAIT != "":  # in every wave, behind its stores: memory is clobbered
            tl.inline_asm_elementwise(WAIT, "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


class _Graph(threading.local):
    counters: Tensor | None = None


_GRAPH = _Graph()
_by_stream: dict[tuple[int, int], list[Tensor]] = {}


def new(device: torch.device) -> Tensor:
    """Return counters for a graph: zeros that have to live as long as it does."""
    with torch.inference_mode(False):
        return torch.zeros(COUNT, dtype=torch.int32, device=device)


@contextlib.contextmanager
def of_graph(counters: Tensor) -> Iterator[None]:
    """Count in `counters` what this thread launches: it captures the graph that they belong to."""
    before, _GRAPH.counters = _GRAPH.counters, counters
    try:
        yield
    finally:
        _GRAPH.counters = before


def arrivals(tensor: Tensor, count: int) -> Tensor:
    """Return at least `count` int32 zeros on the device of `tensor`, for one launch on the current stream."""
    if _GRAPH.counters is not None and _GRAPH.counters.device == tensor.device and _GRAPH.counters.numel() >= count:
        return _GRAPH.counters
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=tensor.device)
    index = tensor.get_device()
    stream = torch.cuda.current_stream(index).cuda_stream if tensor.is_cuda else 0
    owned = _by_stream.setdefault((index, stream), [])
    if not owned or owned[-1].numel() < count:  # a kernel in flight may count in the smaller ones
        with torch.inference_mode(False):
            owned.append(torch.zeros(max(count, COUNT), dtype=torch.int32, device=tensor.device))
    return owned[-1]
