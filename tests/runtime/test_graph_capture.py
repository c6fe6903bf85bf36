"""A capture is not disturbed by what goes away during it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from hf_rewrite_runtime.device import graph_capture, split_k_semaphores
from hf_rewrite_runtime.device.graph_capture import CaptureFailed, capture


class Graph:
    """Stands in for a graph, and for what is destroyed with one."""

    def capture_begin(self, **given: object) -> None:
        """Begin."""

    def capture_end(self) -> None:
        """End."""

    def reset(self) -> None:
        """Forget what was captured."""


def leave_in_a_cycle(kept: list[Any]) -> None:
    """Leave what a list holds to the collector, and allocate as much as it waits for."""
    ring = [kept.pop()]
    ring.append(ring)
    del ring
    assert len([[] for _ in range(10 * gc.get_threshold()[0])]) > 0


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(split_k_semaphores, "new", lambda device: None)


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize("fails", [False, True])
def test_no_cycle_is_collected_during_a_capture(fails: bool) -> None:
    kept = [Graph(), Graph()]
    gone = [weakref.ref(graph) for graph in kept]

    def run() -> None:
        leave_in_a_cycle(kept)
        assert gone[1]() is not None
        if fails:
            raise RuntimeError("the host is asked")

    if fails:
        with pytest.raises(CaptureFailed, match="the host is asked"):
            graph_capture._capture(run, None, 0)
    else:
        graph_capture._capture(run, None, 0)
    assert gc.isenabled()
    leave_in_a_cycle(kept)
    assert [graph() for graph in gone] == [None, None]


@pytest.mark.usefixtures("without_a_gpu")
def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        graph_capture._capture(lambda: None, None, 0)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_that_is_garbage_does_not_end_a_capture() -> None:
    x = torch.ones(4, device="cuda")
    pool = torch.cuda.graph_pool_handle

    def add() -> None:
        x.add_(1)

    kept = [capture(add, add, x.device, pool())]

    def double() -> None:
        if kept and torch.cuda.is_current_stream_capturing():
            leave_in_a_cycle(kept)
        x.mul_(2)

    graph = capture(double, double, x.device, pool())
    assert not kept
    graph.replay()
    assert x.tolist() == [8.0] * 4  # 1, one more in a rehearsal, twice that in another, twice that in the replay
