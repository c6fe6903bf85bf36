"""The 8-bit copies of weights: made on the device at first use, kept beside the parameters, never in a state dict.

A copy takes half the memory of the bf16 weight that it stands beside. It is made anew, in the same memory, when the
parameter was changed in place or replaced; what is written through `parameter.data` alone torch does not count, and
needs `forget(model)`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..aiter import aiter_fp8
from ..core import backend, weight_copies
from ..device.e4m3 import Quantized
from ..guards.tensor_version import version_of
from ..linear import joined_storage, packing
from ..linear.prologue import is_trained
from .fp8_rows import empty_rows, quantized_rows

REASONS = {
    **packing.REASONS,
    "dtype": "the weight is no float, or none of the input's type",
    "capturing": "a graph was being captured at the first call, when nothing may be allocated",
}

PART = 2**25
"""Elements that are quantised at a time: without kernels that takes several fp32 copies of them."""


@dataclass
class _Copy:
    """What was made of the weights of some projections, and what they were then."""

    weight: Quantized
    state: Hashable
    storages: tuple[StorageWeakRef, ...]
    """Of those weights: while one is held weakly no other storage has its identity, though it may have its address."""
    projections: tuple[weakref.ref[nn.Module], ...]


_copies: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()
"""By the first of the projections."""


def quantized(
    operator: str,
    input: Tensor,
    projections: Sequence[nn.Module],
    *,
    norm: nn.Module | None = None,
    beside: Tensor | None = None,
) -> tuple[Quantized, Tensor | None] | None:
    """Return the weight `[ΣO_i, I]` of projections of `input` in 8 bits, and their bias `[ΣO_i]`.

    None where their own weights have to be used, so also where a `norm` or another operand, `beside`, is trained; why
    is counted for `operator`, a key of `REASONS`.
    """
    if backend.wants_gradient(beside) or (norm is not None and is_trained(norm)):
        backend.count_fallback(operator, "gradient", projections[0])
        return None
    if not backend.nothing_watches(input):
        return _traced(input, projections)
    parameters = packing.packed_parameters(input, projections)
    found = parameters if isinstance(parameters, str) else _copy_of(input, parameters[0], projections)
    if isinstance(found, str):
        backend.count_fallback(operator, found, projections[0])
        return None
    return found, parameters[1]  # type: ignore[return-value]


def _traced(input: Tensor, projections: Sequence[nn.Module]) -> tuple[Quantized, Tensor | None] | None:
    """Quantise inside what a compiler or tracer records: no copy outlives a call."""
    if packing.unsafe(input, projections) is not None:
        return None
    weights = [packing._parameter(projection, "weight") for projection in projections]
    biases = [projection._parameters["bias"] for projection in projections]
    if any(weight.dtype != input.dtype for weight in weights):
        return None
    return quantized_rows(torch.cat(weights)), _joined(weights, biases)


def _joined(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)])


def _copy_of(input: Tensor, weight: Tensor, projections: Sequence[nn.Module]) -> Quantized | str:
    if not weight.is_floating_point() or weight.dtype != input.dtype or weight.device != input.device:
        return "dtype"
    weight_copies.note()
    state = _state(projections)
    kept = _copies.get(projections[0])
    if kept is not None and kept.state == state:
        return kept.weight
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return "capturing"
    made = _made(weight, None if kept is None else kept.weight)
    storages = (StorageWeakRef(packing._parameter(p, "weight").untyped_storage()) for p in projections)
    _copies[projections[0]] = _Copy(made, state, tuple(storages), tuple(weakref.ref(p) for p in projections))
    return made


def _made(weight: Tensor, before: Quantized | None) -> Quantized:
    """Quantise a weight `[O, I]`, into the memory of `before` where that has its size: graphs go on reading there."""
    # Inference tensors could not be written again.
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach()
        fits = before is not None and before.values.shape == weight.shape and before.values.device == weight.device
        made = before if before is not None and fits else empty_rows(weight)
        parts = max(1, -(-weight.numel() // PART))
        for values, scale, rows in zip(
            made.values.chunk(parts), made.scale.chunk(parts), weight.chunk(parts), strict=True
        ):
            quantised = quantized_rows(rows)
            values.copy_(quantised.values)
            scale.copy_(quantised.scale)
    return made


def _state(projections: Sequence[nn.Module]) -> Hashable:
    """Return what changes when a weight does."""
    return tuple(
        (
            weight.untyped_storage()._cdata,
            weight.storage_offset(),
            weight.shape,
            version_of(weight),
        )
        for weight in [packing._parameter(projection, "weight") for projection in projections]
    )


def refresh(model: nn.Module) -> None:
    """Make the copies of weights that have changed anew, before a graph reads them."""
    for module in model.modules():
        kept = _copies.get(module)
        if kept is None:
            continue
        projections = [projection() for projection in kept.projections]
        if all(projection is not None for projection in projections):
            weights = [packing._parameter(p, "weight") for p in projections if p is not None]
            whole = None if kept.state == _state(projections) else joined_storage.joined(weights)  # type: ignore[arg-type]
            if whole is not None:
                _copy_of(weights[0], whole, projections)  # type: ignore[arg-type]
        aiter_fp8.renew(_copies[module].weight.values)


def forget(model: nn.Module) -> None:
    """Drop the copies of a model; the next use makes them anew, and graphs that read them must not be replayed."""
    for module in model.modules():
        _copies.pop(module, None)


def nbytes(model: nn.Module) -> int:
    """Return the bytes that the copies of a model take."""
    kept = [_copies[module].weight for module in model.modules() if module in _copies]
    return sum(weight.values.nbytes + weight.scale.nbytes for weight in kept)


def describe(model: nn.Module) -> list[str]:
    """Return a line for `explain`."""
    count = sum(module in _copies for module in model.modules())
    return [f"fp8: copies of {count} weights, {nbytes(model) / 2**20:.1f} MiB"] if count else []
