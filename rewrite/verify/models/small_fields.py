"""Small values for the fields that configurations have in common, by their names. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def small_fields(defaults: Mapping[str, Any], table: Mapping[str, Any] = FIELDS) -> dict[str, Any]:
    """Return small values for the fields of `table` that a configuration has and uses, and as many layers as kinds."""
    fields: dict[str, Any] = {
        name: value
        for name, value in table.items()
        if name in defaults and (defaults[name] is not None or name in SET_WHERE_NONE)
        if not isinstance(defaults[name], (list, tuple, dict))
    }
    epsilons = [name for name in defaults if name.endswith(("eps", "epsilon")) and isinstance(defaults[name], float)]
    fields |= {name: 1e-3 for name in epsilons if defaults[name]}  # a whole number is one of steps
    for name in LAYER_LISTS:
        kinds = list(dict.fromkeys(defaults.get(name) or ()))
        if len(kinds) > 1:
            fields |= {name: kinds, "num_hidden_layers": len(kinds)}
    if defaults.get("no_rope_layers"):
        fields["no_rope_layers"] = [1, 0]
    return fields
