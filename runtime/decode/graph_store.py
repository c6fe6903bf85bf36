"""The decode graphs of each model: few, found again between calls, dropped when the model changes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from ..cache.own import own_cache_of
from ..core import backend
from ..core.compile_ahead import Compilation
from ..core.target import FP8_CACHE
from .attributes import Attributes
from .cache_format import get_cache_format
from .carried import argument_of_states
from .fp8_cache import layers_in_8_bits
from .graph import DecodeGraph

GRAPHS_KEPT = 4
"""Caches, with their graphs, that a model keeps; the one used longest ago goes first."""
ROUNDING = 256
"""Capacities are multiples of this, so that calls of similar length share a graph."""

_ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")

_stores: weakref.WeakKeyDictionary[nn.Module, GraphStore] = weakref.WeakKeyDictionary()
_making = threading.Lock()


class Refusal(NamedTuple):
    """Why a model's step runs in no graph."""

    reason: str
    detail: str


class GraphStore:
    """One model's graphs. One thread uses them at a time, another one waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._signature: Hashable = None
        self._attributes: Attributes | None = None
        self._idle: torch.cuda.Event | None = None
        self.graphs: OrderedDict[tuple[int, int], DecodeGraph] = OrderedDict()
        """By batch size and capacity, last used last."""
        self.refused: dict[Hashable, Refusal] = {}
        """What was tried in vain, by the key of the sampling; by None if it concerns them all."""
        self.has_reread = False
        """Whether a step was found to read something on the model that is another one than when it was proved."""
        self.compilations: dict[int, Compilation] = {}
        """Of the kernels of prompts and steps, by batch size, where a call began without them."""
        self.gives_back_plain = False
        """Whether the model was seen to give a growing cache back as it was given one."""

    @contextlib.contextmanager
    def claimed(self, model: nn.Module) -> Iterator[bool]:
        """Wait for the graphs and hold them; false where this thread holds them already, further down the stack."""
        if self._owner == threading.get_ident():
            yield False
            return
        with self._lock:
            self._owner = threading.get_ident()
            try:
                self._forget_if_changed(model)
                if self._idle is not None:
                    torch.cuda.current_stream(self._idle.device).wait_event(self._idle)
                yield True
            finally:
                self._remember_idle()
                self._owner = None

    def find(
        self, model: Any, batch_size: int, needed: int, like: DynamicCache, captures: bool, in_16_bits: str = ""
    ) -> DecodeGraph:
        """Return a graph for `batch_size` rows of `needed` tokens; `in_16_bits` as of `DecodeGraph`."""
        capacity = -(-needed // ROUNDING) * ROUNDING
        fitting = [key for key in self.graphs if key[0] == batch_size and needed <= key[1] <= 2 * capacity]
        key = min(fitting, default=(batch_size, capacity))
        graph = self.graphs.get(key)
        if graph is not None and get_cache_format() is not None and graph.in_16_bits != in_16_bits:
            graph = None
        if graph is None or graph.captures != captures or not _has_layers(graph, model, like):
            self.graphs.pop(key, None)
            while len(self.graphs) >= GRAPHS_KEPT:
                self.graphs.popitem(last=False)
            graph = self.graphs[key] = DecodeGraph(model, *key, like=like, captures=captures, in_16_bits=in_16_bits)
        self.graphs.move_to_end(key)
        return graph

    def release(self) -> None:
        """Give back every graph and cache."""
        self.graphs.clear()
        self.refused.clear()
        self.has_reread = self.gives_back_plain = False

    def drop(self, graph: DecodeGraph) -> None:
        """Forget a graph."""
        for key in [key for key, kept in self.graphs.items() if kept is graph]:
            del self.graphs[key]

    def _forget_if_changed(self, model: nn.Module) -> None:
        signature = _signature_of(model)
        if signature != self._signature or self._attributes is None or not self._attributes.are_current():
            self.release()
            self._signature, self._attributes = signature, Attributes(model)
        for graph in [graph for graph in self.graphs.values() if graph.cache.has_old_tables]:
            self.drop(graph)

    def settle(self, model: nn.Module, graph: DecodeGraph) -> None:
        """Know the model by what it is after a first step: its first forward packs the weights, which moves them.

        It may also set attributes that it had not. Other graphs than that step's are of the weights where they were.
        """
        signature = _signature_of(model)
        if signature != self._signature:
            for other in [kept for kept in self.graphs.values() if kept is not graph]:
                self.drop(other)
            self._signature = signature
        if self._attributes is None or not self._attributes.are_current():
            self._attributes = Attributes(model)

    def _remember_idle(self) -> None:
        """Note where the device will be done with the buffers: replays beyond the stop may still run."""
        for graph in self.graphs.values():
            if graph.captures:
                with torch.cuda.device(graph.device):
                    self._idle = torch.cuda.Event()
                    self._idle.record()
                return


def store_of(model: nn.Module) -> GraphStore:
    """Return the graphs of a model."""
    with _making:
        return _stores.setdefault(model, GraphStore())


def release_graphs(model: nn.Module) -> None:
    """Give back the graphs and caches that `generate()` made for a model; the next call makes them anew."""
    store = store_of(model)
    with store.claimed(model) as ours:
        if not ours:
            raise RuntimeError("release_graphs was called from inside generate() of the same model")
        store.release()


def _has_layers(graph: DecodeGraph, model: Any, like: DynamicCache) -> bool:
    """Return whether a graph's cache has as many layers as a call's."""
    if argument_of_states(model) or own_cache_of(model):
        return True
    layers = like.layers or DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return len(graph.cache.layers) == len(layers)


def _signature_of(model: nn.Module) -> Hashable:
    """Return what changes when a graph must not be replayed any more: classes, addresses, hooks, adapters, choices."""
    parts: list[Hashable] = [_settings(model)]
    for module in model.modules():
        parts.append(id(type(module)))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                parts.append((tensor.data_ptr(), tensor.dtype))
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            parts.append(id(module))
        if hasattr(module, "_disable_adapters"):  # a layer of peft
            parts.append(tuple(str(getattr(module, name, None)) for name in _ADAPTER_STATE))
    parts.append((backend.get_backend(), *backend.named_besides.values()))
    return tuple(parts)


def _settings(model: nn.Module) -> Hashable:
    config = getattr(model, "config", None)
    return tuple(str(getattr(config, name, None)) for name in ("_attn_implementation", "_experts_implementation"))


def describe(model: nn.Module) -> list[str]:
    """Return a line for each graph of a model, for `explain`."""
    store = _stores.get(model)
    if store is None:
        return []
    lines = [f"no graph: {detail}" for _, detail in store.refused.values() if detail]
    under_way = [str(batch) for batch, one in sorted(store.compilations.items()) if not one.is_done()]
    if under_way:
        lines.append(f"kernels being compiled: batch {', '.join(under_way)}; tokens are chosen without meanwhile")
    for (batch, capacity), graph in list(store.graphs.items()):
        in_8_bits = ""
        if FP8_CACHE:
            in_8_bits = layers_in_8_bits(graph.cache)
        size = f"{graph.nbytes / 2**20:.1f} MiB of cache"
        lines.append(f"graph: batch {batch}, capacity {capacity}, {size}{in_8_bits}")
        if graph.prompts.lengths:
            lines.append(
                f"  prompts of up to {', '.join(map(str, graph.prompts.lengths))} tokens in graphs of their own, by "
                f"{graph.prompts.form.value}"
            )
        if graph.prompts.refusal is not None:
            lines.append(f"  prompts in no graph: {graph.prompts.refusal}")
    return lines
