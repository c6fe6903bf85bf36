"""A model that was altered between two calls of `generate()`: no graph of the former one is replayed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.generate.generation import GraphGeneration
from hf_rewrite_runtime.guards.tensor_version import version_of
from hf_rewrite_runtime.linear.packing import packed_linear
from hf_rewrite_runtime.rope.rope_cos_sin import rotary_rows

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}
IDS = torch.tensor([[5, 7, 11, 13], [17, 19, 23, 29]])


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = True


def llama() -> Any:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**SIZES)).eval()


def generate(model: Any) -> torch.Tensor:
    sequences: torch.Tensor = model.generate(IDS, max_new_tokens=6, do_sample=False)
    return sequences


def graphs_of(model: Any) -> list[Any]:
    return list(store_of(model).graphs.values())


def _other_activation(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def _activation_as_a_function(model: Any) -> None:
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = functional.softplus


def _other_function(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = functional.relu


def _fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize("first", [_other_activation, _activation_as_a_function, _fewer_layers])
def test_code_that_may_leave_something_on_a_module_is_watched_as_well(first: Callable[[Any], None]) -> None:
    model = llama()
    generate(model)
    (before,) = graphs_of(model)
    first(model)
    generate(model)
    assert before not in graphs_of(model)
    if first is _activation_as_a_function:
        (before,) = graphs_of(model)
        _other_function(model)
        generate(model)
        assert before not in graphs_of(model)


def test_what_no_step_computes_with_leaves_the_graph() -> None:
    model = llama()
    generate(model)
    before = graphs_of(model)
    model.train()
    model.eval()
    model.requires_grad_(False)
    model.generation_config.max_new_tokens = 9
    with torch.no_grad():
        model(IDS)
        for parameter in model.parameters():
            parameter.mul_(1.5)
    wanted = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    wanted.load_state_dict(model.state_dict())
    assert torch.equal(generate(model), generate(wanted))
    assert graphs_of(model) == before


def _written_in_place(rotary_emb: Any) -> None:
    rotary_emb.inv_freq.mul_(0.5)


def _replaced(rotary_emb: Any) -> None:
    rotary_emb.inv_freq = rotary_emb.inv_freq * 0.5


def _scaled(rotary_emb: Any) -> None:
    rotary_emb.attention_scaling = 1.5


@pytest.mark.parametrize("alter", [_written_in_place, _replaced, _scaled])
def test_tables_of_other_frequencies_are_old(alter: Callable[[Any], None]) -> None:
    model = llama()
    generate(model)
    (before,) = graphs_of(model)
    rotary_emb = model.model.rotary_emb
    # As a rewritten forward does.
    rotary_rows(rotary_emb, torch.zeros(2, 1, 64), torch.zeros(2, 1, dtype=torch.int64), before.cache)
    assert before.cache.tables
    generate(model)
    assert graphs_of(model) == [before]
    alter(rotary_emb)
    generate(model)
    assert before not in graphs_of(model)


def test_tables_that_nobody_altered_are_none() -> None:
    cache = PreallocatedCache(1, 2, 20, "cpu")
    rotary_emb = llama().model.rotary_emb
    assert not cache.has_old_tables
    for length in (1, 5, 20):
        ids = torch.arange(length).expand(2, length)
        rotary_rows(rotary_emb, torch.zeros(2, length, 64), ids, cache)
        assert not cache.has_old_tables


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = llama()
    wanted = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    wanted.load_state_dict(model.state_dict())
    projections = [model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj]
    with torch.no_grad():
        packed_linear(torch.ones(1, 64), *projections)
        for projection in projections:  # which are called one by one where that is as fast
            projection(torch.ones(1, 64))
    assert torch.equal(generate(model), generate(wanted))
    assert len(graphs_of(model)) == 1


def test_writes_are_counted() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    with torch.inference_mode():
        tensor.add_(1)
        of_inference_mode = torch.ones(2)
    assert version_of(of_inference_mode) is None
    of_inference_mode.data = torch.ones(2)
    assert version_of(of_inference_mode) is None
    assert before is not None
    assert version_of(tensor) == before + 1


class Leaves(LlamaForCausalLM):
    """Each prompt leaves its length, which the steps behind it read."""

    def forward(self, input_ids: Any = None, **keywords: Any) -> Any:
        if input_ids.shape[1] > 1:
            self.seen = input_ids.shape[1]
        outputs = super().forward(input_ids=input_ids, **keywords)
        outputs.logits = outputs.logits.roll(self.seen, -1)
        return outputs


class LeavesInOurs(GraphGeneration, Leaves):
    _step_without_graph = True


def test_what_prompts_leave_is_no_change_and_a_step_that_reads_it_is_not_replayed() -> None:
    torch.manual_seed(0)
    model = LeavesInOurs(LlamaConfig(**SIZES)).eval()
    original = Leaves(model.config).eval()
    original.load_state_dict(model.state_dict())
    backend.reset_fallbacks()
    for number, length in enumerate((4, 4, 4, 3, 2, 4)):
        ids = IDS[:, :length]
        found, wanted = (m.generate(ids, max_new_tokens=6, do_sample=False) for m in (model, original))
        assert torch.equal(found, wanted)
        if number < 3:
            assert not backend.fallbacks().get(("generate", "step_reads"))
            assert "seen" in store_of(model)._left
    assert backend.fallbacks()[("generate", "step_reads")] == 2
    assert not graphs_of(model)
