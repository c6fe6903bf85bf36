"""Weights in the order that aiter's assembly kernels read, written and read by aiter.

A weight that `shuffle_weight` returns carries an attribute by which aiter's GEMM knows it; where that is lost, or the
kernel reads another order, the product differs from torch's and is off for the process (`aiter_calls.run`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..core import backend
from . import aiter_calls
from .aiter_gemm import near

LAYOUT = (16, 16)


def shuffle(weight: Tensor, operator: str = "gemm") -> Tensor | None:
    """Return a copy of a weight `[…, N, K]` in that order; None, with a counted reason, where aiter has none."""
    if not aiter_calls.chosen(operator, weight):
        return None
    function = aiter_calls.function(operator, "shuffle_weight", ("x",), ("layout",), "aiter.ops.shuffle")
    if function is None:
        return None
    with backend.device_guard(weight):
        found: Any = function(weight, layout=LAYOUT)
    return found if aiter_calls.is_result(found, tuple(weight.shape), weight) else None


def multiply(input: Tensor, shuffled: Tensor, weight: Tensor) -> Tensor | None:
    """Return `input @ weight.T` from the copy; None, with a counted reason, where it cannot be had.

    Args:
        input: `[..., K]`.
        shuffled: what `shuffle` returned for the weight.
        weight: `[N, K]`, for the comparison with torch at the first product of a size.
    """
    if not aiter_calls.chosen("gemm", input):
        return None
    function = aiter_calls.function("gemm", "tgemm.mm", ("inp", "weights"), ("bias",), "aiter.tuned_gemm")
    if function is None:
        return None
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    shape = (rows.shape[0], weight.shape[0])

    def call() -> Tensor | None:
        found: Any = function(rows, shuffled, bias=None)
        return found if aiter_calls.is_result(found, shape, rows) else None

    def proof() -> bool:
        found = call()
        return found is not None and near(found, F.linear(rows, weight))

    variant = ("preshuffled", rows.dtype, rows.device, *shape, rows.shape[1])
    product = aiter_calls.run("gemm", input, variant, call, proof)
    return None if product is None else product.contiguous().view(*input.shape[:-1], weight.shape[0])
