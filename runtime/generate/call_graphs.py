"""The graphs that one call of `generate()` takes, and what it finds out of a model whose step runs in none."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..cache.layers import OtherContents
from ..decode.eligibility import Call, Unsupported, length_of
from ..decode.graph_cache import GraphStore, Refusal
from ..decode.rank_agreement import Plan
from ..decode.side_effects import Before
from ..decode.step_buffers import UnknownCache
from ..decode.step_graph import DecodeGraph, Program
from ..decode.validation import StepReads, StepRefused
from ..device.graph_capture import CaptureFailed
from ..sampling.sampling import Sampling
from ..speculative.verify_step import width_of

FIRST_ROOM = 4096
"""Tokens beyond the prompt that the first cache has room for; a longer text moves to one of up to twice the size."""


class CallGraphs:
    """The graphs of one call.

    Args:
        model: that generates.
        call: its arguments.
        store: of its graphs.
        plan: of the call.
        sampling: what follows the logits; None for nothing.
        dynamic: a growing cache with what the call continues.
    """

    def __init__(
        self, model: Any, call: Call, store: GraphStore, plan: Plan, sampling: Sampling | None, dynamic: DynamicCache
    ):
        self.captures = model.device.type == "cuda" and not model._step_without_graph
        self._model, self._call, self._store, self._plan = model, call, store, plan
        self._sampling, self._dynamic = sampling, dynamic
        self._drafts = sampling is not None and sampling.lookup is not None
        self.held: DecodeGraph | None = None
        """The graph that holds the text."""
        self._in_16_bits = "drafts" if self._drafts else "ranks" if plan.ranks is not None else ""

    def first(self) -> DecodeGraph:
        """Return a graph with a cache that holds what the call continues.

        Raises:
            Unsupported: if there is none for it.
        """
        for key in (None, None if self._sampling is None else self._sampling.key):
            if key in self._store.refused:
                raise Unsupported(self._store.refused[key].reason)
        ahead = self._call.ahead
        if ahead and self._call.steps - 1 + ahead > FIRST_ROOM:  # a step has rotary tables for its cache's slots alone
            raise Unsupported("position_ids")
        room = min(self._call.steps - 1, FIRST_ROOM) + ahead
        if self._sampling is not None and self._drafts:
            room += width_of(self._sampling)
        needed = length_of(self._dynamic) + self._call.input_ids.shape[1] + room
        try:
            graph = self._find(needed)
            graph.cache.clear()
        except UnknownCache as error:
            raise Unsupported("cache_kind") from error
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        try:
            graph.cache.load(self._dynamic)
        except OtherContents as error:
            if not graph.validator.has_proved:
                self._store.drop(graph)
            raise Unsupported("cache_contents") from error
        self.held = graph
        return graph

    def larger(self, graph: DecodeGraph, room: int) -> DecodeGraph:
        """Move to a graph with a larger cache, if possible one for `room` more tokens."""
        capacity = graph.cache.capacity
        larger = self._find(capacity + min(room, capacity))
        larger.cache.clear()
        larger.take_over(graph)
        self.held = larger
        self._store.drop(graph)
        return larger

    def _find(self, needed: int) -> DecodeGraph:
        """Return a graph whose rows have room for so many tokens."""
        rows = self._call.input_ids.shape[0]
        return self._store.find(self._model, rows, needed, self._dynamic, self.captures, self._in_16_bits)

    def program(self, graph: DecodeGraph) -> Program:
        """Return the graph of a step with the call's sampling.

        Raises:
            Unsupported: if it cannot be captured.
        """
        try:
            return graph.program(self._sampling)
        except CaptureFailed as error:
            # Was it the model, or what follows it? Without processors it may yet be captured.
            key = self._sampling.key if self._sampling is not None and self._sampling.forms else None
            raise self.refuse(graph, "step_not_capturable", key, error) from error

    @contextlib.contextmanager
    def refusing(self, graph: DecodeGraph, steps: bool = True) -> Iterator[None]:
        """Remember what a block finds out of a step that cannot be captured.

        Args:
            graph: of the step.
            steps: whether one follows the prompt; the model is then known by what it is after a first one.

        Raises:
            Unsupported: in place of that.
        """
        is_new = not graph.validator.has_proved and (steps or not graph.has_read)
        before: Any = None
        if is_new:
            before = Before(self._model, [], keeps=True)
        try:
            yield
            graph.has_read = True
        except StepRefused as error:
            raise self._refused_step(graph, error, before) from error
        except OtherContents as error:
            self._store.drop(graph)
            raise Unsupported("cache_contents") from error
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        except BaseException:
            if is_new:  # it may be that of layers which are not the model's
                self._store.drop(graph)
            raise
        finally:
            if is_new:
                self._store.settle(self._model, graph)

    def _refused_step(self, graph: DecodeGraph, error: StepRefused, before: Any) -> Unsupported:
        """Return what to raise; `before` is the model before a first step, which is put back where one changed it."""
        if isinstance(error, StepReads) and not self._store.has_reread:
            self._store.has_reread = True  # which may have been the user's doing: the next call captures anew
            self._store.drop(graph)
            return Unsupported(error.reason)
        if before is not None and error.changes is not None:
            before.put_back(error.changes)
        return self.refuse(graph, error.reason, error=error)

    def refuse(
        self, graph: DecodeGraph, reason: str, key: Hashable = None, error: Exception | None = None
    ) -> Unsupported:
        """Remember that the model cannot, or not with the sampling `key`, and return what to raise."""
        self._store.refused[key] = Refusal(reason, "" if error is None else str(error))
        self._store.drop(graph)
        return Unsupported(reason)

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> Exception:
        """Give everything back and return what to raise: other ranks would wait for this one's step."""
        self._store.release()
        return Unsupported("out_of_memory") if self._plan.ranks is None else error
