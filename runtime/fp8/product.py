"""The product of rows and a weight that are both in 8 bits, with an fp32 scale for each row of either.

    y[n, o] = s_x[n] s_w[o] Σ_i q_x[n, i] q_w[o, i] + b[o]

`torch._scaled_mm` where the chip multiplies 8-bit floats (NVIDIA from compute capability 8.9, MI300, MI350) and the
result is bf16; elsewhere the same product of what the 8 bits stand for, which is exact in bf16, fp32 and fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..aiter import aiter_fp8
from ..core import backend
from ..device.e4m3 import Quantized, has_fp8

FAST_SUMS = False
"""Whether NVIDIA's tensor cores may keep partial sums in fewer bits than fp32."""


def fp8_product(rows: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the product.

    Args:
        rows: `[N, I]` with scales `[N]`.
        weight: `[O, I]` with scales `[O]`.
        bias: `[O]`, or None.
        dtype: of the result.

    Returns:
        `[N, O]`.
    """
    output: Tensor = _op(rows.values, rows.scale, weight.values, weight.scale, bias, dtype)
    return output


def _forward(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if dtype == torch.bfloat16 and (bias is None or bias.dtype == dtype):
        if (found := aiter_fp8.product(values, scale, weight, weight_scale, bias)) is not None:
            return found
    native = values.is_cuda and backend.uses_triton(values)
    refusal = _refusal(values, weight, bias, dtype) if native else None
    if native and refusal is None and values.numel():
        output = torch._scaled_mm(
            values.reshape(-1, values.shape[-1]),
            weight.t(),
            scale_a=scale.reshape(-1, 1),
            scale_b=weight_scale.view(1, -1),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=FAST_SUMS,
        )
        return output.view(*values.shape[:-1], weight.shape[0])
    if refusal is not None:
        backend.count_fallback("fp8_product", refusal)
    rows = Quantized(values, scale).dequantized(dtype)
    return F.linear(rows, Quantized(weight, weight_scale).dequantized(dtype), bias)


def _refusal(values: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return why torch's product of 8-bit rows does not take these, or None if it does."""
    if not has_fp8(values):
        return "chip_without_fp8"
    if dtype != torch.bfloat16 or (bias is not None and bias.dtype != dtype):
        return "dtype"
    return None if weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0 else "not_a_multiple_of_16"


def _fake(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return values.new_empty((*values.shape[:-1], weight.shape[0]), dtype=dtype)


_op = backend.register(
    "fp8_product",
    "(Tensor values, Tensor scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    _forward,
    _fake,
)
