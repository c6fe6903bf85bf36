"""Whether two runs of a forward gave the same."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from ..core import backend
from ..core.rounding_noise import Trace, Yardstick
from .call_structure import form_of
from .forward_graph import Unsuitable

TOLERANCES = {torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest relative distance of an output of a graph, by dtype: in a capture transformers makes masks that it leaves
out otherwise, and attention with a mask rounds in another order. Where the forward can be run again, rounding has to
explain what is more than one unit in the last place (`core.rounding_noise`)."""
TOLERANCE = 1e-3
"""The same for wider dtypes."""
LEAST = 64
"""Numbers of an output whose distance tells more than chance."""


def compare(wanted: list[Tensor], found: list[Tensor], again: Callable[[], Any] | None = None) -> None:
    """Compare tensors of the same shapes one by one.

    Args:
        wanted: outputs of a forward.
        found: those of its graph.
        again: runs the forward once more.

    Raises:
        Unsuitable: if two are further apart than rounding in another order takes them.
    """
    beyond = False
    for tensor, other in zip(wanted, found, strict=True):
        if (distance := distance_of(tensor, other)) > TOLERANCES.get(tensor.dtype, TOLERANCE):
            raise Unsuitable("differs", f"by {distance:.3g}")
        beyond = beyond or (_is_asked(tensor) and distance > torch.finfo(tensor.dtype).eps)
    if not beyond or again is None:
        return

    def once_more() -> Trace:
        with torch.no_grad(), backend.plainly():
            return _trace(tensors_in(again()))

    verdict = Yardstick(_trace(wanted), once_more).judge(_trace(found))
    if not verdict.holds:
        raise Unsuitable("differs", str(verdict))


def _trace(outputs: list[Tensor]) -> Trace:
    """Return outputs of 16 bits, each as one row."""
    return {f"output {number}": tensor.reshape(1, -1) for number, tensor in enumerate(outputs) if _is_asked(tensor)}


def _is_asked(tensor: Tensor) -> bool:
    return tensor.dtype in TOLERANCES and tensor.numel() >= LEAST


def compare_positions(wanted: Tensor, found: Tensor, dims: Collection[int]) -> None:
    """Compare two tensors at each place of some dimensions by itself, relative to its size or the mean size there.

    Raises:
        Unsuitable: if they are further apart in one than rounding in another order takes them.
    """
    if not wanted.is_floating_point() or not wanted.numel():
        return
    finite = wanted.isfinite()
    wide = torch.float64 if wanted.itemsize > 4 else torch.float32
    one, other = (torch.where(finite, tensor, 0).to(wide) for tensor in (wanted, found))
    rest = [dim for dim in range(wanted.dim()) if dim not in dims]
    norms, apart = (tensor.square().sum(rest).sqrt() if rest else tensor.abs() for tensor in (one, one - other))
    worst = (apart / norms.clamp(min=max(norms.mean().item(), torch.finfo(wide).tiny))).max().item()
    if worst > TOLERANCES.get(wanted.dtype, TOLERANCE):
        raise Unsuitable("differs", f"at one position by {worst:.3g}")


def distance_of(expected: Tensor, found: Tensor) -> float:
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


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether every number is the same; NaN is the same as NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of something that has a form."""
    found: list[Tensor] = []
    form_of(value, found)
    return found
