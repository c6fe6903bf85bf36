"""The original without the roundings to fp32 that it makes inside: what they cost tells how far two orders may be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .compare import Mismatch, measure
from .tolerances import bound

if TYPE_CHECKING:
    from torch import Tensor


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


def only_rounds(mismatch: Mismatch, expected: Tensor, truth: Tensor) -> bool:
    """Return whether a difference of two fp64 runs is one of sums in fp32, as large as the original makes it itself.

    Args:
        mismatch: of the runs.
        expected: what the original gave.
        truth: the same without its roundings to fp32.
    """
    if expected.shape != truth.shape or float(mismatch.figures.get("max", "inf")) > bound("fp32 max"):
        return False
    own = measure("logits", truth, expected).relative_rms
    return float(mismatch.figures.get("rms", "inf")) <= bound("fp64 roundings") * own
