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
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..core import backend
from ..launching import launch
from ..launching.launch import LOADING, Launch
from .graph_capture import NOT_FOR_A_STEP, capture, index_of

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

TURN_S = 5e-5
"""For how long a thread keeps the interpreter from another one that waits, while threads compile beside a model: that
gives the interpreter up in every operator of torch, and would wait for Python's 5 ms each time."""

Variants = dict[Any, Launch]


class CompilerLoading:
    """Triton's compiler being loaded in a thread: it reads itself, and builds and asks programs, for a second."""

    def __init__(self, device: torch.device):
        self._thread: threading.Thread | None = None
        if backend.triton_installed():
            self._thread = threading.Thread(target=_load_compiler, args=(index_of(device),))
            self._thread.start()

    def wait(self) -> None:
        """Wait until it is loaded."""
        if self._thread is not None:
            self._thread.join()


@functools.cache
def load_compiler_beside(index: int) -> CompilerLoading:
    """Begin, once a process, to load Triton's compiler for a device in a thread, while a model runs as it is."""
    return CompilerLoading(torch.device("cuda", index))


@contextlib.contextmanager
def compiler_loading(device: torch.device) -> Iterator[None]:
    """Load Triton's compiler in a thread meanwhile."""
    loading = CompilerLoading(device)
    try:
        with taking_turns():
            yield
    finally:
        loading.wait()


@functools.cache
def _load_compiler(index: int) -> None:
    torch.cuda.set_device(index)
    with taking_turns(), _not_compiling():
        _nothing_kernel.warmup(torch.float32, grid=(1, 1, 1))


class _Turns:
    """How many blocks want short turns, and how long turns are without them."""

    lock = threading.Lock()
    wanted = 0
    before = 0.0


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Let threads of the process hand the interpreter to each other every `TURN_S` in a `with` block."""
    with _Turns.lock:
        _Turns.wanted += 1
        if _Turns.wanted == 1:
            _Turns.before = sys.getswitchinterval()
            sys.setswitchinterval(min(TURN_S, _Turns.before))
    try:
        yield
    finally:
        with _Turns.lock:
            _Turns.wanted -= 1
            if not _Turns.wanted:
                sys.setswitchinterval(_Turns.before)


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
        with contextlib.suppress(*NOT_FOR_A_STEP), torch.no_grad():
            capture(run, lambda: None, device, torch.cuda.graph_pool_handle())
    finally:
        launch.collect(None)
    return found


def compile_all(jobs: Mapping[Any, Launch], device: torch.device) -> None:
    """Compile variants in threads, long ones first; one that does not compile is met again where it is launched."""
    Compilation(jobs, device).wait()


class Compilation:
    """Variants being compiled in threads, long ones first.

    A process that ends waits for those under way and begins no further one.

    Args:
        jobs: the variants.
        device: that they are for.
        loading: of the compiler, which goes before them.
    """

    def __init__(self, jobs: Mapping[Any, Launch], device: torch.device, loading: CompilerLoading | None = None):
        self._jobs = deque(sorted(jobs.values(), key=lambda job: job.length, reverse=True))
        self._device = device
        self._loading = loading
        self._places = threading.Semaphore(AT_A_TIME)
        self._errors: list[Exception] = []
        workers = min(THREADS, os.cpu_count() or 1, len(jobs))
        self._threads = [threading.Thread(target=self._work) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def is_done(self) -> bool:
        """Return whether there is nothing left to compile."""
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """Wait until that is so.

        Raises:
            Exception: that a compiler or a driver does not fail with.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        try:
            torch.cuda.set_device(index_of(self._device))
            if self._loading is not None:
                self._loading.wait()
            while threading.main_thread().is_alive() and (job := self._next()) is not None:
                self._compile(job)
        except Exception as error:  # is raised where it is waited for
            self._errors.append(error)

    def _next(self) -> Launch | None:
        try:
            return self._jobs.popleft()
        except IndexError:  # another thread has taken the last one
            return None

    def _compile(self, job: Launch) -> None:
        with _not_compiling():
            with self._places:
                variant: Any = job()
            with LOADING:
                _ = variant.run  # asked for it, Triton compiles a C function that launches the kernel, and loads both


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Leave what Triton, or a program that it asks, fails with to the launch of the kernel."""
    from triton import TritonError

    with contextlib.suppress(RuntimeError, TritonError, OSError, subprocess.SubprocessError):
        yield
