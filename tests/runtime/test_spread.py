"""Models that accelerate has wrapped as it does where their layers are on several devices; here all are on one."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_rewrite_runtime.core.explanation import explain
from hf_rewrite_runtime.decode import device_map
from hf_rewrite_runtime.generate import generation
from hf_rewrite_runtime.generate.generation import GraphGeneration

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCKS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]


class Llama(GraphGeneration, LlamaForCausalLM):
    _step_without_graph = DEVICE == "cpu"


def whole() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=199, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Llama(config).to(DEVICE).eval().requires_grad_(False)


def dispatched(model: Any) -> Any:
    """Wrap a model as for several devices, and say that its first layer is on another."""
    places = dict.fromkeys(BLOCKS, 0 if DEVICE == "cuda" else "cpu")
    model = accelerate.dispatch_model(model, places, main_device=places["lm_head"], force_hooks=True)
    model.hf_device_map = {**places, "model.layers.0": "another"}
    return model


def moved(monkeypatch: pytest.MonkeyPatch, model: Any) -> Counter[str]:
    """Count the modules that move what they are called with."""
    names = {id(module): name for name, module in model.named_modules()}
    found: Counter[str] = Counter()
    right = accelerate.hooks.AlignDevicesHook.pre_forward

    def pre_forward(hook: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
        found[names[id(module)]] += 1
        return right(hook, module, *arguments, **keywords)

    monkeypatch.setattr(accelerate.hooks.AlignDevicesHook, "pre_forward", pre_forward)
    return found


def generate(model: Any, **settings: Any) -> torch.Tensor:
    prompt = torch.arange(1, 13, device=DEVICE).view(2, 6)
    tokens: torch.Tensor = model.generate(prompt, max_new_tokens=5, do_sample=False, **settings)
    return tokens


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_inside_of_a_block_nothing_is_moved_again(monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]) -> None:
    model = whole()
    rows = slice(0, 1) if settings.get("prompt_lookup_num_tokens") else slice(None)
    expected = model.generate(torch.arange(1, 13, device=DEVICE).view(2, 6)[rows], max_new_tokens=5, **settings)
    model = dispatched(model)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert sum(forward is not None for forward in before.values()) > 2 * len(BLOCKS)
    found = moved(monkeypatch, model)
    got = model.generate(torch.arange(1, 13, device=DEVICE).view(2, 6)[rows], max_new_tokens=5, **settings)
    assert torch.equal(got, expected)
    assert set(found) == {"", *BLOCKS}
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    assert settings or "generate: several_devices" in str(explain(model))


def test_wrappers_stand_again_where_a_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dispatched(whole())
    monkeypatch.setattr(model.model.layers[1].mlp.act_fn, "forward", lambda states: 1 / 0)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError):
        generate(model)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.mlp._hf_hook, "execution_device", "meta"),
        lambda layer: setattr(layer.mlp._hf_hook, "offload", True),
        lambda layer: setattr(layer.mlp._hf_hook, "no_grad", True),
        lambda layer: setattr(layer.mlp, "forward", lambda *given: given[0]),
        lambda layer: setattr(layer.mlp, "_old_forward", lambda *given: given[0]),
        lambda layer: accelerate.hooks.add_hook_to_module(layer.mlp, accelerate.hooks.ModelHook(), append=True),
        lambda layer: layer.mlp.register_buffer("elsewhere", torch.empty(1, device="meta")),
    ],
)
def test_a_block_that_does_more_than_move_its_inputs_stays_as_it_is(change: Any) -> None:
    model = dispatched(whole())
    change(model.model.layers[1])
    wrapped = [copy.copy(layer.self_attn.q_proj.__dict__) for layer in model.model.layers]
    with device_map.plain_inside(model):
        assert "forward" not in model.model.layers[0].self_attn.q_proj.__dict__
        assert model.model.layers[1].self_attn.q_proj.__dict__["forward"] is wrapped[1]["forward"]
        assert all("forward" in layer.__dict__ for layer in model.model.layers)


def test_a_model_on_one_device_is_left_alone() -> None:
    model = dispatched(whole())
    del model.hf_device_map
    with device_map.plain_inside(model):
        assert "forward" in model.model.layers[0].self_attn.q_proj.__dict__


def test_modules_that_stay_wrapped_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dispatched(whole())
    found = moved(monkeypatch, model)
    monkeypatch.setattr(generation, "plain_inside", lambda model: device_map.contextlib.nullcontext())
    generate(model)
    assert len(found) > 2 * len(BLOCKS)
