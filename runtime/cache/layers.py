"""The layers of a cache of fixed addresses: keys and values, and an indexer's keys beside them.

B batch, Hk key/value heads, S capacity, D head_dim of keys, Dv of values, Di of an indexer's keys. A layer keeps keys
`[B, Hk, S, D]` and values `[B, Hk, S, Dv]`, with an indexer also keys `[B, S, Di]` by which it chooses among the
others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..aiter import aiter_calls
from ..aiter import latent as aiter_latent
from ..aiter import unified as aiter_unified
from .token import write_token

if TYPE_CHECKING:
    from .preallocated import PreallocatedCache

INDEXED: Any = getattr(cache_utils, "DynamicIndexedLayer", None)
"""transformers' growing layer with an indexer's keys; the first releases have none."""


class CacheFull(RuntimeError):
    """More tokens were written than the cache has slots."""

    def __init__(self, length: int, capacity: int):
        super().__init__(f"the cache holds {capacity} tokens and was asked for {length}: make one with more capacity")


class GrowsInStep(RuntimeError):
    """A step grows what has no buffer of fixed size."""

    def __init__(self, name: str):
        super().__init__(f"a step grows `{name}` of a layer of the cache, which has no buffer of fixed size")


class OtherContents(ValueError):
    """What a cache holds that is to be continued has not the form of what the model writes."""

    def __init__(self, length: int):
        super().__init__(f"a layer of the cache holds none of the {length} tokens, or another model's")


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values; its buffers are made at the first update, or by `allocate`."""

    is_sliding = False
    is_croppable = True
    keys: Tensor | None
    values: Tensor | None

    def __init__(self, cache: PreallocatedCache):
        super().__init__()
        self.cache = cache
        self.length = 0
        """Number of valid slots, as far as the host knows: `PreallocatedCache.grow` tells it of a graph's replays."""
        self.lacks = False
        """Whether a cache that is continued has nothing for this layer: a model that writes here reads less."""

    @property
    def is_compileable(self) -> bool:
        """Whether masks must be made for the whole buffer: transformers leaves them out for one token otherwise."""
        return self.cache.stepping

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the buffers for keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]` of this kind."""
        values = key_states if value_states is None else value_states
        self.allocate(key_states.shape[1], key_states.shape[3], values.shape[3], key_states.dtype, key_states.device)
        if values.dtype != key_states.dtype:
            assert self.values is not None
            with torch.inference_mode(False):
                self.values = self.values.to(_dtype_of_values(key_states, values))

    def allocate(self, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate zeroed buffers: the first decode steps read slots that nothing has written."""
        batch, capacity = self.cache.batch_size, self.cache.capacity
        with torch.inference_mode(False):
            self.keys = torch.zeros(batch, heads, capacity, key_dim, dtype=dtype, device=device)
            self.values = torch.zeros(batch, heads, capacity, value_dim, dtype=dtype, device=device)
            if aiter_latent.joins(heads, key_dim, value_dim, dtype):
                self.keys, self.values = aiter_latent.allocate(batch, capacity, self.keys.device)
            elif aiter_calls.candidate("unified_attention"):
                shape = batch, heads, capacity
                self.keys = aiter_unified.allocate((*shape, key_dim), dtype, self.keys.device)
                self.values = aiter_unified.allocate((*shape, value_dim), dtype, self.values.device)
        self.dtype, self.device = dtype, device
        self.is_initialized = True

    def free(self) -> None:
        """Give the buffers back."""
        self.keys = self.values = None
        self.is_initialized = False
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, Hk, n, D]` and `[B, Hk, n, Dv]` behind what is there; return what attention may read.

        Raises:
            OtherContents: if what is there is another's.
            CacheFull: if there is no room.
        """
        if not self.is_initialized:
            if self.lacks or key_states.shape[:3] != value_states.shape[:3]:
                raise OtherContents(self.length)
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if self.cache.stepping:
            write_token(self.keys, self.values, key_states, value_states, self.cache.slots)
            return self.keys, self.values
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.cache.capacity:
            raise CacheFull(end, self.cache.capacity)
        if start:
            self._continues(key_states, value_states)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        if start == 0:
            return key_states, value_states.to(self.values.dtype)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _continues(self, keys: Tensor, values: Tensor) -> None:
        """Check that keys and values go on with those that are there.

        Raises:
            OtherContents: if they have other sizes, or another dtype.
        """
        assert self.keys is not None
        assert self.values is not None
        sizes = [(one.shape[1], one.shape[3]) for one in (self.keys, self.values, keys, values)]
        wide = torch.promote_types(self.values.dtype, values.dtype)
        if sizes[:2] != sizes[2:] or self.keys.dtype != keys.dtype or self.values.dtype != wide:
            raise OtherContents(self.length)

    def get_seq_length(self) -> int:
        """Return the number of tokens before the next one; inside a step the device's 0-dimensional tensor of it."""
        return self.cache.position[0] if self.cache.stepping else self.length  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return how many keys the next update returns, and the position of the first."""
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return (self.cache.capacity if self.cache.stepping else self.length + count), 0

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.cache.capacity

    def get_max_cache_shape(self) -> int:
        """Return the capacity, under its older name."""
        return self.cache.capacity

    @property
    def buffers(self) -> list[Tensor]:
        """Everything with a slot for each token that has been written."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def of_slots(self, slots: Tensor) -> list[Tensor]:
        """Return what some slots `[n]` of each buffer hold, in fp32."""
        return [buffer.index_select(-2, slots).float() for buffer in self.buffers]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, as far as the host knows."""
        self.length = length
        self.lacks = self.lacks and length > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, or keep the first `tokens_to_remove` if it is positive."""
        kept = min(self.length, tokens_to_remove) if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.rewind(kept)

    def spoil(self, start: int, value: float) -> None:
        """Fill the values of every slot from `start` on."""
        if self.values is not None:
            self.values[:, :, start:] = value

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row hold what row `beam_idx [B]` held, in place: graphs keep the addresses."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                choose_rows(buffer[:, :, : self.length], beam_idx)

    def take(self, other: Any, length: int) -> None:
        """Take over what another layer holds of the first `length` tokens: all of them, or the last ones.

        Raises:
            OtherContents: if that has another form than what was written here before.
        """
        self.rewind(length)
        if getattr(other, "keys", None) is None or other.values is None or not other.keys.numel():
            return
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        assert self.keys is not None
        assert self.values is not None
        self._continues(other.keys, other.values)
        start = max(length - other.keys.shape[2], 0)
        self.keys[:, :, start:length] = other.keys[:, :, : length - start]
        self.values[:, :, start:length] = other.values[:, :, : length - start]

    def give(self, growing: Any, start: int, stop: int) -> None:
        """Make a growing layer of transformers' hold copies of the tokens from `start` to `stop`."""
        if self.keys is None or self.values is None:
            return
        if not growing.is_initialized:
            growing.lazy_initialization(self.keys, self.values)
        growing.keys = self.keys[:, :, start:stop].clone()
        growing.values = self.values[:, :, start:stop].clone()


class IndexedLayer(PreallocatedLayer):
    """One layer's keys and values, and the keys by which an indexer chooses which of them attention reads.

    A step gives the indexer every slot; those that hold no token are its model's to mask before it chooses, as it
    masks them for a `StaticCache` of transformers'. A layer that reads another one's keys and values may have the
    indexer's alone.

    A model may keep the positions of its tokens here, `[P, B, n]` (Qwen4Exp, by three axes). It grows them by
    `torch.cat` and computes the rotation of every slot from them: they are held as in a growing cache, and a step has
    none.
    """

    indexer_keys: Tensor | None = None
    _positions: Tensor | None = None

    def __init__(self, cache: PreallocatedCache):
        super().__init__(cache)
        self.indexer_length = 0
        """Number of valid slots of `indexer_keys`: an indexer may come before or after the keys and values."""
        self._positioned = 0

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions `[P, B, n]` that a model has put here, as many as there are tokens; None before."""
        return None if self._positions is None else self._positions[..., : self._positioned]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        if self.cache.stepping:
            raise GrowsInStep("indexer_position_ids")
        self._positions, self._positioned = positions, 0 if positions is None else positions.shape[-1]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write `[B, n, Di]` behind what is there; return what the indexer may read."""
        if self.indexer_keys is None:
            self.allocate_indexer(indexer_key_states)
        assert self.indexer_keys is not None
        if self.cache.stepping:
            return self.indexer_keys.index_copy_(1, self.cache.slots, indexer_key_states)
        start, end = self.indexer_length, self.indexer_length + indexer_key_states.shape[1]
        if end > self.cache.capacity:
            raise CacheFull(end, self.cache.capacity)
        self.indexer_keys[:, start:end] = indexer_key_states
        self.indexer_length = end
        return indexer_key_states if start == 0 else self.indexer_keys[:, :end]

    def allocate_indexer(self, like: Tensor) -> None:
        """Allocate a zeroed buffer for the indexer's keys `[B, n, Di]`."""
        shape = self.cache.batch_size, self.cache.capacity, like.shape[2]
        with torch.inference_mode(False):
            self.indexer_keys = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def free(self) -> None:
        """Give the buffers back."""
        super().free()
        self.indexer_keys, self.indexer_length, self._positions = None, 0, None

    @property
    def buffers(self) -> list[Tensor]:
        """Everything with a slot for each token that has been written."""
        return [*super().buffers, *(() if self.indexer_keys is None else (self.indexer_keys,))]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, as far as the host knows."""
        super().rewind(length)
        self.indexer_length = length
        self._positioned = length  # they stay where they are, as keys do: a plain step is told of behind it
        if not length:
            self._positions = None

    def spoil(self, start: int, value: float) -> None:
        """Fill the values, and the indexer's keys, of every slot from `start` on."""
        super().spoil(start, value)
        if self.indexer_keys is not None:
            self.indexer_keys[:, start:] = value

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, those of the indexer's keys too."""
        super().reorder_cache(beam_idx)
        if self.indexer_keys is not None:
            choose_rows(self.indexer_keys[:, : self.indexer_length], beam_idx)
        if self._positions is not None:
            self._positions = self._positions.index_select(1, beam_idx.to(self._positions.device))

    def take(self, other: Any, length: int) -> None:
        """Take over what another layer holds of the first `length` tokens."""
        super().take(other, length)
        if other.indexer_keys is not None:
            if self.indexer_keys is None:
                self.allocate_indexer(other.indexer_keys)
            assert self.indexer_keys is not None
            self.indexer_keys[:, :length] = other.indexer_keys[:, :length]
        positions = getattr(other, "indexer_position_ids", None)  # since 5.24
        self._positions = None if positions is None or not length else positions[..., :length].clone()

    def give(self, growing: Any, start: int, stop: int) -> None:
        """Make a growing layer of transformers' hold copies of the tokens from `start` to `stop`."""
        super().give(growing, start, stop)
        if self.indexer_keys is not None:
            if not growing.is_indexer_initialized:
                growing.lazy_initialization_indexer(self.indexer_keys)
            growing.indexer_keys = self.indexer_keys[:, start:stop].clone()
        if self._positions is not None:
            growing.indexer_position_ids = self._positions[..., start:stop].clone()


def choose_rows(held: Tensor, rows: Tensor) -> None:
    """Write to each row of a tensor `[B, …]` what row `rows [B]` of it holds."""
    held.copy_(held.index_select(0, rows.to(held.device)))


def _dtype_of_values(keys: Tensor, values: Tensor) -> torch.dtype:
    """Return the dtype in which transformers' growing cache keeps values: their own, before release 5.24 the keys'."""
    growing = DynamicLayer()
    growing.lazy_initialization(keys, values)
    assert growing.values is not None
    return torch.promote_types(growing.values.dtype, values.dtype)
