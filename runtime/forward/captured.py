"""The forward of a model that gets the same shapes again replays a graph: a mixin for `PreTrainedModel` classes.

A forward of one sequence or image launches hundreds of kernels, and the host takes several times as long for that as
the device for running them. In evaluation without gradients the second call with arguments of the same form captures
the whole forward, and keeps the graph if it computes the same and is faster; from then on a call copies its arguments
in, replays, and copies the outputs out. Whatever is not understood runs the model's own forward, and `explain(model)`
says why.

While the device replays, the host compares the model with what it was (`snapshot`): if anything was replaced, hooked
or switched, the outputs are thrown away and the forward runs as it is now.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.cache_utils import Cache

from ..cache.cache_argument import NAMES
from ..core import backend
from ..core.process import settings
from ..device.compile_ahead import load_compiler_beside
from ..device.graph_capture import index_of
from .bucket_check import Cut, InBucket
from .call_structure import NotUnderstood, form_of
from .capture_trial import attempt
from .forward_cache import ForwardStore, store_of
from .forward_eligibility import is_elsewhere, unfit_call
from .forward_graph import AsItIs, Given, Run
from .forward_settings import get_forward_graphs, get_ragged_batches
from .length_buckets import Text, text_of
from .unpad import packed_text


class _Thread(threading.local):
    captures: bool = False


_THREAD = _Thread()


class CapturedForward:
    """A base of models, before `PreTrainedModel`: calling one replays a captured forward where that is the same."""

    training: bool

    _forward_without_graph: ClassVar[bool] = False
    """Take this way on any device, the forward run again in place of a replay; for tests, where there is no GPU."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what `forward` does, in memory that no later call writes to."""
        if is_compiling():
            return nn.Module.__call__(self, *arguments, **keywords)
        with backend.Inside(self):
            if (
                torch.is_grad_enabled()
                or self.training
                or _THREAD.captures
                or any(keywords.get(name) is not None for name in NAMES)
                or keywords.get("use_cache")  # what comes next is given a cache or states: this one has to leave them
            ):
                return nn.Module.__call__(self, *arguments, **keywords)
            return _called(self, arguments, keywords)


def _called(model: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    mode = get_forward_graphs()
    given = _first_tensor(arguments, keywords)
    without_graph = model._forward_without_graph
    if mode == "never" or given is None or not (given.is_cuda or without_graph) or is_elsewhere(given.device):
        return nn.Module.__call__(model, *arguments, **keywords)
    store = store_of(model)
    store.without_graph = without_graph
    call = (arguments, keywords)
    tensors: list[Tensor] = []
    kind: Hashable = None
    reason = unfit_call(model, given.device)
    if reason is None:
        kind, reason = _kind(call, tensors, given.device)
    if reason is not None or (store.collector is not None and store.collector.get() is not None):
        store.reasons[reason or "observed"] += 1
        return nn.Module.__call__(model, *arguments, **keywords)
    with backend.device_guard(given):
        measures = mode != "always"
        if get_ragged_batches():
            served, outputs = _packed(model, store, call, measures)
            if served:
                return outputs
        if kind in store.graphs:
            replayed, outputs = _replayed(store, kind, lambda _: AsItIs(call, tensors))
            if replayed:
                return outputs
        if mode != "exact":
            served, outputs = _in_bucket(model, store, kind, call, measures)
            if served:
                return outputs
        refusal = store.refusal(kind)
        if refusal is None:
            run = _runner(model)
            if measures and store.count(kind):
                if not without_graph:
                    load_compiler_beside(index_of(given.device))
                return run(call)  # the parts of the model are not worth a graph of their own yet
            with store.lock:
                if store.has_room():
                    return attempt(model, store, kind, call, tensors, run, measures and not without_graph)
            store.reasons["full"] += 1
            return run(call)
    store.reasons[refusal.reason] += 1
    return nn.Module.__call__(model, *arguments, **keywords)


def _in_bucket(model: Any, store: ForwardStore, kind: Hashable, call: Any, measures: bool) -> tuple[bool, Any]:
    """Return whether a text is served by its bucket, because calls like it have several lengths, and its outputs."""
    text = text_of(model, call, settings())
    if text is None or not store.has_lengths(text.family, text.length) or text.family in store.unpadded:
        return False, None
    if text.reason:
        store.leave_lengths(text.family, text.reason)
        return False, None
    if text.family in store.hidden and text.hides:
        store.reasons["lengths_hidden"] += 1
        return False, None
    for one in (text,) if text.rows == text.row_bucket else (text, text.with_its_rows()):
        if one.is_padded and one.kind in store.graphs and store.is_repeated(kind):
            return False, None
        served, outputs = _served(model, store, one, measures)
        if served:
            return True, outputs
        if (refusal := store.refused.get(one.kind)) is not None:
            store.reasons[refusal.reason] += 1
    return False, None


def _packed(model: Any, store: ForwardStore, call: Any, measures: bool) -> tuple[bool, Any]:
    """Return whether a batch is served by a graph whose layers run on the tokens that it shows, and its outputs."""
    text = text_of(model, call, settings())
    if text is None or ("packed", text.family) in store.unpadded:
        return False, None
    packed = packed_text(text)
    return (False, None) if packed is None else _served(model, store, packed, measures)


def _served(model: Any, store: ForwardStore, text: Text, measures: bool) -> tuple[bool, Any]:
    """Return whether a text is served by the graph of its kind, which it may try to capture, and its outputs."""
    kept = store.graphs.get(text.kind)
    if kept is not None and kept.cut is not None:
        if not kept.cut.serves(text):
            return False, None
        replayed, outputs = _replayed(store, text.kind, lambda cut: InBucket(text, cut))
        if replayed:
            return True, outputs
    if store.refusal(text.kind) is not None:
        return False, None
    run = _runner(model)
    with store.lock:
        has_room = store.has_room()
    if not has_room:
        store.reasons["full"] += 1
        return True, run(text.call)
    if measures and store.count(text.kind):
        return True, run(text.call)
    with store.lock:
        measures = measures and not store.without_graph
        tensors = [tensor for tensor in text.tensors if tensor is not None]
        return True, attempt(model, store, text.kind, text.call, tensors, run, measures, text)


def _replayed(store: ForwardStore, kind: Hashable, given_of: Callable[[Cut], Given]) -> tuple[bool, Any]:
    """Return whether a graph stood for the call, and its outputs."""
    with store.lock:
        kept, snapshot = store.graphs.get(kind), store.snapshot
        if kept is None or snapshot is None:  # another thread was here
            return False, None
        given = given_of(kept.cut or Cut(()))
        if snapshot.is_mapped():
            with store.in_order():
                given.launch(kept.graph)
                if snapshot.is_current():
                    store.use(kind)
                    if kept.draws is not None and not store.without_graph:
                        kept.draws.again()
                    return True, given.results(kept.graph)
        store.release()
    return False, None


def _kind(call: Any, tensors: list[Tensor], device: torch.device) -> tuple[Hashable, str | None]:
    """Return what a graph for a call depends on, and why there can be none."""
    try:
        form = form_of(call, tensors)
        kind: Hashable = (form, settings())
        hash(kind)
    except (NotUnderstood, TypeError):
        return None, "cache" if any(isinstance(value, Cache) for value in call[1].values()) else "inputs"
    return kind, "inputs" if any(tensor.device != device for tensor in tensors) else None


def _first_tensor(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    for value in (*arguments, *keywords.values()):
        if type(value) is Tensor:
            return value
    return None


def _runner(model: nn.Module) -> Run:
    """Return a function that runs the model's own forward; it does not keep the model alive."""
    weakly = weakref.ref(model)

    def run(call: Any) -> Any:
        target = weakly()
        if target is None:
            raise ReferenceError("the model of this graph is gone")
        _THREAD.captures = True  # the parts of the model are part of the graph
        try:
            return nn.Module.__call__(target, *call[0], **call[1])
        finally:
            _THREAD.captures = False

    return run
