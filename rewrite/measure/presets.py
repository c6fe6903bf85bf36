"""Real shapes: the sizes of known models, put into the fields that a configuration class has."""

from __future__ import annotations

from typing import Any

from rewrite.errors import UsageError

LLAMA_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 128, "max_position_embeddings": 4096, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    },
    "1b": {  # Llama-3.2-1B
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "rope_parameters": LLAMA_ROPE, "rms_norm_eps": 1e-5,
    },
    "8b": {  # Llama-3.1-8B
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "rope_parameters": LLAMA_ROPE, "rms_norm_eps": 1e-5,
    },
    "70b": {  # Llama-3.1-70B
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 131072, "rope_parameters": LLAMA_ROPE, "rms_norm_eps": 1e-5,
    },
    "30b-a3b": {  # Qwen3-30B-A3B
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "tie_word_embeddings": False,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}  # fmt: skip
OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
"""Other spellings of a size in configuration classes."""

LATENT = "qk_rope_head_dim"
"""The field of models that keep latents: heads have parts of sizes of their own, and share none."""


class ShapeDoesNotFit(UsageError):
    """A shape needs something that the model's configuration does not have."""

    def __init__(self, shape: str, config: str, what: str):
        super().__init__(f"{config} has no {what}, which the shape '{shape}' needs: choose another --shape.")


def config_for(config_class: Any, shape: str, **overrides: Any) -> Any:
    """A configuration of this class in the sizes of `shape`.

    Raises:
        ShapeDoesNotFit: if the shape routes tokens to experts and the model has none.
    """
    defaults = config_class().to_dict()
    fields: dict[str, Any] = {}
    for name, value in {**SHAPES[shape], **overrides}.items():
        known = [spelling for spelling in (name, *OTHER_NAMES.get(name, ())) if spelling in defaults]
        if name == "head_dim":  # models read it where their configuration class does not declare it
            known = [] if LATENT in defaults else [name]
        if name == "num_experts" and not known and shape != "tiny":
            raise ShapeDoesNotFit(shape, config_class.__name__, "experts")
        fields |= dict.fromkeys(known, value)
    if LATENT in defaults:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    kinds = list(dict.fromkeys(defaults.get("layer_types") or ()))
    if len(kinds) > 1:
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(fields["num_hidden_layers"])]
    fields |= {name: None for name in ("bos_token_id", "eos_token_id") if name in defaults}
    return config_class(**fields | {"pad_token_id": 0})
