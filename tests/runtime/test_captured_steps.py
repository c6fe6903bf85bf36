"""Calls whose steps are captured, without a GPU: a replay tells the device what it was told, and runs no Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_drafted import GREEDY, LOOKUP, always, plant_rows, repeating
from test_generation import GPU, loops, pair, prompt, run, same
from told_again import Recorded

from hf_rewrite_runtime.decode import graph_cache, kernels_ahead, prompt_graph, step_graph
from hf_rewrite_runtime.decode.graph_cache import GraphStore, store_of
from hf_rewrite_runtime.device import compile_ahead
from hf_rewrite_runtime.generate import call_graphs
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.launching.launch import rehearsing

__all__ = ["always"]

pytestmark = pytest.mark.skipif(GPU, reason="a GPU captures")
DRAWN = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2}


def recorded(run: Callable[[], None], rehearse: Callable[[], None], device: torch.device, pool: Any) -> Recorded:
    """Stand in for `capture`: what is returned has a `replay`, as a graph has."""
    before = torch.get_rng_state()
    with rehearsing():
        rehearse()
    graph = Recorded()
    with graph:
        run()
    torch.set_rng_state(before)
    return graph


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture."""
    for module in (step_graph, prompt_graph):
        monkeypatch.setattr(module, "capture", recorded)
    monkeypatch.setattr(compile_ahead, "capture", lambda *given: None)  # it would do what it captures
    for name in ("graph_pool_handle", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    always_captures = property(lambda self: True, lambda *given: None)
    monkeypatch.setattr(call_graphs.CallGraphs, "captures", always_captures, raising=False)
    monkeypatch.setattr(compile_ahead.CompilerLoading, "__init__", lambda self, device: None)
    monkeypatch.setattr(kernels_ahead, "compiler_loading", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(GraphStore, "_remember_idle", lambda self: None)


def captured(model: torch.nn.Module) -> list[str]:
    """The forms of the steps that were captured last."""
    (kept,) = store_of(model).graphs.values()
    assert all(isinstance(program._graph, Recorded) for program in kept._programs.values())
    assert all(isinstance(read._graph, Recorded) for read in kept.prompts._graphs.values())
    return [key[1][0].__name__ for key in kept._programs]


@pytest.mark.parametrize("plainly", [False, True], ids=["graph first", "begun plainly"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_replays_give_the_original_s_tokens(
    padded: bool, sampling: dict[str, Any], plainly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphGeneration, "starts_plainly", plainly)
    model, original = pair("llama")
    for seed in (0, 1):  # the second call replays what the first has captured
        inputs, given = prompt(3, padded=padded, seed=seed), {**sampling, "output_scores": True}
        same(run(model, inputs, **given), run(original, inputs, **given))
    assert loops(model) == []
    assert captured(model) == ["Program"]


def test_a_larger_cache_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_graphs, "FIRST_ROOM", 6)
    monkeypatch.setattr(graph_cache, "ROUNDING", 4)
    model, original = pair("mistral")
    same(run(model, prompt(), **GREEDY), run(original, prompt(), **GREEDY))
    assert loops(model) == []
    assert captured(model) == ["Program"]


@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_checked_in_a_graph(rows: int, monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    model, original = pair()
    inputs, more = repeating(batch=rows), {"max_new_tokens": 24, "pad_token_id": 0}
    theirs = original.generate(**inputs, **GREEDY, **more)
    for _ in range(2):
        plant_rows(monkeypatch, theirs, [0.9, 0.5, 0.7][:rows])
        assert torch.equal(model.generate(**inputs, **LOOKUP, **more), theirs)
    assert loops(model) == []
    assert set(captured(model)) == ({"Program", "Window"} if rows == 1 else {"Program", "RaggedWindow", "Alignment"})


def test_an_assistant_drafts_in_a_graph() -> None:
    model, original = pair()
    assistant, _ = pair()
    assistant.load_state_dict(model.state_dict())
    more = {"max_new_tokens": 24, "pad_token_id": 0}
    theirs = original.generate(**prompt(2), **GREEDY, **more)
    for _ in range(2):
        assert torch.equal(model.generate(**prompt(2), **GREEDY, **more, assistant_model=assistant), theirs)
    assert loops(model) == []
    assert set(captured(assistant)) == {"Program", "Alignment"}
