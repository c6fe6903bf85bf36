"""Captures a function in a CUDA graph, and leaves everything in order where that fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..launching.launch import rehearsing
from . import split_k_semaphores

CAPTURING = threading.RLock()
"""Held during a capture, and around whatever draws from the device's generator in another thread: torch knows one
capture a generator at a time."""


NOT_FOR_A_STEP = RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError
"""What a model's code raises where it is given tensors in place of numbers, or buffers in place of a growing cache."""


class CaptureFailed(RuntimeError):
    """Something in the function asks the host, or cannot be part of a graph for another reason."""

    def __init__(self, cause: BaseException):
        super().__init__(f"the step cannot be captured: {cause}")


def capture(
    run: Callable[[], None], rehearse: Callable[[], None], device: torch.device, pool: Any
) -> torch.cuda.CUDAGraph:
    """Call `rehearse` and then capture `run`; the random generator is left as it was.

    Args:
        run: reads and writes tensors that keep their addresses.
        rehearse: calls `run` somewhere where that does no harm.
        device: of these tensors.
        pool: `torch.cuda.graph_pool_handle()`, for what the function allocates; it ends with the last graph in it.

    Raises:
        CaptureFailed: if it cannot be captured.
    """
    index = index_of(device)
    stream = _side_stream(index)
    generator = torch.cuda.default_generators[index]
    with CAPTURING, torch.cuda.device(index):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        offset = generator.get_offset()
        try:
            with torch.cuda.stream(stream):
                # What is compiled, packed or loaded at the first call must be there before the capture.
                with rehearsing():
                    rehearse()
                _drop_workspaces()
                return _capture(run, pool, index)
        finally:
            _drop_workspaces()
            generator.set_offset(offset)
            current.wait_stream(stream)


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device, which is the current one where it names none."""
    return device.index if device.index is not None else torch.cuda.current_device()


@contextlib.contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Collect no cycles: a graph among them, of a model that is gone, cannot be destroyed during another's capture.

    Torch 2.11 tries it, CUDA refuses, and the capture is invalid.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_keeping_garbage()
def _capture(run: Callable[[], None], pool: Any, index: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    counters = split_k_semaphores.new(torch.device("cuda", index))
    graph.counters = counters  # type: ignore[attr-defined]  # which live as long as the graph
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with split_k_semaphores.of_graph(counters):
            run()
    except BaseException as error:
        _abandon(graph, pool, index)
        if isinstance(error, RuntimeError):
            raise CaptureFailed(error) from error
        raise
    try:
        graph.capture_end()
    except RuntimeError as error:
        _clean_up(pool, index)
        raise CaptureFailed(error) from error
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, index: int) -> None:
    """End a capture in which something went wrong."""
    try:
        graph.capture_end()
    except RuntimeError:  # the capture is invalid, which is known
        _clean_up(pool, index)
    else:
        graph.reset()


def _clean_up(pool: Any, index: int) -> None:
    """Do what the end of an invalid capture leaves undone: it raises before allocator and generator know of it."""
    for finish in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # a torch that does it by itself says that there is nothing to end
            finish(index, pool)
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=torch.device("cuda", index))
    empty.capture_end()
    empty.reset()


def _drop_workspaces() -> None:
    """Make cuBLAS allocate its workspace anew: a graph's own must lie in its pool, where nobody else frees it."""
    torch._C._cuda_clearCublasWorkspaces()


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device("cuda", index))
