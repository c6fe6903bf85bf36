"""Real shapes for latency: a configuration class's own fields, scaled to about 1 or 8 billion parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .configs import Variant
from .workbench import Workbench

SHAPES: dict[str, dict[str, int]] = {
    "1b": {"hidden": 2048, "layers": 16, "heads": 32, "kv": 8, "head": 64, "mlp": 8192, "vocab": 128256},
    "8b": {"hidden": 4096, "layers": 32, "heads": 32, "kv": 8, "head": 128, "mlp": 14336, "vocab": 128256},
}
FIELDS = {
    "hidden_size": "hidden", "n_embd": "hidden", "d_model": "hidden", "num_hidden_layers": "layers",
    "n_layer": "layers", "num_attention_heads": "heads", "n_head": "heads", "num_key_value_heads": "kv",
    "head_dim": "head", "intermediate_size": "mlp", "n_inner": "mlp", "vocab_size": "vocab",
}  # fmt: skip


def shaped_variant(bench: Workbench, shape: str, layers: int | None = None) -> Variant:
    """The variant to time: `tiny` is the base one; a checkpoint brings its own configuration."""
    if bench.options.weights is not None:
        return Variant("checkpoint", bench.subject.config_class.from_pretrained(bench.options.weights))
    if shape == "tiny":
        return bench.base
    defaults = bench.subject.config_class().to_dict()
    fields: dict[str, Any] = {name: SHAPES[shape][size] for name, size in FIELDS.items() if name in defaults}
    count = layers or SHAPES[shape]["layers"]
    fields |= {name: count for name in ("num_hidden_layers", "n_layer") if name in defaults}
    kinds = list(dict.fromkeys(defaults.get("layer_types") or ()))
    if len(kinds) > 1:
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
    fields |= {name: 0 for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in defaults}
    return Variant(f"{shape}, {count} layers", bench.subject.config_class(**fields))


def wide_variant(bench: Workbench) -> Variant:
    """Two layers of a real shape with a small vocabulary: the sizes at which a GPU's kernels take their usual path."""
    config = shaped_variant(replace(bench, options=replace(bench.options, weights=None)), "1b", layers=2).config
    for name, value in {
        "vocab_size": 1024,
        "num_local_experts": 8,
        "num_experts": 8,
        "moe_intermediate_size": 512,
    }.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return Variant("wide", config)
