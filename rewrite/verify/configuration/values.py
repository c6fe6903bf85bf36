"""Other values for the fields of a configuration, by kind and name: what a rewrite could have taken for granted."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .reader import FieldsRead

ACTIVATIONS = ("gelu", "silu", "relu2", "gelu_pytorch_tanh")
LENGTH = 8
"""Of the pretraining that a type of rotary embedding supposes: shorter than the prompts."""
ROPE_TYPES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": LENGTH, "beta_fast": 8.0, "beta_slow": 0.5},
    "llama3": {
        "factor": 6.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2 * LENGTH,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": LENGTH, "attention_factor": 1.2},
}
"""The types of `ROPE_INIT_FUNCTIONS`, with what each needs; the lists of longrope are as long as the head wants."""
NAMES = frozenset({
    "model_type", "dtype", "torch_dtype", "id2label", "label2id", "architectures", "transformers_version",
    "problem_type", "num_labels", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id",
    "is_encoder_decoder", "tokenizer_class", "name_or_path",
})  # fmt: skip
"""What says which model it is, how its classes are called and where its texts begin and end, not what it computes."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
NEEDED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""What a kind of layers needs, where it is not there."""

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
EPS = ("eps", "epsilon")
RANDOM = ("drop", "jitter", "noise")
"""Parts of the names of what acts in training mode only."""


@dataclass(frozen=True)
class Variation:
    """One field away from what it is, with what else has to change for it; `changes` are by the way to a field."""

    field: str
    text: str
    changes: Mapping[str, Any]
    trains: bool = False
    """Whether it shows in training mode only."""

    always: bool = False
    """Whether it is tried although another value of the field shows."""

    @property
    def name(self) -> str:
        """The field and its value."""
        return f"{self.field} = {self.text}"


@dataclass(frozen=True)
class Choices:
    """The variations of one field: one after another until one shows, and those that are tried always."""

    field: str
    variations: tuple[Variation, ...] = ()
    reason: str = ""
    """Why there is none."""


@dataclass
class _Chooser:
    config: Any
    read: FieldsRead
    token: int
    """A token that the prompt holds."""
    prefix: str = ""
    values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.values = self.config.to_dict()
        if "head_dim" in self._read() and self._first(KV_HEADS) is not None:
            self.values.setdefault("head_dim", None)  # read with a default; no field of many configurations

    def all(self) -> Iterator[Choices]:
        for name, value in self.values.items():
            if name.startswith("_") or name in NAMES or name not in self._read():
                continue
            if name == "rope_parameters":
                yield from self._rope(value)
            elif not isinstance(value, dict):
                yield self._choices(name, value)

    def _read(self) -> set[str]:
        """The names that the code reads, as the configuration calls them."""
        names = getattr(self.config, "attribute_map", {})
        return self.read.names | {names[name] for name in self.read.names if name in names}

    def _choices(self, name: str, value: Any) -> Choices:
        every = name in KV_HEADS or name in HEADS or _is_activation(name, value) or name.endswith(EPS)
        others = [other for other in self._others(name, value) if other != value or type(other) is not type(value)]
        found = [self._variation(name, other, every or other is None) for other in others]
        found += self._with_others(name)
        reason = "" if found else f"no other value is known for {value!r}"
        return Choices(self.prefix + name, tuple(found), reason)

    def _variation(self, name: str, value: Any, always: bool) -> Variation:
        trains = any(part in name for part in RANDOM) and isinstance(value, float)
        changes = {name: value} | (self._longer(name, value) if name in LAYERS else {})
        if name.endswith("layer_types"):
            changes |= {other: 5 for kind, other in NEEDED.items() if kind in value and self.values.get(other) is None}
        return self._of(name, _shown(value), changes, trains=trains, always=always)

    def _of(self, name: str, text: str, changes: Mapping[str, Any], **more: bool) -> Variation:
        return Variation(
            self.prefix + name, text, {self.prefix + way: value for way, value in changes.items()}, **more
        )

    def _longer(self, name: str, count: int) -> dict[str, Any]:
        """The lists with an entry per layer, as long as there are layers."""
        before = self.values[name]
        return {
            other: [value[index % before] for index in range(count)]
            for other, value in self.values.items()
            if isinstance(value, (list, tuple)) and len(value) == before > 0
        }

    def _with_others(self, name: str) -> Iterator[Variation]:
        """Values that several fields have together: heads with those for keys and values, or with their size."""
        heads, shared = self._first(HEADS), self._first(KV_HEADS)
        if name.endswith("dim") and len(alike := self._alike(name)) > 1:
            half = self.values[name] // 2
            yield self._of(name, f"{half}, as {' and '.join(alike[1:])}", dict.fromkeys(alike, half))
        if heads is None:
            return
        count = self.values[heads]
        if name in KV_HEADS:  # half of the heads: neither one, nor two, nor all
            yield self._of(name, f"{count} of {2 * count}", {heads: 2 * count, name: count}, always=True)
        if name == heads and shared is not None:
            yield self._of(name, f"{2 * count} of {2 * count}", {heads: 2 * count, shared: 2 * count})
        if name == "head_dim" and self.values[name] is None and self._first(("hidden_size",)) is not None:
            wide = 2 * self.values["hidden_size"] // count  # all heads together are wider than the hidden states
            yield self._of(name, str(wide), {name: wide})
        if name in (heads, "head_dim") and self._first(("head_dim",)) is not None:
            size = self.values["head_dim"] // 2
            yield self._of(name, f"{2 * count} heads of {size}", {heads: 2 * count, "head_dim": size})
        if name == "hidden_size":
            width = 2 * self.values[name]
            yield self._of(name, f"{width}, {2 * count} heads", {name: width, heads: 2 * count})

    def _alike(self, name: str) -> list[str]:
        """A field and the others for a size that have its value."""
        value = self.values[name]
        others = [other for other in self.values if other.endswith("dim") and other != name]
        return [name, *(other for other in others if self.values[other] == value)] if isinstance(value, int) else []

    def _first(self, names: Sequence[str]) -> str | None:
        """The name that the configuration has for a number of heads."""
        return next((name for name in names if isinstance(self.values.get(name), int)), None)

    def _others(self, name: str, value: Any) -> Iterator[Any]:
        if isinstance(value, bool):
            yield not value
        elif name in KV_HEADS:
            heads = self._first(HEADS)
            yield from (count for count in (1, self.values[heads] if heads else 4) if count != value)
        elif isinstance(value, int):
            yield from self._integers(name, value)
        elif isinstance(value, float):
            yield from _floats(name, value)
        elif isinstance(value, str):
            yield from self._strings(name, value)
        elif isinstance(value, (list, tuple)):
            yield from self._lists(name, list(value))
        elif value is None:
            yield from _instead_of_none(name, self.token, self._declared(name))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and self._may_be_none(name):
            yield None

    def _integers(self, name: str, value: int) -> Iterator[int | float]:
        if name.endswith("token_id"):
            yield self.token
        elif "window" in name:
            yield from (value // 2 + 1, value + 1)
        elif name in HEADS:
            yield from (2 * value, value // 2)
        elif value >= 8:
            yield from (value // 2, value + value // 2, value + 1)
        else:
            least = 1 if "topk" in name else 0  # where none is chosen all are alike, and which are taken is chance
            yield from (other for other in (value + 1, 2 * value, value - 1, 0) if other != value and other >= least)
        if "theta" in name:
            yield 500.0

    def _strings(self, name: str, value: str) -> Iterator[str]:
        if _is_activation(name, value):
            yield from (other for other in ACTIVATIONS if other != value)
        yield from sorted(self.read.strings[name] - {value})

    def _lists(self, name: str, value: list[Any]) -> Iterator[list[Any]]:
        if all(isinstance(item, str) for item in value) and value:
            kinds = sorted(set(value) | (self._kinds() if name.endswith("layer_types") else set()))
            turned = [kinds[(kinds.index(item) + 1) % len(kinds)] for item in value]
            yield from (other for other in (turned, *([kind] * len(value) for kind in kinds)) if other != value)
        elif all(isinstance(item, int) and item in (0, 1) for item in value) and "layers" in name:
            yield [1 - item for item in value] if len(value) > 1 else [] if value else [0]
        elif value and all(isinstance(item, float) for item in value):
            yield [item + 0.1 if math.isfinite(item) else 0.4 for item in value]
        elif value:
            yield value[::-1]
        else:
            yield [0]

    def _kinds(self) -> set[str]:
        """The kinds of layers that the model's own file speaks of."""
        from transformers.configuration_utils import ALLOWED_LAYER_TYPES

        return self.read.constants & set(ALLOWED_LAYER_TYPES)

    def _may_be_none(self, name: str) -> bool:
        return "None" in self._declared(name)

    def _declared(self, name: str) -> str:
        """The type of a field as its class declares it."""
        declared = getattr(type(self.config), "__dataclass_fields__", {}).get(name)
        return str(declared.type) if declared is not None else ""

    def _rope(self, parameters: Any) -> Iterator[Choices]:
        """Frequencies, rotated share and type of a rotary embedding, of each kind of layer that has its own."""
        if not isinstance(parameters, dict):
            yield Choices(f"{self.prefix}rope_parameters", reason="there are none")
            return
        nested = {key: inner for key, inner in parameters.items() if isinstance(inner, dict)}
        for key, inner in (nested or {"": parameters}).items():
            way = f"{self.prefix}rope_parameters.{key}".rstrip(".")
            yield from self._one_rope(way, inner)

    def _one_rope(self, way: str, parameters: Mapping[str, Any]) -> Iterator[Choices]:
        types = tuple(
            Variation(f"{way}.rope_type", kind, self._rope_changes(way, kind, needed, parameters), always=True)
            for kind, needed in ROPE_TYPES.items()
            if kind != parameters.get("rope_type", "default")
        )
        yield Choices(f"{way}.rope_type", types)
        share = 0.5 if parameters.get("partial_rotary_factor") != 0.5 else 1.0
        for key, value in {"rope_theta": 500.0, "partial_rotary_factor": share}.items():
            if key in parameters or f"rope_parameters.{key}" in self.read.names:
                yield Choices(f"{way}.{key}", (Variation(f"{way}.{key}", _shown(value), {f"{way}.{key}": value}),))

    def _rope_changes(
        self, way: str, kind: str, needed: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        changes: dict[str, Any] = {f"{way}.rope_type": kind}
        changes |= {f"{way}.{key}": value for key, value in needed.items()}
        if kind == "dynamic":  # what it was trained with is read from the number of positions
            changes[f"{self.prefix}max_position_embeddings"] = LENGTH
        if kind == "longrope":
            pairs = self._rotated(parameters) // 2
            changes[f"{way}.short_factor"] = [1.0 + 0.1 * index for index in range(pairs)]
            changes[f"{way}.long_factor"] = [2.0 + 0.3 * index for index in range(pairs)]
        if kind in ("yarn", "longrope") and "original_max_position_embeddings" in self.values:
            changes[f"{self.prefix}original_max_position_embeddings"] = LENGTH
        return changes

    def _rotated(self, parameters: Mapping[str, Any]) -> int:
        """How many values of a head are rotated."""
        heads = self._first(HEADS)
        size = (
            self.values.get("qk_rope_head_dim")
            or self.values.get("head_dim")
            or self.values.get("hidden_size", 0) // (self.values[heads] if heads else 1)
        )
        return int(size * (parameters.get("partial_rotary_factor") or 1.0))


def choices(config: Any, read: FieldsRead, token: int, parts: tuple[str, ...]) -> Iterator[Choices]:
    """Yield the choices for each field of a configuration that is read, and for those of some of its parts.

    Args:
        config: the configuration, which is left alone.
        read: what the model reads.
        token: a token of the prompts, for what treats one apart.
        parts: the parts of a model of models that run.
    """
    yield from _Chooser(config, read, token).all()
    for name in parts:
        yield from _Chooser(getattr(config, name), read, token, f"{name}.").all()


def changed(config: Any, variations: tuple[Variation, ...]) -> Any:
    """A copy of a configuration with these variations."""
    other = copy.deepcopy(config)
    for variation in variations:
        for way, value in variation.changes.items():
            _set(other, way.split("."), copy.deepcopy(value))
    return other


def _set(config: Any, way: list[str], value: Any) -> None:
    for name in way[:-1]:
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    if isinstance(config, dict):
        config[way[-1]] = value
    else:
        setattr(config, way[-1], value)


def _is_activation(name: str, value: Any) -> bool:
    return isinstance(value, str) and ("act" in name.split("_") or "activation" in name or "act_fn" in name)


def _floats(name: str, value: float) -> Iterator[float]:
    if any(part in name for part in RANDOM):
        yield 0.25 if value != 0.25 else 0.4
    elif name.endswith(EPS):
        yield from (1e-2, 1e-6)
    elif "theta" in name:
        yield 500.0
    elif "range" in name or name.endswith("std"):
        yield value * 0.5 or 0.05
    else:
        yield from (value * 0.6, value * 2.5) if value else (0.3, 2.0)


def _instead_of_none(name: str, token: int, declared: str) -> Iterator[Any]:
    if name.endswith("token_id"):
        yield token
    elif "window" in name or "chunk" in name:
        yield 5
    elif name.endswith(("dim", "_size")):
        yield from (8, 24)  # even, as halves of a head want it; `True` is a head of one column
    elif "cap" in name:
        yield 3.0
    elif any(part in name for part in ("scal", "multiplier", "factor", "eps", "dropout", "coef")):
        yield 0.7
    else:
        known = {"float": 0.7, "int": 5, "bool": True, "list[int]": [0]}
        found = [value for kind, value in known.items() if re.search(rf"(?<!\[)\b{re.escape(kind)}", declared)]
        yield from found if declared else known.values()


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
