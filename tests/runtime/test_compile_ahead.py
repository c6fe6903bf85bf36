"""Kernels are compiled side by side before a step runs, and learning which changes nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device.compile_ahead import compile_all, variants
from hf_rewrite_runtime.launching import launch
from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.norms.rms_norm import rms_norm

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


def test_one_thread_collects_and_another_launches() -> None:
    launch.collect(lambda key, compile: None)
    try:
        assert launch.collects()
        others: list[bool] = []
        thread = threading.Thread(target=lambda: others.append(launch.collects()))
        thread.start()
        thread.join()
        assert others == [False]
    finally:
        launch.collect(None)
    assert not launch.collects()


def test_what_does_not_run_is_not_counted() -> None:
    backend.reset_fallbacks()
    launch.collect(lambda key, compile: None)
    try:
        backend.count_fallback("linear", "capturing", nn.Linear(1, 1))
    finally:
        launch.collect(None)
    assert backend.fallbacks() == {}
    backend.count_fallback("linear", "capturing")
    assert backend.fallbacks() == {("linear", "capturing"): 1}
    backend.reset_fallbacks()


def test_one_that_does_not_compile_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    done: list[str] = []

    class Job:
        def __init__(self, length: int, error: Exception | None = None):
            self.length, self.error = length, error

        def __call__(self) -> Job:
            if self.error is not None:
                raise self.error
            done.append(f"compiled {self.length}")
            return self

        @property
        def run(self) -> None:
            done.append(f"loaded {self.length}")

    jobs: Any = {0: Job(2), 1: Job(9, RuntimeError("out of shared memory")), 2: Job(5)}
    compile_all(jobs, torch.device("cuda", 0))
    assert done == ["compiled 5", "loaded 5", "compiled 2", "loaded 2"]


@pytest.mark.gpu
@needs_gpu
def test_kernels_are_compiled_in_other_threads_and_nothing_runs() -> None:
    from triton import knobs

    device = torch.device("cuda")
    x, weight = torch.randn(3, 1096, device=device), torch.ones(1096, device=device)
    out = torch.zeros(3, 548, device=device)

    def run() -> None:
        normed = rms_norm(x, weight, 1e-6)
        out.copy_(gated_activation(normed[:, :548], normed[:, 548:], nn.functional.silu))

    threads: list[int] = []

    def compiled(*args: Any, **kwargs: Any) -> None:
        threads.append(threading.get_ident())

    knobs.runtime.jit_post_compile_hook = compiled
    try:
        found = variants(run, device)
        assert sorted(key[0].jit_function.__name__ for key in found) == [
            "_gated_activation_kernel",
            "_rms_norm_kernel",
        ]
        assert not out.any()
        assert threads == []
        compile_all(found, device)
        assert len(threads) == 2
        assert threading.get_ident() not in threads
        with launch.rehearsing():  # outside a step kernels do not overlap, which is compiled otherwise
            run()
        assert len(threads) == 2
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert out.any()


@pytest.mark.gpu
@needs_gpu
def test_what_asks_the_host_is_left_to_the_real_step() -> None:
    x = torch.randn(2, 1104, device="cuda")

    def run() -> None:
        rms_norm(x, None, 1e-6).sum().item()

    assert [key[0].jit_function.__name__ for key in variants(run, x.device)] == ["_rms_norm_kernel"]
    assert torch.isfinite(rms_norm(x, None, 1e-6)).all()
