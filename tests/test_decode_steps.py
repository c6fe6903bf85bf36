"""The `decode` methods of rewritten models, step by step, against the original on the whole sequence.

Two rows, one of them padded on the left, are prefilled into a `PreallocatedCache`; then one token at a time is
decoded, past the sliding window of the small configurations. Slots that nothing has written hold NaN.
"""

from __future__ import annotations

import copy
import importlib

import pytest

from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.judging.tolerances import bound
from rewrite.verify.models.configs import small_variants

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "phi": "PhiForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "opt": "OPTForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "cohere": "CohereForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gptj": "GPTJForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "laguna": "LagunaForCausalLM",
}
OF_SOME_RELEASES = ("afmoe", "bitnet", "gpt_neox", "gptj", "hunyuan_v1_dense", "laguna")
"""Files that are not in every release of transformers, or are written in another way there: no layer has a step."""
MORE = ("qk_layernorm", "use_qk_norm")
"""Attributes of attentions for which no step has a form: a layer asks before it takes its `decode`."""
PROMPT, NEW, PADDING, ROWS = 11, 7, 3, 2
LENGTH = PROMPT + NEW


def pair(rewritten, model, variant, dtype):
    """Return the original and the rewritten model with the same weights, none of them neutral."""
    original_class = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), MODELS[model])
    torch.manual_seed(0)
    eager = {"experts_implementation": "eager"} if variant.routed else {}
    models = []
    for cls in (original_class, getattr(rewritten(model), MODELS[model])):
        models.append(cls._from_config(copy.deepcopy(variant.config), **eager).to(dtype).eval())
    original, ours = models
    for parameter in original.parameters():
        parameter.data += torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05)
    ours.load_state_dict(original.state_dict())
    return original, ours


def inputs(variant):
    """Return token ids, mask and positions of the whole sequences."""
    ids = torch.randint(4, variant.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :PADDING] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def prefilled(rewritten, model, ours, ids, mask, positions):
    """Return a cache with the prompt in it, and NaN in the slots behind."""
    cache_file = runtime_part(rewritten(model).__name__, "cache/preallocated")
    cache = cache_file.PreallocatedCache(ours.config.get_text_config().num_hidden_layers, ROWS, LENGTH + 5, "cpu")
    cache.starts[0] = PADDING
    part = {"attention_mask": mask[:, :PROMPT], "position_ids": positions[:, :PROMPT]}
    ours(ids[:, :PROMPT], past_key_values=cache, use_cache=True, **part)
    for layer in cache.layers if asks_for_nothing_more(ours) else ():
        layer.keys[:, :, PROMPT:] = float("nan")
        layer.values[:, :, PROMPT:] = float("nan")
    return cache


def asks_for_nothing_more(ours):
    """Whether the layers take their `decode`; ordinary attention multiplies what it masks by zero."""
    attentions = [module for module in ours.modules() if hasattr(module, "q_proj")]
    return not any(getattr(attention, name, False) for attention in attentions for name in MORE)


def stepped(rewritten, model, ours, ids, mask, positions):
    """Return the logits `[B, NEW, V]` of one token at a time."""
    cache = prefilled(rewritten, model, ours, ids, mask, positions)
    whole = torch.zeros(ROWS, cache.capacity, dtype=torch.long)
    logits = []
    for number in range(PROMPT, LENGTH):
        whole[:, : number + 1] = mask[:, : number + 1]
        cache.position.fill_(number)
        step = {"position_ids": positions[:, number, None], "attention_mask": whole}
        with cache.step():
            logits.append(ours(ids[:, number, None], past_key_values=cache, use_cache=True, **step).logits)
        cache.grow(1)
    return torch.cat(logits, dim=1)


def error(rewritten, model, variant):
    """Return the largest error of the steps' logits, relative to the largest logit, and its bound."""
    ids, mask, positions = inputs(variant)

    def run(dtype):
        original, ours = pair(rewritten, model, variant, dtype)
        expected = original(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, PROMPT:]
        return ours, expected

    allowed = "fp64 max"
    ours, expected = run(torch.float64)
    if not expected.isfinite().all():
        allowed = "fp32 max"
        ours, expected = run(torch.float32)
    found = stepped(rewritten, model, ours, ids, mask, positions)
    return float((found - expected).abs().max() / expected.abs().max()), bound(allowed)


def variants(model):
    """Return the small configurations of a model."""
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return small_variants(getattr(module, MODELS[model]), True, {})


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_steps_give_the_logits_of_the_original(rewritten, model):
    if model in OF_SOME_RELEASES:
        pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
        module = importlib.import_module(f"{rewritten(model).__name__}.modeling_{model}")
        if not hasattr(module, "cached_attention") and not any(
            hasattr(kind, "decode") for kind in vars(module).values()
        ):
            pytest.skip(f"no layer of {model} has a step in this release")
    for variant in variants(model):
        off, allowed = error(rewritten, model, variant)
        assert off < allowed, variant.name


@pytest.mark.parametrize("dropped", ["sliding_window", "softcap", "sinks", "scaling"])
@torch.no_grad()
def test_an_argument_left_out_is_seen(rewritten, monkeypatch, dropped):
    model = {"sliding_window": "qwen3", "softcap": "gemma2", "sinks": "gpt_oss", "scaling": "granite"}[dropped]
    rewritten(model)
    module = runtime_part(rewritten(model).__name__, "attention/cached_attention")
    whole = module.decode_attention
    neutral = {"scaling": 1.0}.get(dropped)
    monkeypatch.setattr(module, "decode_attention", lambda *args, **given: whole(*args, **{**given, dropped: neutral}))
    seen = [off > allowed for off, allowed in (error(rewritten, model, variant) for variant in variants(model))]
    assert any(seen)


@torch.no_grad()
def test_a_step_makes_no_mask(rewritten, monkeypatch):
    module = importlib.import_module(f"{rewritten('llama').__name__}.modeling_llama")
    variant = variants("llama")[0]
    _, ours = pair(rewritten, "llama", variant, torch.float32)
    ids, mask, positions = inputs(variant)
    cache = prefilled(rewritten, "llama", ours, ids, mask, positions)
    calls = []
    made = module.create_causal_mask
    monkeypatch.setattr(module, "create_causal_mask", lambda *args, **given: calls.append(1) or made(*args, **given))
    step = {"position_ids": positions[:, PROMPT, None], "attention_mask": mask}
    cache.position.fill_(PROMPT)
    with cache.step():
        ours(ids[:, PROMPT, None], past_key_values=cache, use_cache=True, **step)
    assert not calls
    ours(ids[:, PROMPT, None], past_key_values=cache, use_cache=True, **step)
    assert calls
