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
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

OFFERS: dict[str, dict[str, str]] = {
    "PreallocatedCache": {},
    "decodes": {},
    "needs_no_mask": {},
}


class CacheFull(RuntimeError):
    """More tokens were written than the cache has slots."""

    def __init__(self, length: int, capacity: int):
        super().__init__(f"the cache holds {capacity} tokens and was asked for {length}: make one with more capacity")


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

    def free(self) -> None:
        """Give the buffers back."""
        self.keys = self.values = None
        self.is_initialized = False
        self.length = 0

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
        empty_layers: layers that hold nothing, because they have no attention or share another layer's keys, by index.
    """

    def __init__(
        self,
        layer_count: int,
        batch_size: int,
        capacity: int,
        device: torch.device | str,
        empty_layers: dict[int, Any] | None = None,
    ):
        self.batch_size_ = batch_size
        self.capacity = capacity
        self.stepping = False
        """Whether a decode step is running or being captured."""
        self.fused = True
        """Whether the layers may take their `decode` methods in a step."""
        self.causal = False
        """Whether a prompt is being read whose attention is causal by itself: `needs_no_mask`."""
        self.tables: dict[object, tuple[Tensor, Tensor] | None] = {}
        """Cosines and sines `[S, R]` of every position, by who computes them, None for no table: `rotary_rows`."""
        self.refusal: str | None = None
        """Why a step cannot be captured, if the eager step before found a reason."""
        with torch.inference_mode(False):
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            """The slot that the running step writes, which is the number of tokens before it."""
            self.starts = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """The first slot of each row that is no left padding."""
        self._arrived: list[Tensor] = []
        empty = empty_layers or {}
        super().__init__(layers=[empty.get(index) or PreallocatedLayer(self) for index in range(layer_count)])

    @property
    def attention_layers(self) -> list[PreallocatedLayer]:
        """The layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.batch_size_

    @property
    def length(self) -> int:
        """Number of valid slots, as far as the host knows."""
        return self.attention_layers[0].length

    def arrived(self, count: int) -> Tensor:
        """Return `count` int32 zeros in which the programs of an attention kernel count themselves, one by one."""
        if not self._arrived or self._arrived[-1].numel() < count:  # graphs keep the addresses of the smaller ones
            if self.position.is_cuda and torch.cuda.is_current_stream_capturing():
                return self.position.new_zeros(count, dtype=torch.int32)  # of that graph, which may be thrown away
            with torch.inference_mode(False):
                self._arrived.append(torch.zeros(max(count, 4096), dtype=torch.int32, device=self.position.device))
        return self._arrived[-1]

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
        for layer in self.attention_layers:
            layer.length += tokens

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, as far as the host knows."""
        for layer in self.attention_layers:
            layer.length = length

    def reset(self) -> None:
        """Forget every token; the buffers, their addresses and their contents stay."""
        self.rewind(0)
        self.position.zero_()
        self.starts.zero_()

    def clear(self) -> None:
        """Forget every token and zero the buffers: ordinary attention multiplies what it masks by zero, and a NaN of
        an earlier sequence would come through.
        """
        self.reset()
        if self.buffers:
            torch._foreach_zero_(self.buffers)

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values of every layer that has been written."""
        return [b for layer in self.attention_layers for b in (layer.keys, layer.values) if b is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def copy_from(self, other: PreallocatedCache) -> None:
        """Take over what a smaller cache of the same model holds."""
        for mine, theirs in zip(self.attention_layers, other.attention_layers, strict=True):
            if theirs.keys is not None and theirs.values is not None:
                _write(mine, theirs.keys[:, :, : theirs.length], theirs.values[:, :, : theirs.length], 0)
            mine.length = theirs.length
        self.position.copy_(other.position)
        self.starts.copy_(other.starts)

    def load(self, dynamic: DynamicCache) -> None:
        """Take over what transformers' growing cache holds; a sliding layer's keys go where their positions are."""
        for mine, theirs in zip(self.attention_layers, _kept(dynamic.layers), strict=False):
            length = theirs.get_seq_length()
            if length:
                _write(mine, theirs.keys, theirs.values, length - theirs.keys.shape[2])
            mine.length = length

    def store(self, dynamic: DynamicCache, length: int) -> None:
        """Make transformers' growing cache hold copies of the first `length` tokens."""
        while len(dynamic.layers) < len(self.layers):
            dynamic.layers.append(DynamicLayer())
        for mine, theirs in zip(self.attention_layers, _kept(dynamic.layers), strict=True):
            assert mine.keys is not None
            assert mine.values is not None
            start = 0
            if isinstance(theirs, DynamicSlidingWindowLayer):
                start = max(length - theirs.sliding_window + 1, 0)
                theirs.cumulative_length = length
            if not theirs.is_initialized:
                theirs.lazy_initialization(mine.keys, mine.values)
            theirs.keys = mine.keys[:, :, start:length].clone()
            theirs.values = mine.values[:, :, start:length].clone()


def preallocated_like(
    dynamic: DynamicCache, batch_size: int, capacity: int, device: torch.device | str
) -> PreallocatedCache | None:
    """Return a cache with the layers of transformers' growing one; None if it has layers of another kind, or none."""
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    empty = {index: layer for index, layer in enumerate(dynamic.layers) if not isinstance(layer, CacheLayerMixin)}
    if any(type(layer).__name__ != "DummyLayer" for layer in empty.values()):
        return None
    kept = _kept(dynamic.layers)
    if not kept or any(type(layer) not in known for layer in kept):
        return None
    return PreallocatedCache(len(dynamic.layers), batch_size, capacity, device, empty)


def _kept(layers: Sequence[Any]) -> list[Any]:
    return [layer for layer in layers if isinstance(layer, CacheLayerMixin)]


def _write(layer: PreallocatedLayer, keys: Tensor, values: Tensor, start: int) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    assert layer.keys is not None
    assert layer.values is not None
    layer.keys[:, :, start : start + keys.shape[2]] = keys
    layer.values[:, :, start : start + keys.shape[2]] = values


def decodes(past_key_values: object) -> bool:
    """Return whether a fused decode step is running: one token a row, into a `PreallocatedCache`."""
    return isinstance(past_key_values, PreallocatedCache) and past_key_values.stepping and past_key_values.fused


def needs_no_mask(past_key_values: object) -> bool:
    """Return whether the layers read no mask: in a fused decode step, and in a captured prompt that is `causal`."""
    return isinstance(past_key_values, PreallocatedCache) and (past_key_values.causal or decodes(past_key_values))
