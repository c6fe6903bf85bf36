"""What a model's forward is called with for one more token: in a step against fixed buffers, and ordinarily.

B batch, S capacity, V vocabulary, n tokens of a step of several.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.eager_step import HANDLERS
from ..attention.padded_heads import HANDLERS as PADDED
from ..attention.step_attention import StepAttention
from ..cache.cache_argument import argument_of
from ..device.graph_capture import NOT_FOR_A_STEP
from ..launching.launch import rehearses
from ..lazy.lazy_mode import Handlers
from ..lazy.pointwise_fusion import FUNCTIONS
from ..lazy.step_products import StepProducts
from .device_length import StepLength
from .step_buffers import StepBuffers
from .validation import StepFails

INPUTS_KEPT = 8
"""Kinds of inputs, as a model's own loop gives them, that are kept in buffers."""


class StepCall:
    """A model's forward, called for a step against buffers. It holds the model weakly.

    Args:
        model: a causal language model in eval mode.
        buffers: what its steps read and write.
    """

    def __init__(self, model: Any, buffers: StepBuffers):
        self._model = weakref.ref(model)
        self.buffers = buffers
        self.accepted = set(inspect.signature(model.forward).parameters)
        """Arguments of the model's forward."""
        self.cached: dict[str, Any] = {"use_cache": True}
        """What gives it the cache."""
        if not buffers.carried.argument:
            self.cached[argument_of(model)] = buffers.cache
        self.watched: Any = None
        """A `StepInputs`: what the model's own loop gives the steps of a call, where that is more than `_inputs`."""
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        """Those of the calls before, by kind."""
        self.hiding: set[Hashable] = set()
        """Kinds of steps that need a 2D mask over the slots that are written: the model's own masks hide no others."""
        self.residuals: set[int] = set()
        """Norms of a step that are read by more than products: `StepProducts`."""
        self._inputs = _static_inputs(model, buffers, self.cached, self.accepted)

    @property
    def model(self) -> Any:
        """The model, which has to be alive."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this graph is gone")
        return model

    @property
    def kind(self) -> Hashable:
        """What steps have in common that can share a graph."""
        return None if self.watched is None else self.watched.key

    def watch(self, inputs: Any) -> list[Hashable]:
        """Take over the `StepInputs` of a call, beside tokens and mask; None for nothing but positions.

        Returns:
            The kinds of steps whose inputs are not kept any more.
        """
        gone: list[Hashable] = []
        if inputs is not None:
            known = self._known.setdefault(inputs.key, inputs)
            if known is not inputs:
                known.load(inputs)
            self._known.move_to_end(inputs.key)
            while len(self._known) > INPUTS_KEPT:
                gone.append(self._known.popitem(last=False)[0])
            inputs = known
        self.watched = inputs
        return gone

    def forget_inputs(self) -> None:
        """Give back what calls before were given."""
        self._known.clear()
        self.watched = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Leave states and positions as they are, whatever steps are run inside."""
        watched = contextlib.nullcontext() if self.watched is None else self.watched.held()
        with self.buffers.held(), watched:
            yield

    def as_for_decoding(self) -> AbstractContextManager[object]:
        """Choose the implementation of the experts as transformers' loop does for single tokens."""
        manager: AbstractContextManager[object] = self.model._optimize_model_for_decode()
        return manager

    def forward(self) -> Tensor:
        """Return the logits `[B, V]` of one step at the cache's position."""
        with self._stepping():
            outputs = self.model(**self._step_arguments(), return_dict=True)
            self.buffers.carried.advance(outputs)
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
            arguments = self._several(tokens, self.buffers.attention_mask)
            logits: Tensor = self.model(**arguments, return_dict=True).logits
        return logits

    @contextlib.contextmanager
    def _stepping(self, width: int = 1) -> Iterator[None]:
        """Let a forward write `width` tokens a row at the cache's position."""
        cache = self.buffers.cache
        with cache.step(width):
            attention = StepAttention(cache, [] if self.watched is None else self.watched.heard)
            instead = {functional.scaled_dot_product_attention: attention.plain}
            handlers: Handlers = {functional.scaled_dot_product_attention: attention}
            handlers = {**HANDLERS, **handlers}
            products = StepProducts(instead, handlers, poisons=rehearses(), residuals=self.residuals)
            products.chains = {**FUNCTIONS, **PADDED}
            with products, self.buffers.constants, StepLength(cache.position, cache.capacity, cache.slots):
                yield

    def plain_step(self) -> Tensor:
        """Return the logits `[B, V]` of the step as the model computes it with a growing cache.

        The cache is not told: `grow` does that, as after a replay.
        """
        length = self.buffers.cache.length
        with self.as_for_decoding():
            logits = self._ordinary_step(length)
        self.buffers.cache.rewind(length)
        return logits

    def first_ordinary_step(self, length: int, several: Tensor | None = None) -> Tensor:
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

    def _ordinary_step(self, length: int, several: Tensor | None = None) -> Tensor:
        """Return the logits `[B, V]`, or `[B, n, V]`, of the step as the model computes it with a growing cache."""
        mask = self.buffers.attention_mask
        if several is not None:
            arguments = self._several(several, mask[:, : length + several.shape[1]])
            every: Tensor = self.model(**arguments, return_dict=True).logits.float()
            return every
        arguments = self._arguments(mask[:, : length + 1])
        outputs = self.model(**arguments, return_dict=True)
        self.buffers.carried.advance(outputs)
        logits: Tensor = outputs.logits[:, -1].float()
        return logits

    def _arguments(self, mask: Tensor) -> dict[str, Any]:
        """Return what a step's forward is called with, the mask `[B, n]` as given."""
        states = self.buffers.carried.arguments
        if self.watched is not None:
            return self.watched.arguments(self.buffers.state.input_ids, mask, self.buffers.cache) | states
        masked = {"attention_mask": mask} if "attention_mask" in self._inputs else {}
        return {**self._inputs, **masked, **states}

    def _step_arguments(self) -> dict[str, Any]:
        """Return what a step's forward is called with, and a mask that hides what nothing has written if it has to.

        Where the model is given none, it sees every column, of padding too.
        """
        mask = self.buffers.attention_mask
        if self.kind not in self.hiding:
            return self._arguments(mask)
        written = (self.buffers.slots <= self.buffers.cache.position).to(torch.int64)
        text = not self.model.config.is_encoder_decoder  # whose `attention_mask` is of what it encodes
        given = {"attention_mask": written.expand_as(mask)} if text else {}
        return given | self._arguments(mask * written)

    def _several(self, tokens: Tensor, mask: Tensor) -> dict[str, Any]:
        """Return what the forward of tokens `[B, n]` is called with, the mask `[B, S]` as given."""
        ahead = torch.arange(tokens.shape[1], device=self.buffers.device)
        given = {
            "attention_mask": mask,
            "position_ids": self.buffers.state.position_ids + ahead,
            "cache_position": self.buffers.cache.position + ahead,
            "logits_to_keep": tokens.shape[1],
        }
        return {**self._inputs, **{name: given[name] for name in given if name in self._inputs}, "input_ids": tokens}


def _static_inputs(model: Any, buffers: StepBuffers, cached: dict[str, Any], accepted: set[str]) -> dict[str, Any]:
    """Return what every step calls the model with, as far as its forward takes it."""
    inputs: dict[str, Any] = {
        "attention_mask": buffers.attention_mask,
        "position_ids": buffers.state.position_ids,
        "cache_position": buffers.cache.position,
        "logits_to_keep": 1,
    }
    if not buffers.cache.attention_layers:  # states saw the padding with the prompt
        del inputs["attention_mask"]
    given = {name: value for name, value in inputs.items() if name in accepted}
    return {"input_ids": buffers.state.input_ids, **cached, **given}
