"""The products of a layer with weights in 8 bits: what the transform `fp8` writes instead of the calls of `linear`.

I in_features, O out_features, N rows, W ≈ s_w q_w as in `device.e4m3`:

    one token a sequence, up to 16 sequences    y = x (s_w q_w)ᵀ + b                 the input keeps its 16 bits
    everything else                             y = s_x s_w (q_x q_wᵀ) + b           its rows are quantised too

A decode step reads weights and little else, so half the bytes are half the time; a prompt is bound by arithmetic, and
only products of two 8-bit operands run at twice the speed. The first form does not depend on how many tokens the
prompt had, nor the second on how many were generated before.

Where a weight cannot be quantised (`fp8_weights.REASONS`: gradients, hooks, adapters …) the call of the same name in
`linear`, `packing` or `add_norm` runs, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..device.e4m3 import Quantized
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import HIP
from ..linear.gated_activation import activation_kind, gated_activation
from ..linear.linear import before, gated_linear, is_one_row, linear, takes_few_rows
from ..linear.packing import packed_linear
from ..linear.prologue import Norm
from .fp8_gated_activation import quantized_gated_activation
from .fp8_gemv import MOST_ROWS, few_rows, gated
from .fp8_rows import quantized_rows
from .fp8_weights import quantized
from .product import fp8_product


def fp8_linear(
    input: Tensor,
    projection: nn.Module,
    *,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return `projection(norm(input)) + residual` with the weight in 8 bits; arguments as of `linear`."""
    found = quantized("fp8_linear", input, (projection,), norm=norm, beside=residual)
    if found is None:
        return linear(input, projection, norm=norm, residual=residual, **keywords)
    return fp8_affine(input, *found, norm=norm, residual=residual)


def fp8_packed_linear(input: Tensor, *projections: nn.Module) -> tuple[Tensor, ...]:
    """Return `tuple(projection(input) for projection in projections)` with weights in 8 bits, as one product."""
    found = quantized("fp8_packed_linear", input, projections)
    if found is None:
        return packed_linear(input, *projections)
    sizes = [projection.out_features for projection in projections]
    return fp8_affine(input, *found).split_with_sizes(sizes, -1)  # type: ignore[arg-type]


def fp8_gated_linear(
    input: Tensor,
    projections: Sequence[nn.Module],
    activation: Callable[[Tensor], Tensor],
    *,
    norm: nn.Module | None = None,
    **keywords: Any,
) -> Tensor:
    """Return `activation(gate(norm(input))) * up(norm(input))` with weights in 8 bits; see `gated_linear`."""
    found = quantized("fp8_gated_linear", input, projections, norm=norm)
    if found is None:
        return gated_linear(input, projections, activation, norm=norm, **keywords)
    weight, bias = found
    kind = activation_kind(activation)
    if kind is not None and is_step(input) and _kernels_take(input, bias, None) and is_one_row(input):
        x, prologue = before(input, norm)
        return gated(x, weight, bias, kind, prologue)
    gate, up = fp8_affine(input, weight, bias, norm=norm).chunk(2, dim=-1)
    return gated_activation(gate, up, activation)


def fp8_gated_product(
    gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], projection: nn.Module
) -> Tensor:
    """Return `projection(activation(gate) * up)` with the weight in 8 bits; arguments as of `gated_activation`."""
    found = None if is_step(gate) else quantized("fp8_gated_product", gate, (projection,), beside=up)
    kind = activation_kind(activation)
    if found is None or kind is None:
        return fp8_linear(gated_activation(gate, up, activation), projection)
    return fp8_product(quantized_gated_activation(gate, up, kind), *found, gate.dtype)


def is_step(input: Tensor) -> bool:
    """Return whether `input` `[…, 1, I]` is one token a sequence, of up to 16 sequences."""
    return input.dim() > 1 and input.shape[-2] == 1 and input.numel() <= MOST_ROWS * input.shape[-1]


def fp8_affine(
    input: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    *,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return `norm(input) Wᵀ + bias + residual` for a weight in 8 bits, in the form that the input's shape has."""
    if is_step(input):
        if _kernels_take(input, bias, residual):
            x, prologue = _before(input, norm)
            return few_rows(x, weight, bias, prologue, residual)
        x = input if norm is None else norm(input)
        output = F.linear(x, weight.dequantized(x.dtype), bias)
    else:
        x = input if norm is None else norm(input)
        output = fp8_product(quantized_rows(x), weight, bias, x.dtype)
    return output if residual is None else residual + output


def _before(input: Tensor, norm: nn.Module | None) -> tuple[Tensor, Norm | None]:
    """Return `before`; on AMD's chips several rows are normed in a launch of their own.

    Inside a product each program would norm and round all rows anew for its 32 rows of the weight: 5.6 vector
    operations for a byte of the weight in place of 1.3 (compiled for gfx942, 8 rows, QKV of an 8B Llama).
    """
    if HIP and norm is not None and not is_one_row(input):
        return norm(input), None
    return before(input, norm)


def _kernels_take(input: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    others = [tensor for tensor in (bias, residual) if tensor is not None]
    fit = all(tensor.dtype in KERNEL_DTYPES and tensor.device == input.device for tensor in others)
    # The kernels write the input's dtype, and read a residual row by row.
    added = residual is None or (residual.dtype == input.dtype and residual.shape[:-1] == input.shape[:-1])
    return fit and added and takes_few_rows(input)
