"""Which layer of fixed addresses stands for what one of a growing cache holds: states, keys and values, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..core.target import GROWS, INDEXER, STATES
from . import states
from .grown import GrownLayer, grown_by
from .layers import INDEXED, IndexedLayer, PreallocatedLayer

if TYPE_CHECKING:
    from .preallocated import PreallocatedCache


if states.LAYER is not None:

    class StateLayer(states.LAYER):
        """One layer's states; nothing of it grows with the text."""

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Allocate zeroed states like those given, which any later call may write."""
            with torch.inference_mode(False):
                super().lazy_initialization(*args, **kwargs)

    class HybridLayer(StateLayer, PreallocatedLayer):
        """One layer's keys and values, and states beside them."""

        def __init__(self, cache: PreallocatedCache, number_of_states: int):
            PreallocatedLayer.__init__(self, cache)
            states.LAYER.__init__(self, number_of_states=number_of_states)

        @property
        def is_compileable(self) -> bool:
            """Whether masks must be made for the whole buffer."""
            return self.cache.stepping

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Allocate buffers for keys and values, which are given by position, or states, given by name."""
            kind = PreallocatedLayer if args else StateLayer
            kind.lazy_initialization(self, *args, **kwargs)

        def get_max_length(self) -> int:
            """Return the capacity."""
            return PreallocatedLayer.get_max_length(self)


def layer_like(layer: Any, cache: PreallocatedCache) -> Any:
    """Return a layer of `cache` for what a layer of transformers' growing cache holds; None if nothing here can."""
    if STATES and states.is_stateful(layer):
        if type(layer).__name__ not in _STATEFUL:
            return None
        hybrid = isinstance(layer, DynamicLayer)
        return HybridLayer(cache, layer.number_of_states) if hybrid else StateLayer(layer.number_of_states)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return PreallocatedLayer(cache)
    if INDEXER and INDEXED is not None and type(layer) is INDEXED:
        return IndexedLayer(cache)
    if GROWS and (grown := grown_by(type(layer))) is not None:
        return GrownLayer(cache, grown)
    return layer if type(layer).__name__ == "DummyLayer" else None


_STATEFUL = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
