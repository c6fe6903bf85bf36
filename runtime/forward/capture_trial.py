"""Captures the forward of one kind of call, and keeps the graph only if it computes the same, and sooner."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core import output_layout, weight_copies
from ..device.compile_ahead import compile_all, variants
from ..device.graph_capture import CaptureFailed
from ..guards.snapshot import Snapshot, unfit_weights
from ..guards.tensor_version import version_of
from ..launching.launch import rehearsing
from .agreement import compare, equal
from .bucket_check import Cut, InBucket, Padding
from .call_structure import NotUnderstood, form_of
from .forward_cache import ForwardStore, Kept
from .forward_eligibility import Randomness, collector_of, unfit_model
from .forward_graph import AsItIs, ForwardGraph, Given, Run, Unsuitable
from .functions import functions
from .host_copies import HostCopies
from .host_rng import Draws
from .length_buckets import Text
from .unpad import packed_run

ROUNDS = 3
"""Times that forward and replay are measured in turn; the shortest of each counts."""
CLEAR, LONG_MS = 0.9, 50.0
"""One round tells which is faster where one takes less than this part of the other's time and both together are long:
a call would wait for each further one."""
WORTH = 0.97
"""A replay has to take less than this part of the forward's time."""
ALIGNMENT = 16
"""Bytes; Triton compiles another kernel for addresses that are no multiple of them."""
MOST_COPIED = 2**26
"""Bytes of tensors without a version, made in inference mode, that are compared by their values."""
OF_ALL_BUCKETS = ("lengths_outputs", "lengths_differ", "lengths_read", "packed_")
"""How reasons begin why texts are padded to no bucket; others are of one."""
ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""What code raises that cannot run during a capture."""


def attempt(
    model: nn.Module,
    store: ForwardStore,
    kind: Hashable,
    call: Any,
    tensors: list[Tensor],
    run: Run,
    measures: bool,
    text: Text | None = None,
) -> Any:
    """Run the forward of a call, which is returned, and capture it for those to come.

    Args:
        model: whose forward it is.
        store: of the model, held by this thread.
        kind: of the call.
        call: its `(arguments, keywords)`.
        tensors: those in `call`.
        run: runs the forward on something like `call`.
        measures: whether the graph is kept only where it is faster.
        text: the call, where what is captured is the padded one of its bucket, whose kind `kind` is.
    """
    try:
        effects = Effects(model, tensors)
    except ERRORS as error:  # tensors that cannot be copied or summed up
        store.refuse(kind, "not_capturable", _said(error))
        return run(call)
    if effects.are_of_other_code:
        store.tried = effects.snapshot_to_keep
        store.refuse(kind, "torch_replaced")
        return run(call)
    draws, copies = Draws(), HostCopies(tensors[0].device)
    with draws, copies:
        expected = run(call)
    with draws.once(), _refusing(store, kind, text):
        store.tried = effects.snapshot_to_keep
        if effects.are_none(store, kind, draws):  # more runs would have them too
            kept = _kept(model, store, kind, call, tensors, run, expected, measures, text, copies)
            if draws.are_there:
                kept = kept._replace(draws=draws)
            store.keep(kind, kept)
    return expected


def _kept(
    model: nn.Module,
    store: ForwardStore,
    kind: Hashable,
    call: Any,
    tensors: list[Tensor],
    own: Run,
    expected: Any,
    measures: bool,
    text: Text | None,
    copies: HostCopies,
) -> Kept:
    """Return the graph of a call, or of the bucket of a text, whose own run gave `expected`."""
    device = tensors[0].device
    if unfit_model(model) is not None:  # a hook would be called by every run
        _ready(model, store, device)
    wanted, padding, run = expected, None, own
    if text is not None:
        if text.tokens:
            run = packed_run(model, own, text.tokens)
        padding = Padding(model, text, own, run)
        call, tensors = padding.tried(expected)
        copies = HostCopies(device)
        with copies:
            wanted = run(call)
    reason = _rehearsed(store, kind, call, run, wanted, device, copies, is_bucket=text is not None)
    snapshot = _ready(model, store, device)
    capture = functools.partial(_captured, store, snapshot, call, tensors, run, wanted, copies)
    try:
        kept = capture(free_layout=True, chained=not reason, rehearsed=not reason)
    except torch.OutOfMemoryError:
        raise
    except (CaptureFailed, *ERRORS) as error:  # which may be for the layout: then it is as it was
        reason = _named(error)
        kept = capture(free_layout=False, chained=False)
    kept = kept._replace(as_written=reason)
    if padding is not None and text is not None:
        cut = padding.proved(kept.graph)
        if padding.hidden is not None:
            store.leave_hidden(text.family, padding.hidden)
        return _timed_texts(kept, cut, snapshot, text, own) if measures else kept._replace(cut=cut)
    if measures:
        return kept._replace(milliseconds=_times(kept.graph, snapshot, AsItIs(call, tensors), run))
    return kept


@contextlib.contextmanager
def _refusing(store: ForwardStore, kind: Hashable, text: Text | None) -> Iterator[None]:
    """Remember why what a block tries is not to be had."""
    try:
        yield
    except Unsuitable as error:
        if text is not None and error.reason == "lengths_hidden":
            store.leave_hidden(text.family, error)
        elif text is not None and error.reason.startswith(OF_ALL_BUCKETS):
            store.leave_lengths(text.family, error.reason, error.detail)
        else:
            store.refuse(kind, error.reason, error.detail)
    except CaptureFailed as error:
        cause = error.__cause__
        reason, detail = (cause.reason, cause.detail) if isinstance(cause, Unsuitable) else ("not_capturable", error)
        store.refuse(kind, reason, _said(detail))
    except NotUnderstood as error:
        store.refuse(kind, "outputs", str(error))
    except torch.OutOfMemoryError:
        store.release()
        store.refuse(kind, "out_of_memory")
    except ERRORS as error:
        store.refuse(kind, "not_capturable", _said(error))


class Effects:
    """What a run of the forward does besides returning something.

    Args:
        model: whose forward is run.
        inputs: what it is given.

    Raises:
        Unsuitable: if a tensor of the model has no memory just now, which nobody may read then.
    """

    def __init__(self, model: nn.Module, inputs: list[Tensor]):
        self._random = Randomness(inputs[0].device)
        self._inputs = inputs
        self._before = [(tensor.clone(), version_of(tensor)) for tensor in inputs]
        self._snapshot = Snapshot(model)
        if any(map(_is_freed, self._snapshot.tensors)):
            raise Unsuitable("not_capturable", "the memory of a tensor was given back")
        self._versions = self._snapshot.versions()
        self._sums = _sums(self._snapshot.tensors)
        uncounted = [tensor for tensor in self._snapshot.tensors if version_of(tensor) is None]
        self._too_many = sum(tensor.nbytes for tensor in uncounted) > MOST_COPIED
        self._copies = [] if self._too_many else [(tensor, tensor.clone()) for tensor in uncounted]

    @property
    def are_of_other_code(self) -> bool:
        """Whether a function of torch was replaced that a run under modes, such as all of these, would call twice."""
        return bool(self._snapshot.code.of_torch)

    @property
    def snapshot_to_keep(self) -> Snapshot | None:
        """The model before the call; None where keeping that would keep the model alive, or tells too little."""
        known = self._snapshot
        return known if known.is_complete and not known.refers_to_itself else None

    def are_none(self, store: ForwardStore, kind: Hashable, draws: Any) -> bool:
        """Return whether nothing else changed since; what a model does at its first call alone is forgiven once.

        Args:
            store: of the model.
            kind: of the call.
            draws: the `Draws` that watched it, where code may draw.

        Raises:
            Unsuitable: if it is no call to be repeated.
        """
        if self._random.is_drawn(draws):
            raise Unsuitable("random")
        for tensor, (before, version) in zip(self._inputs, self._before, strict=True):
            if version_of(tensor) != version or not equal(tensor, before):
                raise Unsuitable("changes_inputs")
        if self._too_many:
            raise Unsuitable("inference_tensors")
        written = not all(
            map(equal, _sums(self._snapshot.tensors), self._sums)
        )  # through `.data`, which nobody counts
        if written or not all(equal(tensor, before) for tensor, before in self._copies):
            raise Unsuitable("changes_state")
        if self._snapshot.versions() == self._versions and self._snapshot.is_current():
            return True
        if not store.first_change(kind):
            raise Unsuitable("changes_state")
        return False


def _sums(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.sum(dtype=torch.float64 if tensor.is_floating_point() else None) for tensor in tensors]


def _is_freed(tensor: Tensor) -> bool:
    """Return whether a tensor's storage is empty though it has elements, as FSDP leaves gathered weights behind."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.nbytes > 0 and not tensor.untyped_storage().nbytes()


def _said(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _ready(model: nn.Module, store: ForwardStore, device: torch.device) -> Snapshot:
    """Return what the graph depends on; graphs of the model as it was are dropped.

    Raises:
        Unsuitable: if the model cannot be captured.
    """
    if store.snapshot is None or not (store.snapshot.is_mapped() and store.snapshot.is_current()):
        store.release()
        store.snapshot, store.device = Snapshot(model), device
        reason = unfit_model(model)
        if reason is None and unfit_weights(store.snapshot.tensors, device):
            reason = "several_devices"
        if reason is None and (store.snapshot.refers_to_itself or not store.snapshot.is_complete):
            reason = "own_state"
            store.snapshot = None
        if reason is not None:
            store.refuse_all(reason)
        else:
            store.collector = collector_of(model)
    if store.whole is not None or store.snapshot is None:
        raise Unsuitable("own_state" if store.whole is None else store.whole.reason)
    return store.snapshot


def _captured(
    store: ForwardStore,
    snapshot: Snapshot,
    call: Any,
    tensors: list[Tensor],
    run: Run,
    expected: Any,
    copies: HostCopies,
    *,
    free_layout: bool,
    chained: bool,
    rehearsed: bool = False,
) -> Kept:
    """Return a graph that computes `expected`; `rehearsed` says whether the call was just run in this very way.

    Raises:
        Unsuitable: if there is none.
    """
    wanted: list[Tensor] = []
    form = form_of(expected, wanted)
    versions = snapshot.versions()
    assert store.device is not None
    pool = store.pool() if store.device.type == "cuda" and not store.without_graph else None
    with weight_copies.watching() as seen:
        graph = ForwardGraph(
            run, call, snapshot.tensors, store.device, pool,
            free_layout=free_layout, chained=chained, rehearsed=rehearsed and all(map(_lies_as_a_copy, tensors)),
            copies=copies,
        )  # fmt: skip
    if seen.copies:
        raise Unsuitable("derived_weights")
    if any(own._version > 1 for own in graph.inputs):
        raise Unsuitable("changes_inputs")
    if snapshot.versions() != versions or not (snapshot.is_mapped() and snapshot.is_current()):
        raise Unsuitable("changes_state")
    if graph.form != form:
        raise Unsuitable("differs", "outputs of another form")
    with store.in_order():
        graph.launch(tensors)
        found: list[Tensor] = []
        form_of(graph.results(tensors), found)
    compare(wanted, found, functools.partial(run, call))
    return Kept(graph, None)


def _lies_as_a_copy(tensor: Tensor) -> bool:
    """Return whether kernels for a tensor are those for a graph's own copy of it."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _rehearsed(
    store: ForwardStore,
    kind: Hashable,
    call: Any,
    run: Run,
    expected: Any,
    device: torch.device,
    copies: HostCopies,
    *,
    is_bucket: bool,
) -> str:
    """Run the forward with functions put off; return why they have to run one by one, empty if they need not.

    What nobody computed is NaN then. What is packed or made at the first use in a graph is there afterwards, before
    anybody looks at the model.
    """
    if not store.may_compile(kind, is_bucket=is_bucket):
        with rehearsing(), copies or contextlib.nullcontext():
            run(call)
        return f"kernels were compiled for {len(store.compiled)} other kinds of calls"

    def freely(*, poisons: bool) -> Any:
        with output_layout.free(), functions(poisons=poisons), copies or contextlib.nullcontext():
            return run(call)

    if not store.without_graph:
        compile_all(variants(lambda: freely(poisons=False), device), device)
    try:
        wanted: list[Tensor] = []
        found: list[Tensor] = []
        with rehearsing():
            value = freely(poisons=True)
        if form_of(value, found) != form_of(expected, wanted):
            raise Unsuitable("differs", "outputs of another form")
        compare(wanted, found, functools.partial(run, call))
    except torch.OutOfMemoryError:
        raise
    except ERRORS as error:
        with rehearsing(), copies or contextlib.nullcontext():
            run(call)
        return _named(error)
    return ""


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_said(error)}"


def _timed_texts(kept: Kept, cut: Cut, snapshot: Snapshot, text: Text, run: Run) -> Kept:
    """Return a bucket's graph for texts that it is faster for than their own forward: all, or those not shorter.

    Raises:
        Unsuitable: if it is slower for this one, too.
    """
    least, fewest = min(text.length, text.least), min(text.rows, text.fewest)
    try:
        times = _times(kept.graph, snapshot, InBucket(text.shortened(least, fewest), cut), run)
    except Unsuitable:
        least, fewest = text.length, text.rows
        times = _times(kept.graph, snapshot, InBucket(text, cut), run)
    return kept._replace(milliseconds=times, cut=cut._replace(shortest=least, fewest=fewest))


def _times(graph: ForwardGraph, snapshot: Snapshot, given: Given, run: Run) -> tuple[float, float]:
    """Return milliseconds of the forward and of a replay, each with the wait for its end.

    Raises:
        Unsuitable: if the replay is not faster.
    """

    def replay() -> None:
        snapshot.is_mapped()
        given.launch(graph)
        snapshot.is_current()
        given.results(graph)

    forward = replayed = math.inf
    for _ in range(ROUNDS):
        forward = min(forward, _milliseconds(lambda: run(given.call)))
        replayed = min(replayed, _milliseconds(replay))
        if forward + replayed > LONG_MS and min(forward, replayed) < CLEAR * max(forward, replayed):
            break
    if replayed > WORTH * forward:
        raise Unsuitable("slower", f"{replayed:.2f} ms against {forward:.2f} ms")
    return forward, replayed


def _milliseconds(action: Callable[[], Any]) -> float:
    stream = torch.cuda.current_stream()
    stream.synchronize()
    started = time.perf_counter()
    action()
    stream.synchronize()
    return (time.perf_counter() - started) * 1e3
