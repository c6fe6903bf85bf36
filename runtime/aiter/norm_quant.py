"""aiter's residual add and RMSNorm whose rows it quantises in the same pass, in place of `fp8_add_rms_norm`.

N rows, H hidden size, Q the largest number of the chip's e4m3:

    summed = residual + x      normed = weight * cast(rms(summed))      values = e4m3(normed / s), s = max|normed| / Q

Of aiter's kernels that do this only `rmsnorm2d_fwd_with_add_smoothquant` also writes `normed` in 16 bits, which others
read than products in 8 bits; its factors of columns are ones here. Its scale is no power of two, as it is elsewhere in
`--with fp8`: rows are rounded otherwise than by plain torch's definition, by no more. So it has to be named
(`REWRITE_AITER_ON=add_rmsnorm_quant`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import aiter_probe
from ..launching.launch import fp8_dtype
from . import aiter_calls
from .aiter_norms import RMSReference, as_rows, rows_and_weight, sum_refusal

_TENSORS = ("out", "input", "residual_in", "residual_out", "xscale", "yscale", "weight")
_KEYWORDS = ("epsilon", "out_before_quant", "use_model_sensitive_rmsnorm")


class Rows(NamedTuple):
    """What is made of rows `[..., H]`."""

    normed: Tensor
    summed: Tensor
    values: Tensor
    """In the chip's e4m3."""
    scale: Tensor
    """`[...]` in fp32."""


def add_rms_norm(
    hidden_states: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
    reference: RMSReference,
) -> Rows | None:
    """Return `fp8_add_rms_norm` by aiter; None, with a counted reason, where the bundled form is to run."""
    if not aiter_calls.chosen("add_rmsnorm_quant", hidden_states):
        return None
    reason = sum_refusal(hidden_states, residual, weight, bool(offset or weight_in_fp32))
    if reason is not None or weight is None:
        aiter_calls.refuse("add_rmsnorm_quant", reason or "weight")
        return None
    function = aiter_calls.function("add_rmsnorm_quant", "rmsnorm2d_fwd_with_add_smoothquant", _TENSORS, _KEYWORDS)
    if function is None:
        return None
    form = fp8_dtype(aiter_probe.chip(hidden_states.device) or "")

    def call(x: Tensor, other: Tensor, scale: Tensor) -> Rows:
        normed, summed, values = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x, dtype=form)
        row_scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)
        ones = _ones(x.shape[1], x.device)
        function(
            values, x, other, summed, ones, row_scale, scale,
            epsilon=eps, out_before_quant=normed, use_model_sensitive_rmsnorm=1,
        )  # fmt: skip
        return Rows(normed, summed, values, row_scale)

    def proof() -> bool:
        x, scale = rows_and_weight(hidden_states)
        other = x.flip(0)
        return _holds(call(x, other, scale), other + x, reference(other + x, scale, eps, offset, weight_in_fp32))

    shape = hidden_states.shape
    variant = (hidden_states.dtype, hidden_states.device, shape[-1])
    rows, others = as_rows(hidden_states), as_rows(residual)
    found = aiter_calls.run("add_rmsnorm_quant", hidden_states, variant, lambda: call(rows, others, weight), proof)
    if found is None:
        return None
    normed, summed, values = (each.view(shape) for each in found[:3])
    return Rows(normed, summed, values, found.scale.view(shape[:-1]))


def _holds(found: Rows, summed: Tensor, normed: Tensor) -> bool:
    """Return whether sum and norm are the reference's, and the rows in 8 bits the norm's nearest, by their largest."""
    if not (torch.equal(found.summed, summed) and aiter_calls.mostly_equal(found.normed, normed)):
        return False
    largest = normed.float().abs().amax(-1, keepdim=True)
    scaled = (found.scale * torch.finfo(found.values.dtype).max / largest - 1).abs() <= 0.01
    near = (found.values.float() * found.scale - normed.float()).abs() <= 0.04 * largest
    return bool(scaled.all() & near.all())


@functools.cache
def _ones(size: int, device: torch.device) -> Tensor:
    """Return the factors of columns; the proof makes them, before any capture."""
    with torch.inference_mode(False):
        return torch.ones(size, dtype=torch.float32, device=device)
