"""The original without the roundings to fp32 that it makes inside: what they cost tells how far two orders may be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from .compare import Observations, measure
from .tolerances import bound

PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d")
"""Functions that take operands of one dtype, where elementwise ones promote."""


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """Take fp64 wherever torch is asked for fp32: norms, softmax and RoPE cast their input in every dtype.

    Weights that a model keeps in fp32 whatever its dtype are widened where a product of them is taken.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def wider(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value

    class Wider(TorchFunctionMode):
        is_captured_along = True  # each of these runs has models of its own

        def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            args, kwargs = [wider(one) for one in args], {name: wider(one) for name, one in (kwargs or {}).items()}
            operands = (getattr(one, "dtype", None) for one in (*args, *kwargs.values()))
            if getattr(func, "__name__", "") in PRODUCTS and torch.float64 in operands:
                args, kwargs = map(widened, args), {name: widened(one) for name, one in kwargs.items()}
            return func(*args, **kwargs)

    with Wider():
        yield


@dataclass(frozen=True)
class Roundings:
    """Sums of squared relative RMS errors: between two sides in fp64, and of the original by its roundings to fp32."""

    between: float
    own: float
    names: frozenset[str]
    """Of the outputs that differ."""

    def __add__(self, other: Roundings) -> Roundings:
        return Roundings(self.between + other.between, self.own + other.own, self.names)

    @property
    def alone(self) -> bool:
        """Whether the two sides differ by sums in fp32 alone: by as much as the original is off itself."""
        return self.between <= bound("fp64 roundings") ** 2 * self.own

    def __str__(self) -> str:
        own = self.own**0.5
        return f"the original's own roundings to fp32 make {own:.3g}, the two differ by {self.between**0.5:.3g}"


def roundings(
    expected: Observations, found: Observations, truth: Observations, names: Collection[str] | None = None
) -> Roundings | None:
    """Return the errors of two fp64 runs that sums in fp32 may make; None where they differ by more or in shape.

    One tensor of a short text is a sample of a few rows, so the errors of all that differ are taken together.

    Args:
        expected: of the original.
        found: of the rewritten model.
        truth: the original's without its roundings to fp32.
        names: of the outputs that count; by default those that differ by more than fp64 explains.
    """
    if not expected.keys() == found.keys() == truth.keys():
        return None
    between, own, counted = 0.0, 0.0, []
    for name, tensor in expected.items():
        if not tensor.shape == found[name].shape == truth[name].shape:
            return None
        error = measure(name, tensor, found[name])
        if error.relative_max > bound("fp32 max"):
            return None
        if error.relative_rms > bound("fp64 rms") if names is None else name in names:
            between += error.relative_rms**2
            own += measure(name, truth[name], tensor).relative_rms ** 2
            counted.append(name)
    return Roundings(between, own, frozenset(counted))


def only_rounds(expected: Observations, found: Observations, truth: Observations) -> bool:
    """Return whether two fp64 runs differ by sums in fp32 alone; the arguments are those of `roundings`."""
    found_errors = roundings(expected, found, truth)
    return found_errors is not None and found_errors.alone
