"""Compiles the kernels of a prompt or a step side by side, before the first of them runs.

Triton compiles a kernel when it is launched for the first time, and a step of a cold process has a dozen. To learn
which, the step is captured in a graph that is thrown away: a capture runs nothing, and neither do the kernels of this
package while it lasts (`launch.collect`), so nothing reads what no kernel wrote.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from . import backend, launch
from .capture import capture, index_of
from .launch import Launch

if backend.triton_installed():
    import triton

    @triton.jit
    def _nothing_kernel(pointer):  # type: ignore[no-untyped-def]
        pass


THREADS = 16
"""At most; a compilation is one thread and, for NVIDIA, processes that it waits for."""
AT_A_TIME = 4
"""Threads inside Triton's compiler, much of which is Python, where they wait for each other: twelve kernels take 1.2 s
with four threads and 1.8 s with twelve (`bench/compiling.py`, 4 cores). The C functions are built beside it."""

Variants = dict[Any, Launch]


@contextlib.contextmanager
def compiler_loading(device: torch.device) -> Iterator[None]:
    """Load Triton's compiler in a thread meanwhile: it reads itself, and builds and asks programs, for a second."""
    if not backend.triton_installed():
        yield
        return
    thread = threading.Thread(target=_load_compiler, args=(index_of(device),))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@functools.cache
def _load_compiler(index: int) -> None:
    torch.cuda.set_device(index)
    with _not_compiling():
        _nothing_kernel.warmup(torch.float32, grid=(1, 1, 1))


def variants(run: Callable[[], None], device: torch.device) -> Variants:
    """Return how to compile each variant of a kernel that `run` launches, by a key; as far as it can be captured.

    Args:
        run: reads and writes tensors that keep their addresses. What it raises is not raised here: it will be when
            it is run, and what it launched before that is returned.
        device: of these tensors.
    """
    found: Variants = {}
    launch.collect(lambda key, compile: found.setdefault(key, compile))
    try:
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError, AssertionError), torch.no_grad():
            capture(run, lambda: None, device, torch.cuda.graph_pool_handle())
    finally:
        launch.collect(None)
    return found


def compile_all(jobs: Mapping[Any, Launch], device: torch.device) -> None:
    """Compile variants in threads, long ones first; one that does not compile is met again where it is launched."""
    if not jobs:
        return
    places = threading.Semaphore(AT_A_TIME)

    def compile(job: Launch) -> None:
        with _not_compiling():
            with places:
                variant: Any = job()
            _ = variant.run  # Triton compiles a C function that launches it, and loads both, when it is asked for this

    workers = min(THREADS, os.cpu_count() or 1, len(jobs))
    with ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(index_of(device),)) as pool:
        list(pool.map(compile, sorted(jobs.values(), key=lambda job: job.length, reverse=True)))


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Leave what Triton, or a program that it asks, fails with to the launch of the kernel."""
    from triton import TritonError

    with contextlib.suppress(RuntimeError, TritonError, OSError, subprocess.SubprocessError):
        yield
