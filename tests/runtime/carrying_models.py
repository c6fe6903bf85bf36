"""Models that carry more than keys and values: on modules, handed on in a list, or in an object."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back
from hf_rewrite_runtime.cache.nested_tensors import Nested
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.decode.recurrent_state import hands_on_states, keeps_states
from hf_rewrite_runtime.generate.generation import GraphGeneration

CARRYING = {
    "RecurrentGemmaForCausalLM": "recurrent_gemma.modeling_recurrent_gemma",
    "RwkvForCausalLM": "rwkv.modeling_rwkv",
    "xLSTMForCausalLM": "xlstm.modeling_xlstm",
}
KEEPS, HANDS, OBJECT = CARRYING
INSTALLED = [name for name in CARRYING if hasattr(transformers, name)]

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
V = 64
ENDS = {"vocab_size": V, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DRAWN = {"do_sample": True, "top_k": 0, "temperature": 2.0}
PLAIN = (*vars(DynamicCache()), "_is_user_defined", "config")


def file_of(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{CARRYING[name]}")


def config(name: str) -> Any:
    if name == KEEPS:
        return transformers.RecurrentGemmaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, lru_width=32,
            head_dim=16, attention_window_size=6, **ENDS,
        )  # fmt: skip
    if name == HANDS:
        return transformers.RwkvConfig(
            hidden_size=32,
            attention_hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            rescale_every=2,
            **ENDS,
        )
    return transformers.xLSTMConfig(
        hidden_size=128, embedding_dim=128, num_hidden_layers=2, num_blocks=2, num_heads=4, **ENDS
    )


def mark(name: str) -> Callable[[type], type]:
    if name == KEEPS:
        return keeps_states("conv1d_state", "recurrent_states")
    if name == HANDS:
        return hands_on_states("state")
    kind = file_of(name)
    return hands_on_states(argument_of(kind.xLSTMForCausalLM), kind.xLSTMCache)


def pair(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model with the loop and the original, with the same weights."""
    original = getattr(transformers, name)
    ours = mark(name)(type(name, (GraphGeneration, original), {"_step_without_graph": not GPU}))
    torch.manual_seed(0)
    models: Any = [kind(config(name)).eval().to(DEVICE, dtype) for kind in (ours, original)]
    for parameter in models[0].parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    models[1].load_state_dict(models[0].state_dict())
    backend.reset_fallbacks()
    return models


def asked(rows: int = 2, length: int = 7, seed: int = 0, padded: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, V, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        mask[0, :2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(DEVICE), "attention_mask": mask.to(DEVICE)}


def run(model: Any, inputs: dict[str, Any], **settings: Any) -> Any:
    torch.manual_seed(5)
    given = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **given | settings)


def reasons() -> list[str]:
    found = [reason for operator, reason in backend.fallbacks() if operator == "generate"]
    backend.reset_fallbacks()
    return found


def held(cache: Any) -> dict[str, Any]:
    """Everything that a cache holds, by name; tensors for comparing, and what is none."""
    kind = type(cache)
    found = Nested({name: value for name, value in vars(cache).items() if name not in PLAIN}, kind)
    tensors = {f"own {number}": tensor for number, tensor in enumerate(found.tensors)}
    for place, layer in enumerate(getattr(cache, "layers", ())):
        own = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{place} {name}": value for name, value in own.items()}
    return {"type": kind, "form": str(found.form), **tensors}


def left_by(model: Any, output: Any) -> dict[str, Any]:
    """What a call left: on the modules, in a list that it returned, or in a cache."""
    if isinstance(model, (transformers.RecurrentGemmaForCausalLM, transformers.RwkvForCausalLM)):
        own = [(one, name) for one in model.modules() for name in ("conv1d_state", "recurrent_states")]
        kept = [getattr(one, name) for one, name in own if name in vars(one)]
        handed = given_back(output) if isinstance(given_back(output), list) else []
        return {str(number): tensor for number, tensor in enumerate((*kept, *handed))}
    return held(given_back(output))


def tensors_in(left: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in left.items() if isinstance(value, torch.Tensor)}


def alike(models: Any, outputs: Any, tolerance: float = 1e-3) -> None:
    mine, wanted = outputs
    assert torch.equal(mine.sequences, wanted.sequences)
    for one, other in zip(mine.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    left = [left_by(*one) for one in zip(models, outputs, strict=True)]
    assert left[0].keys() == left[1].keys()
    assert tensors_in(left[0]), "nothing was compared"
    for name, value in left[0].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, left[1][name], rtol=tolerance, atol=tolerance)
        else:
            assert value == left[1][name]


def both(models: Any, inputs: dict[str, Any], expected: Sequence[str] | None = (), **settings: Any) -> Any:
    """Outputs of both models, compared; `expected` reasons against the loop, None for any."""
    outputs = [run(model, {k: v.clone() for k, v in inputs.items()}, **settings) for model in models]
    found = reasons()
    assert expected is None or found == list(expected)
    alike(models, outputs)
    return outputs
