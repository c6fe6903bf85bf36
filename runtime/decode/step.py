"""One decode step of a model: what its forward is called with, against fixed buffers and as the model has it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.eager_step import HANDLERS
from ..attention.padded_heads import HANDLERS as PADDED
from ..attention.step_attention import StepAttention
from ..cache.custom_cache import own_cache_of
from ..cache.preallocated import PreallocatedCache
from ..device.graph_capture import NOT_FOR_A_STEP
from ..launching.launch import rehearses
from ..lazy.lazy_mode import Handlers
from ..lazy.pointwise_fusion import FUNCTIONS
from ..lazy.step_products import StepProducts
from ..sampling.sampling import StepState
from .device_length import StepLength
from .recurrent_state import NoStates
from .validation import StepFails


class Step:
    """The step; who derives from it makes the buffers."""

    device: torch.device
    cache: PreallocatedCache
    state: StepState
    carried: NoStates
    watched: Any
    """A `StepInputs`: what the model's own loop gives the steps of a call, where that is more than `_inputs`."""
    _model: weakref.ref[Any]
    _attention_mask: Tensor
    _slots: Tensor
    _hiding: set[Hashable]
    """Kinds of steps that need a 2D mask over the slots that are written: the model's own masks hide no others."""
    _residuals: set[int]
    """Norms of a step that are read by more than products: `StepProducts`."""
    _constants: Any
    """`StepConstants`, where steps may have some."""
    _accepted: set[str]
    """Arguments of the model's forward."""
    _cached: dict[str, Any]
    _inputs: dict[str, Any]

    @property
    def model(self) -> Any:
        """The model, which has to be alive."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this graph is gone")
        return model

    @property
    def _kind(self) -> Hashable:
        return None if self.watched is None else self.watched.key

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Leave states and positions as they are, whatever steps are run inside."""
        watched = contextlib.nullcontext() if self.watched is None else self.watched.held()
        with self.cache.states_held(), self.carried.held(), watched:
            yield

    def forward(self) -> Tensor:
        """Return the logits `[B, V]` of one step at the cache's position."""
        with self._stepping():
            outputs = self.model(**self._step_arguments(), return_dict=True)
            self.carried.advance(outputs)
        if self.watched is not None:
            self.watched.advance()
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def forward_several(self, tokens: Tensor) -> Tensor:
        """Return the logits `[B, n, V]` of tokens `[B, n]` from the cache's position on.

        It stays where it is: who looks at the logits knows how many of the tokens are to be kept. The layers run as
        they do for a prompt, with a mask, and not their methods for one token.
        """
        with self._stepping(tokens.shape[1]):
            logits: Tensor = self.model(**self._several(tokens, self._attention_mask), return_dict=True).logits
        return logits

    @contextlib.contextmanager
    def _stepping(self, width: int = 1) -> Iterator[None]:
        """Let a forward write `width` tokens a row at the cache's position."""
        cache = self.cache
        with cache.step(width):
            attention = StepAttention(cache, [] if self.watched is None else self.watched.heard)
            instead = {functional.scaled_dot_product_attention: attention.plain}
            handlers: Handlers = {functional.scaled_dot_product_attention: attention}
            handlers = {**HANDLERS, **handlers}
            products = StepProducts(instead, handlers, poisons=rehearses(), residuals=self._residuals)
            products.chains = {**FUNCTIONS, **PADDED}
            with products, self._constants, StepLength(cache.position, cache.capacity, cache.slots):
                yield

    def _as_for_decoding(self) -> AbstractContextManager[object]:
        """Choose the implementation of the experts as transformers' loop does for single tokens."""
        manager: AbstractContextManager[object] = self.model._optimize_model_for_decode()
        return manager

    def _ordinary_step(self, length: int, several: Tensor | None = None) -> Tensor:
        """Return the logits `[B, V]`, or `[B, n, V]`, of the step as the model computes it with a growing cache."""
        if several is not None:
            arguments = self._several(several, self._attention_mask[:, : length + several.shape[1]])
            every: Tensor = self.model(**arguments, return_dict=True).logits.float()
            return every
        arguments = self._arguments(self._attention_mask[:, : length + 1])
        outputs = self.model(**arguments, return_dict=True)
        self.carried.advance(outputs)
        logits: Tensor = outputs.logits[:, -1].float()
        return logits

    def _first_ordinary_step(self, length: int, several: Tensor | None = None) -> Tensor:
        """Return what `_ordinary_step` does, of a model of which it is not known yet whether it takes one.

        Raises:
            StepFails: it does not: it counts other tokens than its cache, say, or takes no cache.
        """
        try:
            return self._ordinary_step(length, several)
        except torch.OutOfMemoryError:
            raise
        except NOT_FOR_A_STEP as error:
            raise StepFails(error) from error

    def _arguments(self, mask: Tensor) -> dict[str, Any]:
        """Return what a step's forward is called with, the mask `[B, n]` as given."""
        states = self.carried.arguments
        if self.watched is not None:
            return self.watched.arguments(self.state.input_ids, mask, self.cache) | states
        masked = {"attention_mask": mask} if "attention_mask" in self._inputs else {}
        return {**self._inputs, **masked, **states}

    def _step_arguments(self) -> dict[str, Any]:
        """Return what a step's forward is called with, and a mask that hides what nothing has written if it has to.

        Where the model is given none, it sees every column, of padding too.
        """
        if self._kind not in self._hiding:
            return self._arguments(self._attention_mask)
        written = (self._slots <= self.cache.position).to(torch.int64)
        text = not self.model.config.is_encoder_decoder  # whose `attention_mask` is of what it encodes
        given = {"attention_mask": written.expand_as(self._attention_mask)} if text else {}
        return given | self._arguments(self._attention_mask * written)

    def _several(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        """Return what the forward of tokens `[B, n]` is called with, the mask `[B, S]` as given."""
        ahead = torch.arange(tokens.shape[1], device=self.device)
        given = {
            "attention_mask": mask,
            "position_ids": self.state.position_ids + ahead,
            "cache_position": self.cache.position + ahead,
            "logits_to_keep": tokens.shape[1],
        }
        return {**self._inputs, **{name: given[name] for name in given if name in self._inputs}, "input_ids": tokens}

    def _static_inputs(self) -> dict[str, Any]:
        """Return what every step calls the model with, as far as its forward takes it."""
        inputs: dict[str, Any] = {
            "attention_mask": self._attention_mask,
            "position_ids": self.state.position_ids,
            "cache_position": self.cache.position,
            "logits_to_keep": 1,
        }
        if not (self.cache.attention_layers or own_cache_of(self.model)):  # states saw the padding with the prompt
            del inputs["attention_mask"]
        given = {name: value for name, value in inputs.items() if name in self._accepted}
        return {"input_ids": self.state.input_ids, **self._cached, **given}

    def plain_step(self) -> Tensor:
        """Return the logits `[B, V]` of the step as the model computes it with a growing cache.

        The cache is not told: `grow` does that, as after a replay.
        """
        length = self.cache.length
        with self._as_for_decoding():
            logits = self._ordinary_step(length)
        self.cache.rewind(length)
        return logits
