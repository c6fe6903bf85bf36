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
    """Return whether two fp64 runs differ by sums in fp32 alone: each tensor by what the original is off itself.

    Args:
        expected: of the original.
        found: of the rewritten model.
        truth: the original's without its roundings to fp32.
    """
    if not expected.keys() == found.keys() == truth.keys():
        return False
    for name, tensor in expected.items():
        if not tensor.shape == found[name].shape == truth[name].shape:
            return False
        error = measure(name, tensor, found[name])
        if error.relative_max > bound("fp32 max"):
            return False
        if error.relative_rms > bound("fp64 rms"):
            own = measure(name, truth[name], tensor)
            if error.relative_rms > bound("fp64 roundings") * own.relative_rms:
                return False
    return True
