"""Builds the smallest configurations of a model that still exercise what the large ones do.

Fields get small values by their names (`sizes.py`), nested configurations too; where the model then does not build or
run, profiles of other values are tried. A second variant flips biases, tying and windows.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rewrite.errors import VerificationError

from . import small_fields as small
from .model_inputs import TEXT
from .sizes import CHOICES, ESSENTIAL, EVERY_KEY, HEAD_DIM, HEADS, HIDDEN, OVERRIDES, SMALL, VOCAB, WINDOW
from .smoke_test import runs_on

__all__ = ["VOCAB", "WINDOW", "Variant", "flipped_fields", "small_fields", "small_variants"]

MAX_TRIES = 40
SWITCHES = (
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias", "add_bias_linear", "add_qkv_bias",
    "use_qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn", "norm_topk_prob", "use_sliding_window",
    "scale_attn_by_inverse_layer_idx", "attention_out_bias", "lm_head_bias",
)  # fmt: skip
PROFILES: tuple[Mapping[str, Any], ...] = (
    *small.PROFILES,
    {"hidden_size": 128, "head_dim": 32},
    {"head_dim": None},
    {"sliding_window": None},
    {"patch_size": 4},
    {"image_size": 64, "patch_size": 16},
)
"""What is changed, where a configuration has the field, until a model runs: transformers.md counts the failures."""
NARROW: Mapping[str, Any] = {"widths by stage": 2 * HIDDEN}
"""The profile in which lists of widths are divided until no more is left of the largest. Where the other fields have
to agree with such a list no model runs, and the lists stay as they are."""
WIDTHS = re.compile(r"(^|_)(dims?|channels?|(hidden|intermediate)_sizes?)(_|$)")
LEAST_WIDTH = 16


@dataclass(frozen=True)
class Variant:
    """A named configuration; `config` is not shared with a model, models get copies."""

    name: str
    config: Any
    inputs: tuple[str, ...] = TEXT
    """The arguments of `forward` that the model runs on."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids a prompt may use."""
        return int(getattr(self.config.get_text_config(), "vocab_size", None) or VOCAB)

    @property
    def routed(self) -> bool:
        """Whether tokens are routed to experts, so that a rounding can flip a choice."""
        names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        return any((getattr(self.config, name, None) or 0) > 1 for name in names)

    def changed(self, fields: Mapping[str, Any], name: str | None = None) -> Variant:
        """The variant with other values of some fields, under another name if one is given."""
        config = copy.deepcopy(self.config)
        for field, value in fields.items():
            setattr(config, field, value)
        return replace(self, name=name or self.name, config=config)

    @property
    def without_choice(self) -> Variant:
        """The variant in which attention sees every key, where an indexer would choose a few.

        In 16 bits each choice is one of near ties: of the six keys of small models, another was taken in 3 to 13% of
        the tokens of a first layer and 10 to 38% of the next (DeepSeek V3.2, bfloat16 against fp64, either side).
        What is chosen is compared in fp64.
        """
        chosen = [name for name in CHOICES if isinstance(getattr(self.config, name, None), int)]
        return self.changed(dict.fromkeys(chosen, EVERY_KEY), f"{self.name}, every key") if chosen else self


def small_variants(model_class: Any, causal: bool, overrides: Mapping[str, Any]) -> list[Variant]:
    """The base variant and, where the configuration has switches, the one with the switches flipped.

    Raises:
        VerificationError: no profile of small values makes a model that can be built.
    """
    whole = model_class.config_class
    try:
        return _variants(model_class, whole, causal, overrides)
    except VerificationError as error:
        if f"'{whole.__name__}' object has no attribute" not in str(error):
            raise
        for part in _part_classes(whole).values():  # the class of a part, which does not say whose it is
            with contextlib.suppress(VerificationError):
                return _variants(model_class, part, causal, overrides)
        raise


def _variants(model_class: Any, config_class: Any, causal: bool, overrides: Mapping[str, Any]) -> list[Variant]:
    try:
        defaults = _defaults(config_class)
    except Exception as error:  # configuration classes raise what they like
        raise VerificationError(f"{config_class.__name__} has no default values: {error}") from error
    decoder = {"is_decoder": True} if causal and "is_decoder" in defaults else {}
    decoder |= (
        _rope_fields(config_class, defaults)
        | _nested_fields(config_class)
        | dict(OVERRIDES.get(getattr(config_class, "model_type", ""), {}))
    )
    decoder |= dict(overrides)
    base, inputs = _first_that_builds(model_class, config_class, small_fields(defaults) | decoder)
    flipped = flipped_fields(defaults)
    variants = [Variant("base", base, inputs)]
    if flipped:
        fields = small_fields(defaults, window=True) | flipped | decoder
        variants.append(Variant("switched", *_first_that_builds(model_class, config_class, fields)))
    return variants


def _defaults(config_class: Any) -> dict[str, Any]:
    return _with_padding(config_class())


def _with_padding(config: Any) -> dict[str, Any]:
    """The fields of a configuration, and the padding token that models of 5.0 read where the class declares none."""
    missing: dict[str, Any] = {} if hasattr(config, "pad_token_id") else {"pad_token_id": None}
    return missing | config.to_dict()


def _part_classes(config_class: Any) -> dict[str, Any]:
    """The configuration classes of the parts of a model of models, those that any model can be left out."""
    parts: Mapping[str, Any] = getattr(config_class, "sub_configs", {})
    return {name: part for name, part in parts.items() if callable(getattr(part, "to_dict", None))}


def _nested_fields(config_class: Any, profile: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Small configurations for the parts of a model of models: its text, vision and audio configurations."""
    whole = config_class()
    nested: dict[str, Any] = {}
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(whole, name, None)
        if part is None or isinstance(part, dict):
            continue
        nested[name] = _small_part(part, profile or {})
    return nested


def _small_part(part: Any, profile: Mapping[str, Any]) -> Any:
    """A small configuration of the class of `part`; as it is where its class accepts no small values."""
    defaults = _with_padding(part)
    fields = small_fields(defaults) | _rope_fields(type(part), defaults) | _nested_fields(type(part), profile)
    fields |= dict(OVERRIDES.get(getattr(part, "model_type", ""), {}))
    fewer = {name: value for name, value in fields.items() if _is_essential(name)}
    declared = {name: value for name, value in fields.items() if name != "pad_token_id"}
    for values in (fields, fields | {"num_key_value_heads": HEADS}, fewer, declared):
        known = {name: value for name, value in values.items() if name in fields}
        try:
            return _configured(type(part), known | _changed(profile, defaults, known))
        except Exception:  # configuration classes raise what they like; the next set is tried
            continue
    return part


def _absent_parts(config_class: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Small configurations for the parts that a configuration lacks by default; some models read them nevertheless."""
    absent: dict[str, Any] = {}
    for name, part_class in _part_classes(config_class).items():
        if name not in fields:
            with contextlib.suppress(Exception):  # configuration classes raise what they like
                absent[name] = _small_part(part_class(), {})
    return absent


def _rope_fields(config_class: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a rotary embedding over time, height and width that fit the small head."""
    rope = defaults.get("rope_parameters") or {}
    if "mrope_section" not in rope and "mrope_section" not in getattr(
        config_class, "ignore_keys_at_rope_validation", ()
    ):
        return {}
    section = [1, 1, 2] if defaults.get("qk_rope_head_dim") else [2, 3, 3]  # half of what is rotated of a head
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope, "mrope_section": section}}


def _changed(profile: Mapping[str, Any], defaults: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile changes of a configuration; lists of the kinds of layers repeat until they fit their number."""
    if profile is NARROW:
        return _narrow_fields(defaults)
    changed = {name: value for name, value in profile.items() if name in defaults}
    count = changed.get("num_hidden_layers", 0)
    for name in small.LAYER_LISTS if count else ():
        if kinds := fields.get(name):
            changed[name] = [kinds[index % len(kinds)] for index in range(count)]
    return changed


def _configured(config_class: Any, fields: Mapping[str, Any]) -> Any:
    """A configuration; its parts are handed over as objects, or as dicts where the class reads them as such."""
    try:
        return config_class(**fields)
    except (AttributeError, TypeError):
        plain = {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in fields.items()}
        if plain == fields:
            raise
        return config_class(**plain)


def small_fields(defaults: Mapping[str, Any], window: bool = False) -> dict[str, Any]:
    """Small values for the well-known fields that a configuration has and uses (those that are not None)."""
    fields = small.small_fields(defaults, SMALL)
    fields |= {
        name: 3
        for name, value in defaults.items()
        if name.endswith("_token_id") and name not in SMALL and isinstance(value, int) and value >= VOCAB
    }
    fields |= {
        name: VOCAB for name, value in defaults.items() if _is_vocabulary(name) and _is_width(value) and value > VOCAB
    }
    if window and "sliding_window" in defaults:
        fields["sliding_window"] = WINDOW
    if defaults.get("is_encoder_decoder") and defaults.get("decoder_start_token_id") is None:
        fields["decoder_start_token_id"] = 0
    return fields | _list_fields(defaults)


def _list_fields(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Lists per layer or stage, as long as they are in the large model."""
    fields: dict[str, Any] = {}
    if isinstance(defaults.get("image_size"), (list, tuple)):
        fields["image_size"] = [SMALL["image_size"]] * len(defaults["image_size"])
    if isinstance(defaults.get("depths"), (list, tuple)):
        fields["depths"] = [1] * len(defaults["depths"])
    return fields


def _narrow_fields(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of the widths of stages or layers, all divided by the same power of two, so that their ratios stay."""
    fields: dict[str, Any] = {}
    for name, widths in defaults.items():
        if WIDTHS.search(name) and isinstance(widths, (list, tuple)) and widths and all(map(_is_width, widths)):
            factor = 1
            while max(widths) >= 2 * factor * NARROW["widths by stage"] and all(
                width % (2 * factor) == 0 and width >= 2 * factor * LEAST_WIDTH for width in widths
            ):
                factor *= 2
            if factor > 1:
                fields[name] = [width // factor for width in widths]
    return fields


def _is_essential(name: str) -> bool:
    return name in ESSENTIAL or _is_vocabulary(name)


def _is_vocabulary(name: str) -> bool:
    """Whether a field is the number of rows of some embedding or head: of a part, or of one that is not padded."""
    return name.endswith("_vocab_size")


def _is_width(value: Any) -> bool:
    return type(value) is int and value > 0


def flipped_fields(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The switches of a configuration, each away from its default."""
    flipped: dict[str, Any] = {name: not defaults[name] for name in SWITCHES if isinstance(defaults.get(name), bool)}
    if isinstance(defaults.get("tie_word_embeddings"), bool):
        flipped["tie_word_embeddings"] = not defaults["tie_word_embeddings"]
    if isinstance(defaults.get("head_dim"), int):
        flipped["head_dim"] = 2 * HEAD_DIM
    return flipped


def _first_that_builds(model_class: Any, config_class: Any, fields: Mapping[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """A configuration of which a model runs, and the arguments that it runs on."""
    problems: list[str] = []
    for config in _candidates(config_class, fields, problems):
        found = runs_on(model_class, config, problems)
        if found is not None:
            return config, found
        if len(problems) > MAX_TRIES:
            break
    raise VerificationError(
        f"no small configuration of {model_class.__name__} runs ({problems[0].rstrip('.')}), so there is nothing to "
        "verify with. --weights DIR verifies with a checkpoint, --no-verify writes the package without the proof."
    )


def _candidates(config_class: Any, fields: Mapping[str, Any], problems: list[str]) -> Iterator[Any]:
    defaults = _defaults(config_class)
    nested = getattr(config_class, "sub_configs", {})
    fewer = {name: value for name, value in fields.items() if _is_essential(name) or name in nested}
    sets: list[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]
    sets = [(fields, (NARROW, *PROFILES)), (fewer, PROFILES)]
    if absent := _absent_parts(config_class, fields):
        sets.append(({**fields, **absent}, PROFILES[:1]))
    if defaults.get("use_cache"):  # without a cache, where the model cannot make one from its configuration
        sets.append(({**fields, "use_cache": False}, PROFILES[:1]))
    for start, profiles in sets:
        for profile in profiles:
            changed = _changed(profile, defaults, start)
            try:
                inner = _nested_fields(config_class, profile) if profile and nested else {}
                if profile and not changed and not inner:
                    continue
                yield _configured(config_class, {**start, **inner, **changed})
            except Exception as error:  # configuration classes raise what they like; the next profile is tried
                problems.append(f"{type(error).__name__}: {error}")
