"""The captured forwards of each model: few, found again by what they are given, dropped when the model changes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..guards.snapshot import Snapshot
from .bucket_check import Cut
from .forward_eligibility import REASONS, device_of
from .forward_graph import ForwardGraph, Unsuitable

GRAPHS_KEPT = 24
"""Graphs that a model keeps, the one used longest ago goes first: texts up to 512 tokens have 12 buckets, so these are
two numbers of texts. They share memory, up to `SHARE_OF_MEMORY`."""
KINDS_KNOWN = 256
"""Kinds of calls that are counted, or known not to be worth a graph."""
MOST_FAILURES = 3
"""Kinds of calls that were captured in vain before no other is tried, until the model changes."""
LOOKS_AGAIN = 64
"""Calls without a graph after which it is seen whether the reason is still there; after a look in vain, twice as many:
a look that finds another model tries to capture it, which reads every weight."""
KINDS_COMPILED = 8
"""Kinds of calls for which kernels of chains are compiled, as sizes stand in their texts: that takes many times as
long as a capture. Later kinds run functions one by one; of buckets, each of which serves many lengths, twice as many
do not."""
IDLE = 4096
"""Calls after which a graph that none of them used makes room for one of another bucket: where there are more buckets
than graphs, taking turns would cost more than any graph gains."""
REPEATED, RECENT = 16, 64
"""A length that had so many of the last texts that were padded gets a graph of its own."""
SHARE_OF_MEMORY = 8
"""Graphs of a model take at most one part in so many of the device's memory."""


class Refusal(NamedTuple):
    """Why a kind of call runs without a graph."""

    reason: str
    detail: str = ""


class Kept(NamedTuple):
    """A graph and what is known of it."""

    graph: ForwardGraph
    milliseconds: tuple[float, float] | None
    """Of the model's own forward and of a replay, both with their wait; None where nothing was measured."""
    as_written: str = ""
    """Why its functions run one by one, as the modeling file has them; empty where they do not."""
    draws: Any = None
    """`Draws`: random numbers that every call draws."""
    cut: Cut | None = None
    """How it serves shorter texts; None where it does not."""


class ForwardStore:
    """One model's graphs. One thread uses them at a time; another one waits until its launches are made."""

    def __init__(self, model: nn.Module):
        self.lock = threading.Lock()
        self.device = device_of(model)
        self.without_graph = False
        """Whether forwards are run again in place of replays."""
        self.snapshot: Snapshot | None = None
        self.tried: Snapshot | None = None
        """The model when a call of it was found to be none for a graph, where nothing was captured of it."""
        self.collector: Any = None
        self.graphs: OrderedDict[Hashable, Kept] = OrderedDict()
        """By the kind of call, last used last."""
        self.refused: OrderedDict[Hashable, Refusal] = OrderedDict()
        self.whole: Refusal | None = None
        """Why no call of the model is captured, as it is now."""
        self.reasons: Counter[str] = Counter()
        """How often a call ran without a graph, by reason."""
        self.replays = 0
        self.compiled: set[Hashable] = set()
        """The kinds of calls that kernels were compiled for."""
        self.unpadded: dict[Hashable, Refusal] = {}
        """Why texts are not padded, by what such calls have in common."""
        self.hidden: dict[Hashable, Refusal] = {}
        """Why those that hide positions are not, likewise."""
        self._lengths: dict[Hashable, int | None] = {}
        """The one length of calls that have the rest in common, None once there were several."""
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._calls = 0
        self._last: dict[Hashable, int] = {}
        """The number of the call that last used a graph."""
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._needed: dict[Hashable, int] = {}
        self._changed: set[Hashable] = set()
        self._failures = 0
        self._since_look, self._look_after = 0, LOOKS_AGAIN
        self._stream: Any = None
        self._idle: Any = None

    def has_lengths(self, family: Hashable, length: int) -> bool:
        """Note the length of a text; return whether calls like it had others, too."""
        if len(self._lengths) > KINDS_KNOWN:
            self._lengths.clear()
        if self._lengths.setdefault(family, length) != length:
            self._lengths[family] = None
        return self._lengths[family] is None

    def is_repeated(self, kind: Hashable) -> bool:
        """Note the kind of a padded call; return whether it is worth a graph of its own."""
        self._recent.append(hash(kind))
        return self._recent.count(hash(kind)) >= REPEATED and kind not in self.refused

    def use(self, kind: Hashable) -> None:
        """Note that a graph is replayed."""
        self.graphs.move_to_end(kind)
        self.replays += 1
        self._calls += 1
        self._last[kind] = self._calls

    def has_room(self) -> bool:
        """Note a call without a graph; return whether there may be one more without dropping one that is in use."""
        self._calls += 1
        if len(self.graphs) < GRAPHS_KEPT:
            return True
        return self._calls - self._last[next(iter(self.graphs))] > IDLE

    def may_compile(self, kind: Hashable, *, is_bucket: bool = False) -> bool:
        """Return whether kernels may be compiled for a kind of call."""
        if len(self.compiled) < KINDS_COMPILED * (2 if is_bucket else 1):
            self.compiled.add(kind)
        return kind in self.compiled

    def count(self, kind: Hashable) -> int:
        """Count a call without a graph; return how many are missing before it is worth capturing, 0 if none."""
        uses = self._uses.pop(kind, 0) + 1
        self._uses[kind] = uses
        while len(self._uses) > KINDS_KNOWN:
            gone, _ = self._uses.popitem(last=False)
            self._needed.pop(gone, None)
        return max(0, self._needed.get(kind, 2) - uses)

    def first_change(self, kind: Hashable) -> bool:
        """Note that a call of a kind changed the model; return whether it is the first that did."""
        first = kind not in self._changed
        self._changed.add(kind)
        return first

    def pool(self) -> Any:
        """Return the memory pool of a graph that is kept, or else a new one.

        Not one that had its last graph, also of a capture that failed: torch has marked it to be freed, and where
        another graph is made in it `torch.cuda.empty_cache()` raises from then on.
        """
        return next((kept.graph.pool for kept in self.graphs.values()), None) or torch.cuda.graph_pool_handle()

    def keep(self, kind: Hashable, kept: Kept) -> None:
        """Take a graph; those used longest ago go where there are too many, all others where they are too large."""
        most = self._most_bytes()
        others = self.nbytes if kept.cut is not None else 0  # a bucket does not drop what others use
        if most is not None and kept.graph.nbytes + others > most:
            self.refuse(kind, "memory", f"{kept.graph.nbytes / 2**20:.0f} MiB")
            return
        if most is not None and kept.graph.nbytes + self.nbytes > most:
            for gone in list(self.graphs):
                self._evict(gone)
        while len(self.graphs) >= GRAPHS_KEPT:
            self._evict(next(iter(self.graphs)))
        self.graphs[kind] = kept
        self._last[kind] = self._calls
        self._look_after = LOOKS_AGAIN

    def _evict(self, kind: Hashable) -> None:
        """Drop a graph; it takes twice as many calls as before to be captured again, lest kinds take turns."""
        del self.graphs[kind], self._last[kind]
        self._uses.pop(kind, None)
        self._needed[kind] = min(2 * self._needed.get(kind, 2), 1024)

    def refuse(self, kind: Hashable, reason: str, detail: str = "") -> None:
        """Remember that a kind of call is not captured."""
        self.refused[kind] = Refusal(reason, detail)
        if reason != "slower" and not reason.startswith(("lengths_", "packed_")):
            self._failures += 1
        if self._failures >= MOST_FAILURES and not self.graphs:
            self.whole = Refusal(reason, detail)
        while len(self.refused) > KINDS_KNOWN:
            self.refused.popitem(last=False)

    def leave_lengths(self, family: Hashable, reason: str, detail: str = "") -> None:
        """Remember that texts are not padded in calls that have the rest in common."""
        if len(self.unpadded) > KINDS_KNOWN:
            self.unpadded.clear()
        self.unpadded[family] = Refusal(reason, detail)

    def leave_hidden(self, family: Hashable, error: Unsuitable) -> None:
        """Remember that texts which hide positions are not padded in calls that have the rest in common."""
        if len(self.hidden) > KINDS_KNOWN:
            self.hidden.clear()
        self.hidden[family] = Refusal(error.reason, error.detail)

    def refuse_all(self, reason: str) -> None:
        """Remember that no call of the model is captured, as it is now."""
        self.whole = Refusal(reason)

    def refusal(self, kind: Hashable) -> Refusal | None:
        """Return why a kind of call is not captured; now and then look whether the model is still the same."""
        refusal = self.whole or self.refused.get(kind)
        if refusal is not None:
            self._since_look += 1
            if self._since_look >= self._look_after:
                self._since_look = 0
                with self.lock:
                    known = self.snapshot or self.tried
                    if known is None or not (known.is_mapped() and known.is_current()):
                        self._look_after *= 2
                        self.release()
                        return None
        return refusal

    def release(self) -> None:
        """Forget everything: the model changed, or its memory is wanted."""
        self.graphs.clear()
        self._last.clear()
        self.refused.clear()
        self._uses.clear()
        self._needed.clear()
        self._changed.clear()
        self.unpadded.clear()
        self.hidden.clear()
        self._recent.clear()
        self.snapshot = self.tried = self.whole = None
        self._failures = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the graphs brought with them."""
        return sum(kept.graph.nbytes for kept in self.graphs.values())

    def _most_bytes(self) -> int | None:
        if self.device is None or self.device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory // SHARE_OF_MEMORY)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Let what is launched inside wait for the last use of the graphs, if that was on another stream."""
        if self.device is None or self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._idle is not None and stream != self._stream:
            stream.wait_event(self._idle)
        try:
            yield
        finally:
            if self._idle is None:
                self._idle = torch.cuda.Event()
            self._idle.record(stream)
            self._stream = stream


_stores: weakref.WeakKeyDictionary[nn.Module, ForwardStore] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def store_of(model: nn.Module) -> ForwardStore:
    """Return the captured forwards of a model."""
    store = _stores.get(model)
    if store is None:
        with _making:
            store = _stores.setdefault(model, ForwardStore(model))
    return store


def release_forwards(model: nn.Module) -> None:
    """Give back the graphs of a model's forward and of its parts; calls to come make them anew."""
    for module in model.modules():
        if (store := _stores.get(module)) is not None:
            with store.lock:
                store.release()


def captured_kinds(model: nn.Module) -> list[tuple[tuple[torch.Size, ...], tuple[float, float] | None]]:
    """Return the shapes of the arguments of each graph of a model, and its milliseconds: without it and with it."""
    store = _stores.get(model)
    if store is None:
        return []
    return [(tuple(t.shape for t in kept.graph.inputs), kept.milliseconds) for kept in store.graphs.values()]


def describe(model: nn.Module) -> list[str]:
    """Return a line for each captured forward of a model and of its parts, and why others are not, for `explain`."""
    lines: list[str] = []
    for name, module in model.named_modules():
        if (store := _stores.get(module)) is not None:
            lines += [f"forward{f' of {name}' if name else ''}: {line}" for line in _lines(store)]
    return lines


def _lines(store: ForwardStore) -> Iterator[str]:
    for kept in list(store.graphs.values()):
        shapes = _shapes_of(kept.graph.inputs)
        times = "" if kept.milliseconds is None else ", {:.2f} → {:.2f} ms".format(*kept.milliseconds)
        times += f", its functions one by one: {kept.as_written}" if kept.as_written else ""
        if kept.cut is not None:
            shapes += f" and texts from {kept.cut.fewest} × {kept.cut.shortest} tokens on"
            shapes += f", packed into {kept.cut.tokens}" if kept.cut.tokens else ""
        yield f"in a graph for {shapes or 'no tensors'}{times}, {kept.graph.nbytes / 2**20:.1f} MiB"
    if store.replays:
        yield f"{store.replays} calls replayed a graph"
    left = [*store.unpadded.values(), *store.hidden.values()]
    for refusal in {refusal.reason: refusal for refusal in left}.values():
        said_why = f" ({refusal.detail})" if refusal.detail else ""
        what = (
            "batches are not packed"
            if refusal.reason.startswith("packed_")
            else "texts of other lengths do not share a graph"
        )
        yield f"{what}: {REASONS[refusal.reason]}{said_why}"
    said = [*store.refused.values(), *([store.whole] if store.whole is not None else [])]
    details = {refusal.reason: refusal.detail for refusal in said if refusal.detail}
    for reason, count in sorted(store.reasons.items()):
        detail = f" ({details[reason]})" if reason in details else ""
        yield f"in no graph {count} ×: {REASONS[reason]}{detail}"


def _shapes_of(tensors: list[Tensor]) -> str:
    """Return shapes in words."""
    return ", ".join("×".join(map(str, tensor.shape)) for tensor in tensors)
