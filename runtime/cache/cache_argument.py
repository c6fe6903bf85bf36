"""Under which name a model takes its cache and gives it back: transformers 5.24 calls `cache` what had two names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params")
"""The last one is that of models that keep states alone, before release 5.24."""


@lru_cache
def passed_on() -> str:
    """Return what the generation loop of the installed transformers calls a cache, unless it is of states alone."""
    from transformers.generation import GenerationMixin

    prepared = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return NAMES[0] if NAMES[0] in prepared else NAMES[1]


def argument_of(model: Any) -> str:
    """Return the name under which a model's `forward` takes a cache; the loop's, if it names none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in (passed_on(), *NAMES) if name in accepted), passed_on())


def asked_with(model: Any) -> str:
    """Return the name under which `generate` of a model takes a cache."""
    return NAMES[0] if passed_on() == NAMES[0] else argument_of(model)


def given_back(outputs: Any) -> Any:
    """Return the cache among what a model or `generate` returns; None if there is none."""
    # Asked by an old name, outputs of release 5.24 give it too, with a warning.
    held = list(outputs) if isinstance(outputs, Mapping) else []
    return next((outputs[name] for name in NAMES if name in held and outputs[name] is not None), None)


def keeps_states_alone(cache: Any) -> bool:
    """Return whether no layer of a cache of transformers' holds keys and values."""
    from transformers.cache_utils import CacheLayerMixin, EncoderDecoderCache

    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers = getattr(own, "layers", ())
    return not any(isinstance(layer, CacheLayerMixin) for layer in layers) and bool(layers)
