"""What the steps of one batch size and capacity read and write: tensors that keep their addresses.

B batch, S capacity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..cache.preallocated import PreallocatedCache, preallocated_like
from ..sampling.sampling import StepState
from .cache_format import get_cache_format
from .constant_folding import StepConstants
from .eligibility import unmasked_window
from .fp8_cache import keep_in_8_bits
from .recurrent_state import carried_by


class UnknownCache(TypeError):
    """The model keeps something that no buffer can stand for, or its configuration does not say what."""

    def __init__(self, model: nn.Module):
        name = type(model).__name__
        super().__init__(f"the cache of {name} has layers that no preallocated buffer can stand for, or names none")


class StepBuffers:
    """Cache, states beside it, tokens, positions and mask.

    Args:
        model: a causal language model.
        batch_size: B.
        capacity: S.
        like: a growing cache with the layers that the model needs; by default that of its config.
        in_16_bits: why keys and values keep the model's dtype even where 8 bits are asked for.

    Raises:
        UnknownCache: if the model keeps something else than keys and values.
    """

    def __init__(self, model: Any, batch_size: int, capacity: int, like: DynamicCache | None, in_16_bits: str):
        self.device: torch.device = model.device
        self.in_16_bits = in_16_bits
        self.carried = carried_by(model)
        if self.carried.argument:  # which counts the tokens, and holds none
            self.cache = PreallocatedCache(0, batch_size, capacity, self.device)
        else:
            self.cache = _cache_of(model, like, batch_size, capacity)
        if get_cache_format() is not None:
            keep_in_8_bits(self.cache, model, in_16_bits)
        self.state = StepState(batch_size, capacity, self.cache.position, self.cache.starts)
        with torch.inference_mode(False):
            self.attention_mask = torch.ones(batch_size, capacity, dtype=torch.int64, device=self.device)
            self.slots = torch.arange(capacity, device=self.device)
        self._hides = False
        """Whether a call's mask is in the first columns of `attention_mask`, which are 1 otherwise."""
        self.constants = StepConstants()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, and of states beside it."""
        return self.cache.nbytes + sum(buffer.nbytes for buffer in self.carried.buffers)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Leave the states as they are, whatever steps are run inside."""
        with self.cache.states_held(), self.carried.held():
            yield

    def begin(self, position_ids: Tensor | int, attention_mask: Tensor | None) -> None:
        """Point the next step behind what the cache holds; arguments as of `DecodeGraph.begin`."""
        self.constants.refresh()
        self.state.position.fill_(self.cache.length)
        if isinstance(position_ids, int):
            self.state.position_ids.fill_(position_ids)
        else:
            self.state.position_ids.copy_(position_ids)
        self.state.flags.zero_()
        if self._hides:
            self.attention_mask.fill_(1)
        self._hides = attention_mask is not None
        if attention_mask is None:
            self.cache.pad(None)
        else:
            self.attention_mask[:, : attention_mask.shape[1]] = attention_mask
            self.cache.pad((attention_mask != 0).int().argmax(dim=1))

    def hide_before(self, starts: Tensor) -> None:
        """Let each row begin at the slot `starts` `[B]`, on the device; only after a `begin` with a mask."""
        self.cache.starts.copy_(starts)
        self.attention_mask.copy_(self.slots >= starts[:, None])

    def forget(self) -> None:
        """Forget every token; where the next step writes is left to `begin`."""
        self.cache.clear()
        self.carried.forget()

    def free(self) -> None:
        """Give the memory back."""
        self.constants.clear()
        self.cache.free()
        self.carried.free()

    def copy_cache(self, other: StepBuffers) -> None:
        """Take over what buffers with less capacity keep of the tokens so far."""
        self.cache.copy_from(other.cache)
        self.carried.copy_from(other.carried)
        self.cache.fused = other.cache.fused

    def copy_state(self, other: StepBuffers) -> None:
        """Take over tokens, positions and mask of buffers with less capacity."""
        self.attention_mask.fill_(1)
        self.attention_mask[:, : other.cache.capacity] = other.attention_mask
        self._hides = other._hides
        self.state.restore(other.state.copy())


def _cache_of(model: Any, like: DynamicCache | None, batch_size: int, capacity: int) -> PreallocatedCache:
    if like is None or not like.layers:
        like = _configured_cache(model)
        if capacity > unmasked_window(model, like):
            raise UnknownCache(model)
    cache = preallocated_like(like, batch_size, capacity, model.device)
    if cache is None:
        raise UnknownCache(model)
    return cache


def _configured_cache(model: Any) -> DynamicCache:
    """Return the growing cache that a model's configuration asks for."""
    try:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    except AttributeError as error:  # a model of several stacks has no single number of layers
        raise UnknownCache(model) from error
