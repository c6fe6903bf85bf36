"""Which layer of fixed addresses stands for what one of a growing cache holds: states, keys and values, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from . import states
from .layers import INDEXED, IndexedLayer, PreallocatedLayer, choose_rows

if TYPE_CHECKING:
    from .preallocated import PreallocatedCache


if states.LAYER is not None:

    class StateLayer(states.LAYER):
        """One layer's states; nothing of it grows with the text."""

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Allocate zeroed states like those given, which any later call may write."""
            with torch.inference_mode(False):
                super().lazy_initialization(*args, **kwargs)

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            """Let each row hold what row `beam_idx [B]` held, in place: graphs keep the addresses."""
            for state in states.tensors([self]):
                choose_rows(state, beam_idx)

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

        def reorder_cache(self, beam_idx: torch.Tensor) -> None:
            """Choose rows of keys and values, and of states."""
            StateLayer.reorder_cache(self, beam_idx)
            PreallocatedLayer.reorder_cache(self, beam_idx)

        def get_max_length(self) -> int:
            """Return the capacity."""
            return PreallocatedLayer.get_max_length(self)


def has_like(kind: type) -> bool:
    """Return whether a class of layers of transformers' growing cache has its like here."""
    return kind in (*_STATEFUL, *_GROWING, INDEXED, _DUMMY)


def layer_like(layer: Any, cache: PreallocatedCache) -> Any:
    """Return a layer of `cache` for what a layer of transformers' growing cache holds; None if nothing here can."""
    kind = type(layer)
    if not has_like(kind):
        return None
    if states.is_stateful(layer):
        hybrid = isinstance(layer, DynamicLayer)
        return HybridLayer(cache, layer.number_of_states) if hybrid else StateLayer(layer.number_of_states)
    if kind is INDEXED:
        return IndexedLayer(cache)
    return layer if kind is _DUMMY else PreallocatedLayer(cache)


def is_like(mine: Any, theirs: Any) -> bool:
    """Return whether a layer here stands for one of a growing cache; None for one that is not there yet."""
    if states.is_stateful(mine) != states.is_stateful(theirs):
        return False
    return INDEXED is None or isinstance(mine, IndexedLayer) == isinstance(theirs, INDEXED)


_GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
_DUMMY: Any = vars(cache_utils).get("DummyLayer")
_STATEFUL = tuple(
    vars(cache_utils).get(name, states.LAYER)
    for name in (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
)
