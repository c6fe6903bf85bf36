"""Keys and values in buffers that are allocated once, for prefill and for a decode step that a graph can hold.

B batch, Hk key/value heads, S capacity, D head_dim of keys, Dv of values. A layer keeps keys `[B, Hk, S, D]` and
values `[B, Hk, S, Dv]`; slot s holds position s of the sequence, and row b starts at slot `starts[b]`, those before
are left padding.

Between steps the cache behaves like transformers' `DynamicCache`: lengths are Python ints and an update returns what
is valid, as views. Inside `step()` nothing on the host knows the length: it is `position`, a tensor on the device, an
update writes one token there and returns the whole buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class CacheFull(RuntimeError):
    """More tokens were written than the cache has slots."""

    def __init__(self, length: int, capacity: int):
        super().__init__(f"the cache holds {capacity} tokens and was asked for {length}: make one with more capacity")


class PreallocatedLayer(CacheLayerMixin):
    """One layer's keys and values; its buffers are made at the first update, or by `allocate`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PreallocatedCache):
        super().__init__()
        self.cache = cache
        self.length = 0
        """Number of valid slots, as far as the host knows: `PreallocatedCache.grow` tells it of a graph's replays."""

    @property
    def is_compileable(self) -> bool:
        """Whether masks must be made for the whole buffer: transformers leaves them out for one token otherwise."""
        return self.cache.stepping

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the buffers for keys `[B, Hk, n, D]` and values `[B, Hk, n, Dv]` of this kind."""
        values = key_states if value_states is None else value_states
        self.allocate(key_states.shape[1], key_states.shape[3], values.shape[3], key_states.dtype, key_states.device)

    def allocate(self, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate zeroed buffers: the first decode steps read slots that nothing has written."""
        batch, capacity = self.cache.batch_size, self.cache.capacity
        with torch.inference_mode(False):
            self.keys = torch.zeros(batch, heads, capacity, key_dim, dtype=dtype, device=device)
            self.values = torch.zeros(batch, heads, capacity, value_dim, dtype=dtype, device=device)
        self.dtype, self.device = dtype, device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, Hk, n, D]` and `[B, Hk, n, Dv]` behind what is there; return what attention may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if self.cache.stepping:
            self.keys.index_copy_(2, self.cache.position, key_states)
            self.values.index_copy_(2, self.cache.position, value_states)
            return self.keys, self.values
        start, end = self.length, self.length + key_states.shape[2]
        if end > self.cache.capacity:
            raise CacheFull(end, self.cache.capacity)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        if start == 0:
            return key_states, value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

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

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, or keep the first `tokens_to_remove` if it is positive."""
        self.length = min(self.length, tokens_to_remove) if tokens_to_remove > 0 else self.length + tokens_to_remove


class PreallocatedCache(Cache):
    """A cache of fixed capacity and fixed addresses.

    Args:
        layer_count: number of attention layers.
        batch_size: number of rows.
        capacity: number of slots a row has.
        device: where the step's position lives.
    """

    def __init__(self, layer_count: int, batch_size: int, capacity: int, device: torch.device | str):
        self.batch_size_ = batch_size
        self.capacity = capacity
        self.stepping = False
        """Whether a decode step is running or being captured."""
        self.fused = True
        """Whether the layers may take their `decode` methods in a step."""
        self.tables: dict[object, tuple[Tensor, Tensor]] = {}
        """Cosines and sines `[S, R]` of every position, by who computes them: `rotary_rows`."""
        with torch.inference_mode(False):
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            """The slot that the running step writes, which is the number of tokens before it."""
            self.starts = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """The first slot of each row that is no left padding."""
        self._arrived: Tensor | None = None
        super().__init__(layers=[PreallocatedLayer(self) for _ in range(layer_count)])

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.batch_size_

    @property
    def length(self) -> int:
        """Number of valid slots, as far as the host knows."""
        return self.layers[0].length

    def arrived(self, count: int) -> Tensor:
        """Return `count` int32 zeros in which the programs of an attention kernel count themselves, one by one."""
        if self._arrived is None or self._arrived.numel() < count:
            with torch.inference_mode(False):
                self._arrived = torch.zeros(count, dtype=torch.int32, device=self.position.device)
        return self._arrived

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Make updates write one token at `position`, without the host."""
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def grow(self, tokens: int) -> None:
        """Tell the host that steps have written `tokens` more slots."""
        for layer in self.layers:
            layer.length += tokens

    def reset(self) -> None:
        """Forget every token; the buffers, their addresses and their contents stay."""
        for layer in self.layers:
            layer.length = 0
        self.position.zero_()
        self.starts.zero_()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [b for layer in self.layers for b in (layer.keys, layer.values) if b is not None]
        return sum(buffer.nbytes for buffer in buffers)


def decodes(past_key_values: object) -> bool:
    """Return whether a fused decode step is running: one token a row, into a `PreallocatedCache`."""
    return isinstance(past_key_values, PreallocatedCache) and past_key_values.stepping and past_key_values.fused
