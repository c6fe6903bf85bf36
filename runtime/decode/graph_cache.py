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

from ..cache.custom_cache import own_cache_of
from ..core import backend
from ..core.process import settings
from ..core.sharded_models import is_local
from ..device.compile_ahead import Compilation
from ..guards.observers import has_recorded
from ..guards.provenance import runs_as_written
from ..guards.snapshot import Snapshot, copied
from .cache_format import get_cache_format
from .fp8_cache import layers_in_8_bits
from .recurrent_state import argument_of_states
from .step_graph import DecodeGraph

GRAPHS_KEPT = 4
"""Caches, with their graphs, that a model keeps; the one used longest ago goes first."""
ROUNDING = 256
"""Capacities are multiples of this, so that calls of similar length share a graph."""

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
        self._settings: Hashable = None
        self._snapshot: Snapshot | None = None
        self._left: frozenset[str] = frozenset()
        """Attributes that the model's code leaves on modules: whether a step reads one, `side_effects.Kept` asks."""
        self._left_values: list[Any] = []
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
        self.fits = False
        """Whether the modules, as they are now, were looked through, and nothing about them speaks against a graph."""
        self.modes_alike: dict[Hashable, bool] = {}
        """Whether the model decodes under modes as without (`neutral_modes`), by those that were tried."""
        self.caches_alike: bool | None = None
        """Whether the model computes the same with a cache as without (`uncached_call`); None where nobody asked."""
        self._fused: bool | None = None

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
                self._learn(model)
                self._remember_idle()
                self._owner = None

    def refuses_code(self, cache: Any) -> str | None:
        """Return why a step cannot run code that was replaced, a key of `REASONS`."""
        code = None if self._snapshot is None else self._snapshot.code
        if code is not None and code.of_torch:
            return "torch_replaced"
        windows = any(getattr(layer, "sliding_window", None) for layer in getattr(cache, "layers", ()))
        return "masks_replaced" if code is not None and windows and code.of_masks else None

    def is_fused(self, model: nn.Module) -> bool:
        """Return whether the operators of layers may be those of a step.

        Those call none of the modules whose weights they read: nobody is to watch them, and the code that they were
        made from is to be what stands there.
        """
        if self._fused is None:
            if self._snapshot is None:
                self._know(model)
            assert self._snapshot is not None
            watched = (module for module in model.modules() if backend.observed(module) and not is_local(module))
            self._fused = not self._snapshot.code.others and all(map(_has_recorded, watched))
        return self._fused

    def find(
        self, model: Any, batch_size: int, needed: int, like: DynamicCache, captures: bool, in_16_bits: str = ""
    ) -> DecodeGraph:
        """Return a graph for `batch_size` rows of `needed` tokens; `in_16_bits` as of `DecodeGraph`."""
        capacity = -(-needed // ROUNDING) * ROUNDING
        fitting = [key for key in self.graphs if key[0] == batch_size and needed <= key[1] <= 2 * capacity]
        key = min(fitting, default=(batch_size, capacity))
        graph = self.graphs.get(key)
        if graph is not None and get_cache_format() is not None and graph.buffers.in_16_bits != in_16_bits:
            graph = None
        if graph is None or graph.captures != captures or not _has_layers(graph, model, like):
            self.graphs.pop(key, None)
            while len(self.graphs) >= GRAPHS_KEPT:
                self.graphs.popitem(last=False)
            graph = self.graphs[key] = DecodeGraph(model, *key, like=like, captures=captures, in_16_bits=in_16_bits)
        self.graphs.move_to_end(key)
        graph.cache.fused = self.is_fused(model)
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
        known, now = self._snapshot, settings()
        changed = known is None or now != self._settings or not known.is_mapped()
        if known is not None and not changed and not known.is_current():
            # What prepares a call may put a tensor on the model; whether a step reads that is for `side_effects.Kept`.
            left = known.replaced_tensors()
            self._left |= left
            changed = not left
            self._know(model)
        if changed:
            self.release()
            self._settings = now
            self._know(model)
        elif self._left and self._read_left(model) != self._left_values:
            for graph in self.graphs.values():
                graph.prompts.clear()  # which may have read it; of steps, `side_effects.Kept` knows
        for graph in [graph for graph in self.graphs.values() if graph.cache.has_old_tables]:
            self.drop(graph)

    def _know(self, model: nn.Module) -> None:
        """Know the model by what it is now."""
        self._snapshot, self._fused, self.fits = Snapshot(model, self._left), None, False
        self.modes_alike, self.caches_alike = {}, None

    def settle(self, model: nn.Module, graph: DecodeGraph) -> None:
        """Know the model by what it is after a first step, whether that was taken or refused.

        Its first forward packs the weights, which moves them, and may set attributes that it had not. Graphs other
        than that step's are of the weights where they were.
        """
        known = self._snapshot
        if known is not None and not known.is_mapped():
            for other in [kept for kept in self.graphs.values() if kept is not graph]:
                self.drop(other)
        self._learn(model)
        if known is None or not (known.is_mapped() and known.is_current()):
            found = self.fits, self._fused, self.modes_alike, self.caches_alike
            self._know(model)
            self.fits, self._fused, self.modes_alike, self.caches_alike = found

    def _learn(self, model: nn.Module) -> None:
        """See what attributes a call has left on modules: another one is no change of the model."""
        if self._snapshot is not None and (left := self._snapshot.left_since()):
            self._left |= left
            self._know(model)
        self._left_values = self._read_left(model)

    def _read_left(self, model: nn.Module) -> list[Any]:
        """Return what is left on modules, a tensor by where it is."""
        if not self._left:
            return []
        found = (vars(module).get(name) for module in model.modules() for name in sorted(self._left))
        return [id(value) if isinstance(value, torch.Tensor) else copied(value) for value in found]

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


def _has_recorded(module: nn.Module) -> bool:
    """Return whether nothing takes part in a module's call but transformers' recording of hidden states."""
    return has_recorded(module) and runs_as_written(type(module))


def describe(model: nn.Module) -> list[str]:
    """Return a line for each graph of a model, for `explain`."""
    store = _stores.get(model)
    if store is None:
        return []
    lines = [f"no graph: {detail}" for _, detail in store.refused.values() if detail]
    under_way = [str(batch) for batch, one in sorted(store.compilations.items()) if not one.is_done()]
    if under_way:
        lines.append(f"kernels being compiled: batch {', '.join(under_way)}; tokens are chosen without meanwhile")
    others = [] if store._snapshot is None else store._snapshot.code.others
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(f"layers of a step call their modules: other code stands for {', '.join(others[:3])}{more}")
    for (batch, capacity), graph in list(store.graphs.items()):
        in_8_bits = ""
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
