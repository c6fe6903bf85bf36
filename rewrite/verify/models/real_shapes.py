"""Real shapes for latency: a configuration class's own fields, scaled to about 1 or 8 billion parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rewrite.measure.presets import OTHER_NAMES, SHAPES

from ..judging.compare import NotRun
from .configs import Variant
from .model_pair import Workbench, build, on_original

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size",
)  # fmt: skip
"""What is taken of a preset."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "depth", "encoder_layers", "decoder_layers")
"""Fields that count layers, of a model or of one of its parts."""
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
FEW_EXPERTS = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 8)

LARGEST = 12e9
"""Parameters of the largest model that is made: both sides of it in 16 bits take 48 GB."""


def shaped_variant(bench: Workbench, shape: str, layers: int | None = None) -> Variant:
    """The variant to time: `tiny` is the base one; a checkpoint brings its own configuration.

    A class that takes no such widths together (Mamba2's heads go by its own expansion) has its own, one that would be
    too large has few experts.

    Raises:
        NotRun: no model of the class is of that size.
    """
    if bench.options.weights is not None:
        return Variant("checkpoint", bench.subject.config_class.from_pretrained(bench.options.weights))
    return bench.base if shape == "tiny" else _shaped(bench, shape, layers or SHAPES[shape]["num_hidden_layers"], {})


def wide_variant(bench: Workbench) -> Variant:
    """Two layers of a real shape with a small vocabulary: the sizes at which a GPU's kernels take their usual path.

    Raises:
        NotRun: no model of the class is of that size.
    """
    small = {"vocab_size": 1024, "moe_intermediate_size": 512}
    return replace(_shaped(bench, "1b", 2, FEW_EXPERTS | small), name="wide")


def _shaped(bench: Workbench, shape: str, layers: int, fixed: dict[str, int]) -> Variant:
    """The first configuration that a model of the class can be made of."""
    sizes = {name: SHAPES[shape][size] for size in SIZES for name in (size, *OTHER_NAMES.get(size, ()))}
    known = {name: size for name, size in sizes.items() if name == "vocab_size"}
    problems: dict[str, None] = {}
    for name, fields in {
        shape: sizes,
        f"{shape} with few experts": sizes | FEW_EXPERTS,
        "its own widths": known,
        "its own widths with few experts": known | FEW_EXPERTS,
    }.items():
        try:
            config = on_original(_config, bench.subject.config_class, fields | fixed, layers)
            on_original(_fits, bench, config)
        except NotRun as reason:
            problems[str(reason)] = None
        else:
            return Variant(f"{name}, {layers} layers", config)
    raise NotRun("; ".join(problems))


def _config(config_class: Any, sizes: Mapping[str, int], layers: int) -> Any:
    """The configuration, and that of its text, with these sizes; other parts have their own widths."""
    plain = config_class()
    text = plain.get_text_config()
    parts = {name: getattr(plain, name, None) for name in getattr(plain, "sub_configs", {})}
    fields = _sized(plain.to_dict(), sizes, layers)
    for name, part in parts.items():
        if part is not None:
            own = part.to_dict()
            fields[name] = own | _sized(own, sizes if part is text else {}, layers)
    return config_class(**fields)


def _sized(defaults: Mapping[str, Any], sizes: Mapping[str, int], layers: int) -> dict[str, Any]:
    """The fields that say how large something is, those that are there."""
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if name in defaults}
    fields |= {name: layers for name in LAYERS if isinstance(defaults.get(name), int)}
    if kinds := list(dict.fromkeys(defaults.get("layer_types") or ())):
        fields["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return fields | {name: 0 for name in TOKENS if name in defaults}


def _fits(bench: Workbench, config: Any) -> None:
    """Raise unless a model can be made of it that is not larger; it is made without memory."""
    import torch

    with torch.device("meta"):
        model = build(bench.subject.original, Variant("", config), "eager", "bfloat16", "meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise NotRun(f"it has {count / 1e9:.1f} billion parameters")
