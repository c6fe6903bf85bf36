"""Which layer of fixed addresses stands for what a layer of a growing cache holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..core.target import GROWS, INDEXER
from . import layers, states
from .grown import GrownLayer, grown_by

if TYPE_CHECKING:
    from .preallocated import PreallocatedCache

OFFERS: dict[str, dict[str, str]] = {}


def layer_like(layer: Any, cache: PreallocatedCache) -> Any:
    """Return a layer of `cache` for what a layer of transformers' growing cache holds; None if nothing here can."""
    if states.is_stateful(layer):
        if type(layer).__name__ not in _STATEFUL:
            return None
        hybrid = isinstance(layer, DynamicLayer)
        return (
            layers.HybridLayer(cache, layer.number_of_states) if hybrid else layers.StateLayer(layer.number_of_states)
        )
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return layers.PreallocatedLayer(cache)
    if INDEXER and layers.INDEXED is not None and type(layer) is layers.INDEXED:
        return layers.IndexedLayer(cache)
    if GROWS and (grown := grown_by(type(layer))) is not None:
        return GrownLayer(cache, grown)
    return layer if type(layer).__name__ == "DummyLayer" else None


_STATEFUL = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
