"""Captures the forward of one kind of call, and keeps the graph only if it computes the same, and sooner."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..core import derived
from ..core.capture import CaptureFailed
from ..core.launch import rehearsing
from .fitness import Randomness, collector_of, unfit_model
from .graph import ForwardGraph, Run, Unsuitable
from .snapshot import Snapshot, unfit_weights
from .store import ForwardStore, Kept
from .structure import NotUnderstood, form_of

ROUNDS = 3
"""Times that forward and replay are measured in turn; the shortest of each counts."""
WORTH = 0.97
"""A replay has to take less than this part of the forward's time."""
TOLERANCES = {torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest relative distance of an output of a graph, by dtype: in a capture transformers makes masks that it leaves
out otherwise, and attention with a mask rounds in another order. A graph that computes something else gives 1."""
TOLERANCE = 1e-3
"""The same for wider dtypes."""


def attempt(
    model: nn.Module, store: ForwardStore, kind: Hashable, call: Any, tensors: list[Tensor], run: Run, measures: bool
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
    """
    device = tensors[0].device
    random = Randomness(device)
    expected = run(call)
    try:
        if random.is_drawn():
            raise Unsuitable("random")
        with rehearsing():  # what is packed or made at the first use in a graph is there before the model is looked at
            run(call)
        snapshot = _ready(model, store, device)
        kept = _captured(store, snapshot, call, tensors, run, expected)
        if measures:
            kept = kept._replace(milliseconds=_times(kept.graph, snapshot, call, tensors, run))
        store.keep(kind, kept)
    except Unsuitable as error:
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
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        store.refuse(kind, "not_capturable", _said(error))
    return expected


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
    store: ForwardStore, snapshot: Snapshot, call: Any, tensors: list[Tensor], run: Run, expected: Any
) -> Kept:
    """Return a graph that computes `expected`.

    Raises:
        Unsuitable: if there is none.
    """
    wanted: list[Tensor] = []
    form = form_of(expected, wanted)
    versions = snapshot.versions()
    assert store.device is not None
    pool = store.pool() if store.device.type == "cuda" and not store.without_graph else None
    with derived.watching() as seen:
        graph = ForwardGraph(run, call, snapshot.tensors, store.device, pool)
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
    for tensor, other in zip(wanted, found, strict=True):
        if (distance := _distance(tensor, other)) > TOLERANCES.get(tensor.dtype, TOLERANCE):
            raise Unsuitable("differs", f"by {distance:.3g}")
    return Kept(graph, None)


def _distance(expected: Tensor, found: Tensor) -> float:
    """Return the relative distance of two tensors of the same shape; infinite where they differ and may not."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(expected, found) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64 if expected.itemsize > 4 else torch.float32
    one, other = (torch.where(finite, tensor, 0).to(wide) for tensor in (expected, found))
    norm, apart = one.norm().item(), (one - other).norm().item()
    return apart / norm if norm else apart


def _times(graph: ForwardGraph, snapshot: Snapshot, call: Any, tensors: list[Tensor], run: Run) -> tuple[float, float]:
    """Return milliseconds of the forward and of a replay, each with the wait for its end.

    Raises:
        Unsuitable: if the replay is not faster.
    """

    def replay() -> None:
        snapshot.is_mapped()
        graph.launch(tensors)
        snapshot.is_current()
        graph.results(tensors)

    rounds = [(_milliseconds(lambda: run(call)), _milliseconds(replay)) for _ in range(ROUNDS)]
    forward, replayed = min(times[0] for times in rounds), min(times[1] for times in rounds)
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
