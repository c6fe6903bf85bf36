"""What a change is, and what changes are made of: another value in place of one, put back afterwards."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .families import Side

SCALE = 0.8
_MISSING = object()


class Absent(Exception):
    """A package does not have what is to be changed: whoever would change it sees that."""


@dataclass(frozen=True)
class Change:
    """Something that a user may do between two calls, and undo."""

    kind: str
    name: str
    made: Callable[[Side], AbstractContextManager[object]]
    """Made for the length of a `with` block."""
    in_text: bool = False
    """Of what is called by the text of a file, which the rewritten one may not do: compared with its plain calls."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def altered(value: Any, name: str = "") -> Any:
    """Return what a function that computes something else would return in place of a value, as far as it can be."""
    if isinstance(value, torch.nn.Parameter):
        return value
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return value * SCALE
        if value.dtype is torch.bool and value.dim() and value.shape[-1] > 2:
            value = value.clone()
            value[..., 1] = False
            return value
        return value + 1 if name == "position_ids" else value
    if type(value) is float:
        return value * SCALE
    if isinstance(value, MutableMapping):  # model outputs too
        with contextlib.suppress(TypeError):
            for key, part in [*value.items()]:
                if isinstance(part, (Tensor, Mapping)):
                    value[key] = altered(part, str(key))
        return value
    if type(value) is tuple and value:
        first = next((n for n, part in enumerate(value) if isinstance(part, Tensor)), None)
        return value if first is None else (*value[:first], altered(value[first], name), *value[first + 1 :])
    return value


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns another result than one does, and looks like it."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return altered(function(*arguments, **keywords))

    return functools.wraps(function)(call) if hasattr(function, "__name__") else call


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns another result than one does, and takes whatever it is given."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return altered(function(*arguments, **keywords))

    return call


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute; it is what it was afterwards, or is not there."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def entry(registry: MutableMapping[Any, Any], key: Any, value: Any) -> Iterator[None]:
    """Set an entry of a registry; it is what it was afterwards, or is not there."""
    own = getattr(registry, "_local_mapping", registry)  # of transformers' registries, before what all have
    before = own.get(key, _MISSING)
    registry[key] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del registry[key]
        else:
            registry[key] = before


@contextlib.contextmanager
def several(*managers: AbstractContextManager[object]) -> Iterator[None]:
    """Enter several, in their order."""
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


@contextlib.contextmanager
def called(before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """Call a function at the start, and another one at the end."""
    before()
    try:
        yield
    finally:
        after()


def method_patched(owner: Any, name: str, how: Callable[..., Any] = wrapped) -> AbstractContextManager[None]:
    """Let a method of a class return another result."""
    static = inspect.getattr_static(owner, name)
    if isinstance(static, staticmethod):
        return patched(owner, name, staticmethod(how(static.__func__)))
    if isinstance(static, classmethod):
        return patched(owner, name, classmethod(how(static.__func__)))
    if isinstance(static, property):
        return patched(owner, name, property(how(static.fget)))
    return patched(owner, name, how(static))


def others(value: Any, name: str = "") -> list[Any]:
    """Return other values of the same kind that a setting might have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(1, value // 2)] if value else [1]
    if isinstance(value, float):
        return [value * 0.5] if value else [0.5]
    if isinstance(value, torch.dtype):
        return [torch.float64]
    if isinstance(value, str):
        return [other for other in _STRINGS.get(name, ()) if other != value]
    if isinstance(value, (list, tuple)) and len(set(map(str, value))) > 1:
        return [type(value)(reversed(value))]
    if value is None:
        return [*_UNSET.get(name, (True, 1))]
    return []


_STRINGS = {
    "hidden_act": ["relu"],
    "hidden_activation": ["relu"],
    "activation_function": ["relu"],
    "_attn_implementation": ["eager", "flex_attention", "flash_attention_2"],
    "_attn_implementation_internal": ["eager"],
    "_experts_implementation": ["eager", "grouped_mm", "batched_mm"],
    "_experts_implementation_internal": ["eager", "batched_mm"],
    "rope_type": ["linear", "dynamic", "yarn", "longrope"],
    "early_stopping": ["never"],
}
_UNSET: dict[str, list[Any]] = {
    "eos_token_id": [7, [7, 9]],
    "pad_token_id": [3],
    "bos_token_id": [3],
    "decoder_start_token_id": [3],
    "forced_bos_token_id": [7],
    "forced_eos_token_id": [7],
    "bad_words_ids": [[[5], [17, 3]]],
    "force_words_ids": [[[5]]],
    "suppress_tokens": [[5, 6, 7]],
    "begin_suppress_tokens": [[5, 6, 7]],
    "sequence_bias": [[[[5], 10.0]]],
    "exponential_decay_length_penalty": [(1, 1.5)],
    "temperature": [0.7],
    "top_k": [5],
    "top_p": [0.7],
    "min_p": [0.1],
    "top_h": [0.4],
    "typical_p": [0.7],
    "epsilon_cutoff": [0.01],
    "eta_cutoff": [0.01],
    "repetition_penalty": [1.5],
    "encoder_repetition_penalty": [1.5],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [2],
    "length_penalty": [2.0],
    "diversity_penalty": [0.5],
    "guidance_scale": [1.5],
    "num_beams": [2],
    "num_beam_groups": [2],
    "num_return_sequences": [2],
    "max_length": [12],
    "min_length": [12],
    "max_new_tokens": [4],
    "min_new_tokens": [4],
    "max_time": [1e-9],
    "stop_strings": [["a"]],
    "penalty_alpha": [0.6],
    "cache_implementation": [
        "static",
        "dynamic",
        "offloaded",
        "dynamic_full",
        "hybrid",
        "sliding_window",
        "quantized",
    ],
    "prompt_lookup_num_tokens": [3],
    "early_stopping": [True],
    "watermarking_config": [{"bias": 2.0}],
    "sliding_window": [4, 8],
    "layer_types": [["full_attention", "full_attention"]],
    "attn_logit_softcapping": [5.0],
    "final_logit_softcapping": [5.0],
}
