"""Builds the smallest configurations of a model that still exercise what the large ones do.

Every switch that a rewrite could drop is off its neutral value: eps is large, multipliers differ from 1, the
sliding window is shorter than the prompts, heads are grouped. A second variant flips biases, tying and windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import VerificationError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW, POSITIONS = 64, 4, 2, 16, 128, 8, 512
MAX_PARAMETERS = 20_000_000

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 80),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), POSITIONS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), KV_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "v_head_dim", "qk_nope_head_dim"), HEAD_DIM),
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "vocab_size": VOCAB,
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), POSITIONS
    ),
    "original_max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"), 2),
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_window_layers": 1,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logit_scale": 0.7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SET_WHERE_NONE = {"pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "n_inner"}
SWITCHES = (
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias", "add_bias_linear", "add_qkv_bias",
    "use_qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn", "norm_topk_prob", "use_sliding_window",
    "scale_attn_by_inverse_layer_idx", "attention_out_bias", "lm_head_bias",
)  # fmt: skip
PROFILES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": HEADS},
    {"num_key_value_heads": HEADS, "head_dim": 8},
    {"num_hidden_layers": 4, "n_layer": 4},
    {"num_hidden_layers": 8, "n_layer": 8},
    {"rotary_dim": 8},
    {"hidden_size": 128, "head_dim": 32},
)


@dataclass(frozen=True)
class Variant:
    """A named configuration; `config` is not shared with a model, models get copies."""

    name: str
    config: Any

    @property
    def vocab_size(self) -> int:
        """The number of token ids a prompt may use."""
        return int(getattr(self.config.get_text_config(), "vocab_size", VOCAB))

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts, so that a rounding can flip a choice."""
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return any((getattr(self.config, name, None) or 0) > 1 for name in names)


def small_variants(model_class: Any, causal: bool, overrides: Mapping[str, Any]) -> list[Variant]:
    """The base variant and, where the configuration has switches, the one with the switches flipped.

    Raises:
        VerificationError: no profile of small values makes a model that can be built.
    """
    defaults = _defaults(model_class.config_class)
    decoder = {"is_decoder": True} if causal and "is_decoder" in defaults else {}
    decoder |= _nested_fields(model_class.config_class)
    base = _first_that_builds(model_class, small_fields(defaults) | decoder | dict(overrides))
    flipped = flipped_fields(defaults)
    variants = [Variant("base", base)]
    if flipped:
        fields = small_fields(defaults, window=True) | flipped | decoder | dict(overrides)
        variants.append(Variant("switched", _first_that_builds(model_class, fields)))
    return variants


def _defaults(config_class: Any) -> dict[str, Any]:
    fields: dict[str, Any] = config_class().to_dict()
    return fields


def _nested_fields(config_class: Any) -> dict[str, Any]:
    """Small configurations for the parts of a model of models: its text, vision and audio configurations."""
    whole = config_class()
    nested: dict[str, Any] = {}
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(whole, name, None)
        if part is not None:
            nested[name] = type(part)(**small_fields(part.to_dict()))
    return nested


def small_fields(defaults: Mapping[str, Any], window: bool = False) -> dict[str, Any]:
    """Small values for the well-known fields that a configuration has and uses (those that are not None)."""
    fields = {
        name: value
        for name, value in SMALL.items()
        if name in defaults and (defaults[name] is not None or name in SET_WHERE_NONE)
    }
    fields |= {name: 1e-3 for name in defaults if name.endswith(("eps", "epsilon")) and defaults[name]}
    fields |= {
        name: 3
        for name, value in defaults.items()
        if name.endswith("_token_id") and name not in SMALL and isinstance(value, int) and value >= VOCAB
    }
    if window and "sliding_window" in defaults:
        fields["sliding_window"] = WINDOW
    return fields | _layer_fields(defaults)


def _layer_fields(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as there are kinds of layer, at least two, every kind once."""
    kinds = list(dict.fromkeys(defaults.get("layer_types") or ()))
    fields: dict[str, Any] = {}
    if len(kinds) > 1:
        layers = kinds if "num_hidden_layers" in defaults else kinds[:2]
        fields |= {"layer_types": layers, "num_hidden_layers": len(layers)}
    if defaults.get("no_rope_layers"):
        fields["no_rope_layers"] = [1, 0]
    return fields


def flipped_fields(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a configuration, each away from its default."""
    flipped: dict[str, Any] = {name: not defaults[name] for name in SWITCHES if isinstance(defaults.get(name), bool)}
    if isinstance(defaults.get("tie_word_embeddings"), bool):
        flipped["tie_word_embeddings"] = not defaults["tie_word_embeddings"]
    if isinstance(defaults.get("head_dim"), int):
        flipped["head_dim"] = 2 * HEAD_DIM
    return flipped


def _first_that_builds(model_class: Any, fields: Mapping[str, Any]) -> Any:
    problems: list[str] = []
    for config in _candidates(model_class.config_class, fields, problems):
        problem = _problem(model_class, config)
        if problem is None:
            return config
        problems.append(problem)
    raise VerificationError(
        f"no small configuration of {model_class.__name__} runs ({problems[0].rstrip('.')}), so there is nothing to "
        "verify with. --weights DIR verifies with a checkpoint, --no-verify writes the package without the proof."
    )


def _candidates(config_class: Any, fields: Mapping[str, Any], problems: list[str]) -> Iterator[Any]:
    for profile in PROFILES:
        changed = {name: value for name, value in profile.items() if name in fields or name == "rotary_dim"}
        if profile and not changed:
            continue
        try:
            yield config_class(**{**fields, **changed})
        except Exception as error:  # configuration classes raise what they like; the next profile is tried
            problems.append(f"{type(error).__name__}: {error}")


def _problem(model_class: Any, config: Any) -> str | None:
    """Why a model of this configuration cannot be built and run, or None."""
    import copy

    import torch

    try:
        with torch.device("meta"):
            skeleton = model_class._from_config(copy.deepcopy(config))
        parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        if parameters > MAX_PARAMETERS:
            return f"it still has {parameters:,} parameters"
        with torch.no_grad():
            model_class._from_config(copy.deepcopy(config)).eval()(torch.arange(3, 9)[None])
    except Exception as error:  # models raise what they like on sizes they do not support
        return f"{type(error).__name__}: {error}"
    return None
