"""The smallest configuration of a model that still has what the large one has: grouped heads, a window, experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

MOST_PARAMETERS = 20_000_000
_HEADS = 4
FIELDS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "vocab_size": 128,
    "type_vocab_size": 2,
    "sliding_window": 8,
    "max_window_layers": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER_LISTS = ("layer_types", "layers_block_type")
"""Fields that name the kind of every layer."""
SET_WHERE_NONE = {"pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "n_inner"}
PROFILES: tuple[dict[str, int], ...] = (
    {},
    {"num_key_value_heads": _HEADS},
    {"num_key_value_heads": _HEADS, "head_dim": 8},
    {"num_hidden_layers": 4, "n_layer": 4},
    {"num_hidden_layers": 8, "n_layer": 8},
    {"rotary_dim": 8},
)


class NoSmallModel(RuntimeError):
    """None of the small configurations makes a model that runs."""

    def __init__(self, model: str, why: str):
        super().__init__(f"no small {model} could be made ({why}): give a checkpoint, selftest('FOLDER')")


def small_config(model_class: type[PreTrainedModel]) -> Any:
    """Return a small configuration with which `model_class` can be built and run.

    Raises:
        NoSmallModel: if there is none.
    """
    why = "it has no configuration class"
    for config in _candidates(model_class):
        if isinstance(config, str):
            why = config
        elif (problem := _problem(model_class, config)) is None:
            return config
        else:
            why = problem
    raise NoSmallModel(model_class.__name__, why)


def _candidates(model_class: type[PreTrainedModel]) -> Iterator[Any]:
    """Yield configurations, and in words why one could not be made."""
    config_class: Any = model_class.config_class
    if config_class is None:
        return
    whole = config_class()
    fields = small_fields(whole.to_dict())
    for name in getattr(config_class, "sub_configs", {}):
        if (part := getattr(whole, name, None)) is not None:
            fields[name] = type(part)(**small_fields(part.to_dict()))
    for profile in PROFILES:
        changed = {name: value for name, value in profile.items() if name in fields or name == "rotary_dim"}
        if changed or not profile:
            try:
                yield config_class(**{**fields, **changed})
            except Exception as error:  # configurations raise what they like; the next one is tried
                yield f"{type(error).__name__}: {error}"


def small_fields(defaults: Mapping[str, Any], table: Mapping[str, Any] = FIELDS) -> dict[str, Any]:
    """Return small values for the fields of `table` that a configuration has and uses, and as many layers as kinds."""
    fields: dict[str, Any] = {
        name: value
        for name, value in table.items()
        if name in defaults and (defaults[name] is not None or name in SET_WHERE_NONE)
        if not isinstance(defaults[name], (list, tuple, dict))
    }
    fields |= {name: 1e-3 for name in defaults if name.endswith(("eps", "epsilon")) and defaults[name]}
    for name in LAYER_LISTS:
        kinds = list(dict.fromkeys(defaults.get(name) or ()))
        if len(kinds) > 1:
            fields |= {name: kinds, "num_hidden_layers": len(kinds)}
    if defaults.get("no_rope_layers"):
        fields["no_rope_layers"] = [1, 0]
    return fields


def _problem(model_class: type[PreTrainedModel], config: Any) -> str | None:
    try:
        with torch.device("meta"):
            skeleton = model_class._from_config(copy.deepcopy(config))
        parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        if parameters > MOST_PARAMETERS:
            return f"it still has {parameters:,} parameters"
        with torch.no_grad():
            model_class._from_config(copy.deepcopy(config)).eval()(torch.arange(3, 9)[None])
    except Exception as error:  # models raise what they like on sizes that they do not support
        return f"{type(error).__name__}: {error}"
    return None
