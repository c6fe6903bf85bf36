"""A call of `generate()` without a cache takes the graph's loop where the model computes the same behind one."""

from __future__ import annotations

import copy

import pytest
import torch
from test_generation import DEVICE, EOS, GPU, Llama, Never, loops, pair, prompt, run
from transformers import BartConfig, BartForConditionalGeneration, LlamaForCausalLM, MptConfig, MptForCausalLM

from hf_rewrite_runtime.cache.cache_argument import NAMES
from hf_rewrite_runtime.decode.eligibility import can_watch
from hf_rewrite_runtime.decode.graph_cache import store_of
from hf_rewrite_runtime.generate.generation import GraphGeneration

CALLS = {
    "greedy": {},
    "drawn": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "own criterion": {"stopping_criteria": [Never()]},
    "kept": {"output_scores": True, "output_logits": True, "eos_token_id": EOS},
}


class Mpt(GraphGeneration, MptForCausalLM):
    _step_without_graph = not GPU


class Bart(GraphGeneration, BartForConditionalGeneration):
    _step_without_graph = not GPU


class ScaledByCache(Llama):
    """Computes something else where it has a cache."""

    def forward(self, *args, **kwargs):
        output = LlamaForCausalLM.forward(self, *args, **kwargs)
        if any(kwargs.get(name) is not None for name in NAMES):
            output.logits = output.logits + 0.1 * output.logits.sin()
        return output


def agree(model, original, inputs, **arguments):
    (mine, my_state), (theirs, their_state) = (
        run(one, copy.deepcopy(inputs), use_cache=False, **arguments) for one in (model, original)
    )
    assert torch.equal(mine.sequences, theirs.sequences)
    assert torch.equal(my_state, their_state)
    assert mine.keys() == theirs.keys()
    assert not any(name in mine for name in NAMES)
    for name in ("logits", "scores"):
        for a, b in zip(mine.get(name) or (), theirs.get(name) or (), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_equals_the_loop_that_reads_all_anew(name, call):
    model, original = pair(name)
    for length in (9, 4):
        agree(model, original, prompt(length=length, padded=length > 4), **CALLS[call])
        assert loops(model) == []


def test_a_configuration_may_ask_for_it():
    config = MptConfig(
        d_model=64, n_heads=4, n_layers=2, vocab_size=199, max_seq_len=256, use_cache=False, initializer_range=0.3
    )
    model = Mpt(config).eval().to(DEVICE)
    original = MptForCausalLM(copy.deepcopy(config)).eval().to(DEVICE)
    original.load_state_dict(model.state_dict())
    mine, theirs = (run(one, prompt())[0].sequences for one in (model, original))
    assert torch.equal(mine, theirs)
    assert loops(model) == (["step_not_capturable"] if GPU else [])  # the original makes its slopes on the host


def test_of_an_encoder_and_a_decoder():
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(
        d_model=64,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        vocab_size=199,
        init_std=0.3,
        forced_eos_token_id=None,
        **sizes,
    )
    model = Bart(config).eval().to(DEVICE)
    original = BartForConditionalGeneration(copy.deepcopy(config)).eval().to(DEVICE)
    original.load_state_dict(model.state_dict())
    agree(model, original, prompt(), num_beams=1)
    assert loops(model) == ([] if can_watch() else ["inputs"])


def test_a_cache_that_changes_the_numbers_is_refused():
    _, original = pair()
    model = ScaledByCache(original.config).eval().to(DEVICE)
    model.load_state_dict(original.state_dict())
    for _ in range(2):
        agree(model, original, prompt())
        assert loops(model) == ["no_cache"]


def test_it_is_tried_once(monkeypatch):
    model, _ = pair()
    run(model, prompt(), use_cache=False)
    assert store_of(model).caches_alike
    store_of(model).caches_alike = False
    run(model, prompt(), use_cache=False)
    assert loops(model) == ["no_cache"]
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
    run(model, prompt(), use_cache=False)
    assert loops(model) == []
