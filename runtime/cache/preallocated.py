"""Keys, values and states in buffers that are allocated once, for prefill and for a decode step that a graph can hold.

B batch, S capacity. Slot s of a layer's keys and values, and of an indexer's keys, holds position s of the sequence,
and row b starts at slot `starts[b]`, those before are left padding. States (`states`) have no slots: each step
overwrites them.

Between steps the cache behaves like transformers' `DynamicCache`: lengths are Python ints and an update returns what
is valid, as views. Inside `step()` nothing on the host knows the length: it is `position`, a tensor on the device, an
update writes one token there, or a few from there on, and returns the whole buffers.

Reading on: `runtime/generate/decode_loop.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..core import prefill_context
from ..guards.overwriting import overwriting
from ..guards.tensor_version import version_of
from . import states
from .layer_factory import is_like, layer_like
from .layers import OtherContents, PreallocatedLayer


class PreallocatedCache(Cache):
    """A cache of fixed capacity and fixed addresses.

    Args:
        layer_count: number of layers, of keys and values unless `like` says otherwise.
        batch_size: number of rows.
        capacity: number of slots a row has.
        device: where the step's position lives.
        like: layers of transformers' growing cache, each of which gets its like here (`layer_like`).
    """

    def __init__(
        self,
        layer_count: int,
        batch_size: int,
        capacity: int,
        device: torch.device | str,
        like: Sequence[Any] | None = None,
    ):
        self.batch_size_ = batch_size
        self.capacity = capacity
        self.stepping = False
        """Whether a decode step is running or being captured."""
        self.width = 1
        """Tokens of a row that the running step reads."""
        self.fused = True
        """Whether the operators of layers may be those of a step, and layers take their `decode` methods."""
        self.causal = False
        """Whether a prompt is being read whose attention is causal by itself: `skips_mask`."""
        self.tables: dict[object, tuple[Tensor, Tensor] | None] = {}
        """Cosines and sines `[S, R]` of every position, by who computes them, None for no table: `rotary_rows`."""
        self._sources: dict[nn.Module, Hashable] = {}
        """What the tables were computed of, by the module that computed them."""
        self.refusal: str | None = None
        """Why a step cannot be captured, if the eager step before found a reason."""
        with torch.inference_mode(False):
            self.position = torch.zeros(1, dtype=torch.int64, device=device)
            """The slot that the running step writes, which is the number of tokens before it."""
            self.starts = torch.zeros(batch_size, dtype=torch.int64, device=device)
            """The first slot of each row that is no left padding."""
        self._is_padded = False
        """Whether `starts` are others than the first slots, as far as `pad` knows."""
        self.slots = self.position
        """`[n]` the slots that the running step writes."""
        self._arrived: list[Tensor] = []
        self._tokens = 0
        kinds = [DynamicLayer()] * layer_count if like is None else like
        Cache.__init__(self, layers=[layer_like(kind, self) for kind in kinds])  # `own` has another class in between

    @property
    def attention_layers(self) -> list[PreallocatedLayer]:
        """The layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]

    @property
    def stateful_layers(self) -> list[Any]:
        """The layers that hold states, alone or beside keys and values."""
        return [layer for layer in self.layers if states.is_stateful(layer)]

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.batch_size_

    @property
    def length(self) -> int:
        """Number of tokens before the next one, as far as the host knows."""
        layers = self.attention_layers
        return layers[0].length if layers else self._tokens

    @property
    def is_full(self) -> bool:
        """Whether there is no slot left, as far as the host knows."""
        return self.length == self.capacity

    @property
    def is_written(self) -> bool:
        """Whether every layer of states has one."""
        return all(states.tensors([layer]) for layer in self.stateful_layers)

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written since it was cleared; models ask so whether a prompt is the first."""
        if any(any(layer.has_previous_state.values()) for layer in self.stateful_layers):
            return True
        return self.stepping or self.length > 0

    def has_part(self, part: object) -> bool:
        """Return whether something is this cache, or one of its layers."""
        return any(part is one for one in (self, *self.layers))

    def states_held(self) -> contextlib.AbstractContextManager[None]:
        """Leave the states as they are, whatever is run inside."""
        return states.held(self.layers)

    def arrived(self, count: int) -> Tensor:
        """Return `count` int32 zeros in which the programs of an attention kernel count themselves, one by one."""
        if not self._arrived or self._arrived[-1].numel() < count:  # graphs keep the addresses of the smaller ones
            if self.position.is_cuda and torch.cuda.is_current_stream_capturing():
                return self.position.new_zeros(count, dtype=torch.int32)  # of that graph, which may be thrown away
            with torch.inference_mode(False):
                self._arrived.append(torch.zeros(max(count, 4096), dtype=torch.int32, device=self.position.device))
        return self._arrived[-1]

    @contextlib.contextmanager
    def step(self, width: int = 1) -> Iterator[None]:
        """Make updates write `width` tokens a row from `position` on, without the host."""
        if width > 1:
            self.width, self.slots = width, self.position + torch.arange(width, device=self.position.device)
        overwritten: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        overwritten = overwriting(states.tensors(self.layers))
        self.stepping = True
        try:
            with overwritten:
                yield
        finally:
            self.stepping, self.width, self.slots = False, 1, self.position

    def grow(self, tokens: int) -> None:
        """Tell the host that steps have written `tokens` more slots."""
        self.rewind(self.length + tokens)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, as far as the host knows; states stay as they are."""
        self._tokens = length
        for layer in self.attention_layers:
            layer.rewind(length)

    def reset(self) -> None:
        """Forget every token; the buffers, their addresses and their contents stay, states too."""
        self.rewind(0)
        self.position.zero_()
        self.pad(None)

    def pad(self, starts: Tensor | None) -> None:
        """Say in which slot each row begins, `[B]`; None for the first one of each.

        Where it was the first before, nothing is launched: a prompt waits for that.
        """
        if starts is not None:
            self.starts.copy_(starts)
        elif self._is_padded:
            self.starts.zero_()
        self._is_padded = starts is not None

    def clear(self) -> None:
        """Forget every token and zero the buffers: ordinary attention multiplies what it masks by zero, and a NaN of
        an earlier sequence would come through. The position of the next step is left to who begins one.
        """
        self.rewind(0)
        self.pad(None)
        for layer in self.stateful_layers:
            states.forget(layer)
        if self.buffers:
            torch._foreach_zero_(self.buffers)

    def made_from(self, module: nn.Module) -> None:
        """Remember what a module's tables were computed of."""
        self._sources[module] = _numbers_of(module)

    @property
    def has_old_tables(self) -> bool:
        """Whether a module would compute other tables now: someone wrote to its frequencies, or set a number."""
        return any(_numbers_of(module) != numbers for module, numbers in self._sources.items())

    def free(self) -> None:
        """Give the memory back."""
        for layer in self.attention_layers:
            layer.free()
        for layer in self.stateful_layers:
            states.free(layer)

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values, and those of indexers, of every layer that has been written."""
        return [buffer for layer in self.attention_layers for buffer in layer.buffers]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and states."""
        held = self.buffers
        held = [*held, *states.tensors(self.layers)]
        return sum(buffer.nbytes for buffer in held)

    def copy_from(self, other: PreallocatedCache) -> None:
        """Take over what a smaller cache of the same model holds."""
        for mine, theirs in zip(self.attention_layers, other.attention_layers, strict=True):
            mine.take(theirs, other.length)
        for mine, theirs in zip(self.stateful_layers, other.stateful_layers, strict=True):
            states.copy(theirs, mine)
        self.rewind(other.length)
        self.position.copy_(other.position)
        self.pad(other.starts if other._is_padded else None)

    def load(self, dynamic: DynamicCache) -> None:
        """Take over what transformers' growing cache holds; a sliding layer's keys go where their positions are.

        Raises:
            OtherContents: if that is none of the model's.
        """
        length = max(map(_length_of, dynamic.layers), default=0)
        for mine, theirs in zip_longest(self.layers, dynamic.layers[: len(self.layers)]):
            held = _length_of(theirs)
            if not is_like(mine, theirs):
                raise OtherContents(length)
            if isinstance(mine, PreallocatedLayer):
                mine.lacks = held < length
                if mine.lacks and mine.is_initialized:
                    raise OtherContents(length)
                mine.take(theirs, length)
            elif held:
                raise OtherContents(length)
            if states.is_stateful(mine):
                states.copy(theirs, mine)

    def store(self, dynamic: DynamicCache, length: int, drafted: bool = False) -> None:
        """Make transformers' growing cache hold copies of the first `length` tokens; states as they are.

        `drafted` says that some were, in vain too: transformers' loop leaves a cache that records what it forgets.
        """
        kept = [isinstance(layer, PreallocatedLayer) and bool(layer.buffers) for layer in self.layers]
        last = max((number for number, written in enumerate(kept) if written), default=-1)
        while len(dynamic.layers) <= last:
            dynamic.layers.append(DynamicLayer())
        for mine, theirs in zip(self.layers, dynamic.layers, strict=False):
            if isinstance(mine, PreallocatedLayer):
                start = 0
                if isinstance(theirs, DynamicSlidingWindowLayer) and mine.buffers:
                    start = _first_kept(theirs, length, drafted)
                    theirs.cumulative_length = length
                mine.give(theirs, start, length)
            if states.is_stateful(mine) and states.is_stateful(theirs):
                states.copy(mine, theirs)
        if drafted and hasattr(dynamic, "activate_past_recording"):  # since 5.14
            dynamic.activate_past_recording()


def _first_kept(layer: DynamicSlidingWindowLayer, length: int, drafted: bool) -> int:
    """Return the first token that a layer holds once its text has grown to `length`."""
    if not drafted and getattr(layer, "record_past", False):
        return layer.get_seq_length() - (layer.keys.shape[2] if layer.keys is not None and layer.keys.numel() else 0)
    return max(length - layer.sliding_window + 1, 0)


def preallocated_like(
    dynamic: DynamicCache, batch_size: int, capacity: int, device: torch.device | str
) -> PreallocatedCache | None:
    """Return a cache with the layers of transformers' growing one; None if it has layers of another kind, or none."""
    cache = PreallocatedCache(len(dynamic.layers), batch_size, capacity, device, dynamic.layers)
    holds = cache.attention_layers or cache.stateful_layers
    return cache if holds and all(layer is not None for layer in cache.layers) else None


def _numbers_of(module: nn.Module) -> Hashable:
    """Return where the tensors of a module lie, how often they were written in place, and its plain numbers."""
    parts = (part for one in module.modules() for part in (one._parameters, one._buffers))
    tensors = (tensor for part in parts for tensor in part.values() if tensor is not None)
    written = tuple((tensor.data_ptr(), version_of(tensor)) for tensor in tensors)
    return written, tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float)))


def _length_of(layer: Any) -> int:
    """Return how many tokens a layer has keys and values of."""
    return layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0


def is_decode_step(past_key_values: object) -> bool:
    """Return whether operators are those of a step: one token a row into a `PreallocatedCache`, or a prompt that is
    read by them.
    """
    if not isinstance(past_key_values, PreallocatedCache) or past_key_values.width > 1:
        return False
    if (prompt := prefill_context.of(past_key_values)) is not None:
        return past_key_values.fused and not prompt.needs_mask
    return past_key_values.stepping and past_key_values.fused


def skips_mask(past_key_values: object) -> bool:
    """Return whether the layers read no mask: in a fused decode step, and in a captured prompt that is `causal`."""
    if not isinstance(past_key_values, PreallocatedCache):
        return False
    if past_key_values.causal and (prompt := prefill_context.of(past_key_values)) is not None:
        prompt.needs_mask = False
    return past_key_values.causal or is_decode_step(past_key_values)
