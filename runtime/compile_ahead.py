"""Compiles the kernels of a step side by side, before the first of them runs.

Triton compiles a kernel when it is launched for the first time, and a step of a cold process has a dozen. To learn
which, the step is captured in a graph that is thrown away: a capture runs nothing, and neither do the kernels of this
package while it lasts (`launch.collect`), so nothing reads what no kernel wrote.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from . import launch
from .capture import capture

THREADS = 16
"""At most; a compilation is one thread and, for NVIDIA, a process that it waits for."""

Variants = dict[Any, Callable[[], object]]


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
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError), torch.no_grad():
            capture(run, lambda: None, device, torch.cuda.graph_pool_handle())
    finally:
        launch.collect(None)
    return found


def compile_all(jobs: Mapping[Any, Callable[[], object]], device: torch.device) -> None:
    """Compile variants in threads; one that does not compile is met again where it is launched."""
    if not jobs:
        return
    index = device.index if device.index is not None else torch.cuda.current_device()
    workers = min(THREADS, os.cpu_count() or 1, len(jobs))
    with ThreadPoolExecutor(workers, initializer=torch.cuda.set_device, initargs=(index,)) as pool:
        list(pool.map(_compiled, jobs.values()))


def _compiled(compile: Callable[[], object]) -> None:
    from triton import TritonError

    with contextlib.suppress(RuntimeError, TritonError):
        variant: Any = compile()
        _ = variant.run  # Triton compiles a C function that launches it, and loads both, when it is asked for this
