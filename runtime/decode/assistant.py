"""Drafts of another, smaller model: a graph of its own step, replayed behind the text of the model that it drafts for.

K drafts. One row. Both caches have a slot for every token of the text. A round of drafting begins where the model's
text ends and writes K + 1 slots of the assistant's cache, one more than it drafts tokens: however many of them are
right, the assistant has then seen everything before the next round. Nothing of it asks the host.

A round takes K + 1 steps of the assistant and a step of several tokens, and gives one token more than drafts were
right. An assistant whose drafts are too rarely right for that is left alone for the rest of a call.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..core.capture import CaptureFailed
from .fitness import Unfit
from .graph import DecodeGraph, UnknownCache
from .graph_store import GraphStore
from .proof import StepChanges, StepDiffers, StepFails, StepReads
from .sampling import Sampling

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
        input_ids: `[1, n]` the prompt.
        mask: `[1, n]`, 0 for left padding; None for none.
        room: tokens beyond the prompt.
        tokens: K.
        captures: whether steps are captured.

    Raises:
        Unfit: if the assistant's step runs in no graph.
    """

    def __init__(
        self, model: Any, beside: nn.Module, store: GraphStore, input_ids: Tensor, mask: Tensor | None, room: int, *,
        tokens: int, captures: bool,
    ):  # fmt: skip
        self.tokens = tokens
        # Steps are as long as their weights are large.
        self._least = (tokens + 1) * _nbytes(model) / _nbytes(beside) + LONGER
        self._right: deque[int] = deque(maxlen=TRIED)
        self._sampling = Sampling([], False, None, None)
        try:
            self._graph = store.find(model, 1, input_ids.shape[1] + room, DynamicCache(), captures)
            if self._graph.cache.stateful_layers:
                raise Unfit("drafts_for_states")
            is_new = not self._graph.is_proved
            self._graph.watch(None)
            self._graph.prefill(input_ids, mask)
            self._program = self._graph.program(self._sampling)
            if is_new:
                store.settle(model, self._graph)
        except (UnknownCache, StepChanges, StepDiffers, StepFails, StepReads, CaptureFailed) as error:
            raise Unfit("drafted") from error

    def draft(self, graph: DecodeGraph) -> None:
        """Draft what follows the text of a model's graph, into its state."""
        text, own = graph.state, self._graph.state
        own.position.copy_(text.position)
        own.position_ids.copy_(text.position_ids)
        own.input_ids.copy_(text.input_ids)
        for number in range(self.tokens):
            self._program.replay()
            text.drafts[:, number].copy_(own.input_ids[:, 0])
        self._program.replay()

    def pays(self, right: int) -> bool:
        """Take note that `right` drafts of a round were right, and return whether another round is worth its time."""
        self._right.append(right)
        return len(self._right) < TRIED or sum(self._right) >= self._least * TRIED


def _nbytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
