"""aiter's tuned GEMM, which looks a product up by its exact shape in a table and calls what was fastest there.

M rows, K columns of the input, N of the output. Without a table of the user's it has entries for some chips only, and
everything else is torch's own product with a detour; so it runs where a table is given (`AITER_CONFIG_GEMM_BF16`, read
when aiter is imported) or on gfx950, for which aiter brings one.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import aiter_probe
from . import aiter_calls
from .aiter_norms import DTYPES

TABLE = "AITER_CONFIG_GEMM_BF16"


def mm(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return `input @ weight.T + bias` by aiter; None, with a counted reason, where torch's own product is to run.

    Call it inside an operator of one's own: it makes no promise to a compiler.

    Args:
        input: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]`, or None.

    Returns:
        `[..., N]` in the input's dtype, contiguous.
    """
    if not aiter_calls.chosen("gemm", input):
        return None
    reason = _refusal(input, weight, bias)
    if TABLE not in os.environ and aiter_probe.chip(input.device) != "gfx950":
        reason = "untuned"
    if reason is not None:
        aiter_calls.refuse("gemm", reason)
        return None
    function = aiter_calls.function("gemm", "tgemm.mm", ("inp", "weights"), ("bias",), "aiter.tuned_gemm")
    if function is None:
        return None
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    shape = (rows.shape[0], weight.shape[0])

    def call() -> Tensor | None:
        found: Any = function(rows, weight, bias=bias)
        return found if aiter_calls.is_result(found, shape, rows) else None

    def proof() -> bool:
        found = call()
        return found is not None and near(found, F.linear(rows, weight, bias))

    # The table has exact and padded numbers of rows: each may have another kernel.
    variant = (rows.dtype, rows.device, *shape, rows.shape[1], bias is not None)
    product = aiter_calls.run("gemm", input, variant, call, proof)
    return None if product is None else product.contiguous().view(*input.shape[:-1], weight.shape[0])


def near(found: Tensor, own: Tensor) -> bool:
    """Return whether a product is torch's to 1% of the largest element: both round to 16 bits."""
    apart = (found.float() - own.float()).abs().max()
    return bool(torch.isfinite(found).all() & (apart <= 0.01 * own.float().abs().max()))


def _refusal(input: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if input.dtype not in DTYPES or any(t is not None and t.dtype != input.dtype for t in (weight, bias)):
        return "dtype"
    if input.numel() == 0 or weight.numel() == 0:
        return "empty"
    shaped = weight.ndim == 2 and weight.shape[1] == input.shape[-1] and weight.is_contiguous()
    if bias is not None:
        shaped = shaped and bias.shape == weight.shape[:1] and bias.is_contiguous()
    plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in (weight, bias) if t is not None)
    same = all(t is None or t.device == input.device for t in (weight, bias))
    aligned = not weight.data_ptr() % 16 and not weight.shape[1] % 8
    return None if shaped and plain and same and aligned else "layout"
