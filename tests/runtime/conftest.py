"""Where kernels run: a GPU, the CPU under Triton's interpreter (test_interpreted.py), or an emulator (--emulate)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_aiter
import pytest
import torch

from hf_rewrite_runtime.aiter import aiter_calls, aiter_gemm
from hf_rewrite_runtime.core import aiter_probe, backend
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.launching import launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = launch.pretends()
KERNEL_DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


@pytest.fixture(autouse=True)
def graph_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of `generate()` wait for kernels, so that what is tested is the graph; `test_head_start` does not."""
    monkeypatch.setattr(GraphGeneration, "starts_plainly", False)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device on which kernels run here."""
    if INTERPRETED or EMULATED:
        with backend.use_backend("triton"):
            yield torch.device("cpu")
    elif torch.cuda.is_available():
        with backend.use_backend("triton"):  # small tensors go to torch's own operators otherwise
            yield torch.device("cuda")
    else:
        pytest.skip("needs a CUDA or ROCm device; test_interpreted.py runs the same tests on the CPU")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    names: list[str] = []
    run = launch.Kernel.launch

    def recorded(kernel: launch.Kernel, *arguments: Any, **options: Any) -> None:
        run(kernel, *arguments, **options)
        names.append(kernel.jit_function.__name__.strip("_").removesuffix("_kernel"))

    monkeypatch.setattr(launch.Kernel, "launch", recorded)
    return names


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every tensor that an operator allocates with NaN, so that an element left unwritten shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _filled(getattr(torch, name)))


def _filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        tensor = allocate(*args, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    return poisoned


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    backend.reset_fallbacks()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with an MI300X and no aiter."""
    monkeypatch.setattr(aiter_probe, "chip", lambda device=None: "gfx942")
    monkeypatch.setattr(backend, "device_guard", fake_aiter.device_guard)
    monkeypatch.setenv("AITER_LOG_LEVEL", "WARNING")
    for name in (aiter_calls.SWITCH, aiter_gemm.TABLE, backend.ENVIRONMENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    fake_aiter.calls.clear()
    aiter_calls.forget()
    backend.warn_once.cache_clear()
    yield monkeypatch
    aiter_calls.forget()


@pytest.fixture
def install(machine: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_aiter.Install]:
    """A function that installs a release."""
    installed = []

    def install(tag: str = fake_aiter.NEWEST, **bodies: Callable[..., Any]) -> fake_aiter.Release:
        release = fake_aiter.Release(tag, bodies)
        fake_aiter.install(tmp_path, release)
        machine.syspath_prepend(tmp_path)
        installed.append(release)
        return release

    yield install
    for release in installed:
        release.take_back()
