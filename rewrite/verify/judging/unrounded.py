"""The original without the roundings to fp32 that it makes inside: what they cost tells how far two orders may be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .compare import Observations, measure
from .tolerances import bound


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """Take fp64 wherever torch is asked for fp32: norms, softmax and RoPE cast their input in every dtype."""
    import torch
    from torch.overrides import TorchFunctionMode

    def wider(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Wider(TorchFunctionMode):
        def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})

    with Wider():
        yield


def only_rounds(expected: Observations, found: Observations, truth: Observations) -> bool:
    """Return whether two fp64 runs differ by sums in fp32 alone: by as much as the original is off itself.

    One tensor of a short text is a sample of a few rows, so the errors of all that differ are taken together.

    Args:
        expected: of the original.
        found: of the rewritten model.
        truth: the original's without its roundings to fp32.
    """
    if not expected.keys() == found.keys() == truth.keys():
        return False
    new, own = 0.0, 0.0
    for name, tensor in expected.items():
        if not tensor.shape == found[name].shape == truth[name].shape:
            return False
        error = measure(name, tensor, found[name])
        if error.relative_max > bound("fp32 max"):
            return False
        if error.relative_rms > bound("fp64 rms"):
            new += error.relative_rms**2
            own += measure(name, truth[name], tensor).relative_rms ** 2
    return new <= bound("fp64 roundings") ** 2 * own
