"""Whether a growing cache of transformers' holds nothing but what the buffers here stand for: asked field by field.

A cache may have a mode (`activate_past_recording`), an attribute, a method or layers of its caller's. What is neither
carried over nor as in a new one of the same class is unknown here, whatever it is.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import FunctionType
from typing import Any

from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from . import states
from .layer_factory import has_like
from .layers import INDEXED
from .nested_tensors import _OF_THE_LOOP, _PLAIN

_CARRIED: dict[Any, set[str]] = {
    CacheLayerMixin: {"keys", "values", "is_initialized", "dtype", "device"},
    DynamicSlidingWindowLayer: {"sliding_window", "cumulative_length", "_sliding_window_tensor"},
    INDEXED: {"indexer_keys", "indexer_position_ids", "is_indexer_initialized", "indexer_dtype", "indexer_device"},
    states.LAYER: {
        "number_of_states", "conv_states", "recurrent_states", "conv_kernel_size", "has_previous_state",
        "is_conv_states_initialized", "is_recurrent_states_initialized", "dtype", "device",
    },
}  # fmt: skip
"""What `load` and `store` take over of a layer, by the class that has it."""
_OF_BOTH = {"self_attention_cache", "cross_attention_cache", "is_updated", *_OF_THE_LOOP}
_SEEN: dict[type, list[Any]] = {}
"""What classes were seen to consist of, every function their own."""
_RECORDS = "record_past"


def is_known(cache: Any) -> bool:
    """Return whether a growing cache holds nothing else than what is carried over, and its code is its class's own.

    So with both caches of one that also holds what an encoder found.
    """
    if isinstance(cache, EncoderDecoderCache):
        both = cache.self_attention_cache, cache.cross_attention_cache
        plain = type(cache) is EncoderDecoderCache and vars(cache).keys() <= _OF_BOTH
        return plain and _has_own_code(EncoderDecoderCache) and all(map(is_known, both))
    kind: Any = type(cache)
    new, kinds = _new(kind), {*map(type, cache.layers)}
    return (
        new is not None
        and vars(cache).keys() <= vars(new).keys() | {*_OF_THE_LOOP}
        and cache.layer_class_to_replicate in (None, DynamicLayer)
        and not cache.offloading
        and all(map(has_like, kinds))
        and all(map(_is_as_new, cache.layers))
        and all(map(_has_own_code, (kind, *kinds)))
    )


def is_whole(layer: Any) -> bool:
    """Return whether a layer holds as many tokens as its next update has to read."""
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return True
    held = layer.keys.shape[-2] if layer.keys is not None and layer.keys.numel() else 0
    least, seen = min(layer.cumulative_length, layer.sliding_window - 1), layer.cumulative_length
    return least <= held <= (seen if getattr(layer, _RECORDS, False) else least)


def _is_as_new(layer: Any) -> bool:
    """Return whether every field that is not carried over is as in a new layer of the same class."""
    kind: Any = type(layer)
    held = vars(layer)
    if held.keys() <= _carried(kind):
        return True
    rest = held.keys() - _carried(kind)
    new = _new(kind, *((name, held[name]) for name in _arguments(kind) if name in held))
    return new is not None and all(_is_equal(held[name], vars(new).get(name, held)) for name in rest)


@lru_cache
def _carried(kind: type) -> frozenset[str]:
    names: set[str] = set().union(*(_CARRIED.get(base, set()) for base in kind.__mro__))
    # States of a layer that records grow, and have no buffer; its keys are all in one.
    return frozenset(names if states.LAYER in kind.__mro__ else names | {_RECORDS})


@lru_cache
def _arguments(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind).parameters)


@lru_cache
def _new(kind: type, *arguments: tuple[str, Any]) -> Any:
    """Return a new object of a class; None if that wants other arguments."""
    try:
        return kind(**dict(arguments))
    except TypeError:
        return None


def _is_equal(one: Any, other: Any) -> bool:
    return isinstance(one, _PLAIN) and type(one) is type(other) and one == other


def _has_own_code(kind: type) -> bool:
    """Return whether every function of a class is of the library that the class is of: nobody has put in another."""
    held = [value for base in kind.__mro__ for value in vars(base).values()]
    if _SEEN.get(kind) == held:
        return True
    for base in kind.__mro__:
        functions = [value for value in vars(base).values() if isinstance(value, FunctionType)]
        if any(_library(value.__globals__["__name__"]) != _library(base.__module__) for value in functions):
            return False
    _SEEN[kind] = held
    return True


def _library(module: str) -> str:
    return module.partition(".")[0]
