"""Drafts of another, smaller model: a graph of its own step, replayed behind the text of the model that it drafts for.

B rows, K drafts. Both caches have a slot for every token of the text. A round of drafting begins where the model's
text ends and writes K + 1 slots of the assistant's cache, one more than it drafts tokens: however many of them are
right, the assistant has then seen everything before the next round. Where rows of the text move, those of the
assistant's cache do. Nothing of it asks the host.

A round takes K + 1 steps of the assistant and a step of several tokens, and gives one token more than drafts were
right. An assistant whose drafts are too rarely right for that is left alone for the rest of a call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..core import backend
from ..decode.eligibility import Unsupported
from ..decode.graph_cache import GraphStore
from ..decode.step_buffers import UnknownCache
from ..decode.step_graph import DecodeGraph, Program
from ..decode.validation import StepRefused
from ..device.graph_capture import CaptureFailed
from ..sampling.sampling import Sampling
from .left_pad_rows import Alignment, aligns

TRIED = 8
"""Rounds by which an assistant is judged, the last ones."""
LONGER = 0.5
"""By how much of a step a step of several tokens is longer: 5.99 ms of 11 tokens, 3.98 of one (Llama 8B, H200)."""


class Assistant:
    """A model that drafts for another one, with the prompt read.

    Args:
        model: the assistant.
        beside: the model that it drafts for.
        store: of its graphs, held by the caller.
        input_ids: `[B, n]` the prompt.
        mask: `[B, n]`, 0 for left padding; None for none.
        room: tokens beyond the prompt.
        tokens: K.
        captures: whether steps are captured.

    Raises:
        Unsupported: if the assistant's step runs in no graph.
    """

    def __init__(
        self, model: Any, beside: nn.Module, store: GraphStore, input_ids: Tensor, mask: Tensor | None, room: int, *,
        tokens: int, captures: bool,
    ):  # fmt: skip
        self.tokens, self._model = tokens, model
        # Steps are as long as their weights are large.
        self._least = (tokens + 1) * nbytes(model) / nbytes(beside) + LONGER
        self._right: deque[float] = deque(maxlen=TRIED)
        self._sampling = Sampling([], False, None, None)
        self._alignment: Program | None = None
        try:
            rows, length = input_ids.shape
            self._graph = store.find(model, rows, length + room, DynamicCache(), captures, "drafts")
            if self._graph.cache.stateful_layers:
                raise Unsupported("drafts_for_states")
            is_new = not self._graph.validator.has_proved
            self._graph.watch(None)
            if mask is None and rows > 1:
                mask = torch.ones_like(input_ids)  # of which columns may become padding
            with backend.Inside(model):
                self._graph.prefill(input_ids, mask)
                self._program = self._graph.program(self._sampling)
                if is_new:
                    store.settle(model, self._graph)
        except (UnknownCache, StepRefused, CaptureFailed) as error:
            raise Unsupported("drafted") from error

    def draft(self, graph: DecodeGraph) -> None:
        """Draft what follows the text of a model's graph, into its state."""
        text, own = graph.state, self._graph.state
        own.position.copy_(text.position)
        own.position_ids.copy_(text.position_ids)
        own.input_ids.copy_(text.input_ids)
        with backend.Inside(self._model):
            for number in range(self.tokens):
                self._program.replay()
                text.drafts[:, number].copy_(own.input_ids[:, 0])
            self._program.replay()

    def aligns(self) -> bool:
        """Return whether rows of its cache may move."""
        return aligns(self._graph, self._graph.state.input_ids)

    def align(self, graph: DecodeGraph) -> None:
        """Move rows as those of a model's graph are about to, or have just."""
        text, own = graph.state, self._graph.state
        own.position.copy_(text.position)
        own.shift.copy_(text.shift)
        own.finished.copy_(text.finished)
        if self._alignment is None:
            self._alignment = self._graph.program(self._sampling, Alignment)
        self._alignment.replay()

    def pays(self, right: float, besides: float = 0.0) -> bool:
        """Take note of a round, and return whether another one is worth its time.

        Args:
            right: drafts that were right, of a row on average.
            besides: what it costs beside both models' steps, in steps of one token.
        """
        self._right.append(right)
        return len(self._right) < TRIED or sum(self._right) >= (self._least + besides) * TRIED


def nbytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())
