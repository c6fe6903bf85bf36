"""Positions that a caller gives and that are ahead of the tokens: rotary tables of a step end where its cache does."""

from __future__ import annotations

import pytest
import torch
from test_generation import loops, pair, prompt, run, same

from hf_rewrite_runtime.decode import eligibility, graph_cache
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.generate import call_graphs

if eligibility.makes_cache_position(pair()[0]):
    pytest.skip("this transformers may repeat the positions that it is given", allow_module_level=True)

NEW = 24
"""Tokens that `run` generates."""


def positions(inputs, ahead):
    return inputs["attention_mask"].cumsum(-1) - 1 + ahead


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ahead", [3, 300])
def test_a_cache_has_a_slot_for_each_position(ahead, padded, monkeypatch):
    monkeypatch.setattr(graph_cache, "ROUNDING", 8)
    model, original = pair()
    plain = prompt(padded=padded)
    for inputs in (plain, plain | {"position_ids": positions(plain, ahead)}):
        same(run(model, inputs, do_sample=False), run(original, inputs, do_sample=False))
    assert loops(model) == []
    last = int(inputs["position_ids"].max()) + NEW - 1
    assert max(graph.cache.capacity for graph in store_of(model).graphs.values()) > last


def test_positions_that_no_cache_is_made_for(monkeypatch):
    model, original = pair()
    inputs = prompt()
    inputs["position_ids"] = positions(inputs, call_graphs.FIRST_ROOM)
    same(run(model, inputs, do_sample=False), run(original, inputs, do_sample=False))
    assert loops(model) == ["position_ids"]


def test_positions_behind_the_tokens_need_no_slots():
    model, _ = pair()
    inputs = prompt(padded=False)
    inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
    run(model, inputs, do_sample=False)
    assert [graph.cache.capacity for graph in store_of(model).graphs.values()] == [graph_cache.ROUNDING]
