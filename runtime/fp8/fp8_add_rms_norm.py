"""Residual add, RMSNorm, and its rows in 8 bits, in one pass over memory.

N is any leading shape, H the hidden size, `s` as in `device.e4m3`:

    summed = residual + hidden_states             as `add_rms_norm` has it
    normed = rms_norm(summed, weight, eps)        as `add_rms_norm` has it
    values[n] = e4m3(normed[n] / s[n])            of the rounded rows: the bits that quantising `normed` later gives
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..aiter import norm_quant as aiter_norm_quant
from ..core import backend
from ..device import row_tiles
from ..device.e4m3 import Quantized, dtype_for, quantize
from ..launching.launch import Kernel
from ..linear.prologue import prologue_of
from ..norms.add_norm import add_norm
from ..norms.add_rms_norm import empty_sum, sum_refusal
from ..norms.rms_norm import reference as norm_reference
from ..norms.rms_norm import refusal as norm_refusal
from ..norms.rms_norm import result_dtype
from .fp8_gemv import MOST_ROWS
from .fp8_rows import converts, empty_rows, remember

CASES = """
def normed(size):
    return _op(tensor(PROMPT, size), tensor(PROMPT, size), tensor(size), EPS, 0.0, False)

case("8B, prompt", normed, LLAMA_8B.hidden_size)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.e4m3 import encode, magnitude, scale_of
    from ..norms.rms_norm import _load, _scale

    @triton.jit(do_not_specialize=["row_count"])
    def _fp8_add_rms_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        residual_ptr,
        weight_ptr,
        out_ptr,
        sum_ptr,
        code_ptr,
        scale_ptr,
        row_count,
        stride,
        residual_stride,
        eps,
        offset,
        H: tl.constexpr,
        WEIGHTED: tl.constexpr,
        WEIGHT_IN_FP32: tl.constexpr,
        FNUZ: tl.constexpr,
        CONVERT: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        live = row < row_count
        x_row = x_ptr + row.to(tl.int64) * stride
        residual_row = residual_ptr + row.to(tl.int64) * residual_stride
        at = row.to(tl.int64) * H
        col = tl.arange(0, BLOCK_COLS)[None, :]
        mask = live & (col < H)
        if WEIGHTED:
            weight = tl.load(weight_ptr + col, mask=col < H, other=0.0)
        x = _load(x_row, residual_row, sum_ptr + at, col, mask, True, True).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / H + eps)
        normed = x * rstd
        if WEIGHTED:
            normed = _scale(normed, weight, offset, sum_ptr.dtype.element_ty, WEIGHT_IN_FP32)
        rounded = normed.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at + col, rounded, mask=mask)
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        scale, inverse = scale_of(tl.max(magnitude(wide), axis=1, keep_dims=True), FNUZ)
        tl.store(code_ptr + at + col, encode(wide * inverse, FNUZ, CONVERT), mask=mask)
        tl.store(scale_ptr + row, scale, mask=live)

    fp8_add_rms_norm_kernel = Kernel(_fp8_add_rms_norm_kernel)


def fp8_add_norm(hidden_states: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return `(norm(summed), summed)` with `summed = residual + hidden_states`, as `add_norm` does.

    Where the norm is an RMSNorm that a kernel computes, the normed rows are remembered in 8 bits
    (`fp8_rows.remember`), for the products that read them.
    """
    prologue = prologue_of(norm)
    few = hidden_states.numel() <= MOST_ROWS * hidden_states.shape[-1]
    if prologue is None or few or backend.wants_gradient(hidden_states, residual, prologue.weight):
        return add_norm(hidden_states, residual, norm)
    normed, summed, values, scale = _op(hidden_states, residual, *prologue)
    if backend.nothing_watches(hidden_states):
        remember(normed, Quantized(values, scale))
    return normed, summed


def _forward(
    hidden_states: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, weight_in_fp32: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = aiter_norm_quant.add_rms_norm(hidden_states, residual, weight, eps, offset, weight_in_fp32, norm_reference)
    if found is not None:
        return found
    if hidden_states.numel() and backend.uses_triton(hidden_states):
        reason = norm_refusal(hidden_states, weight) or sum_refusal(hidden_states, residual)
        if reason is None and hidden_states.shape[-1] > row_tiles.MAX_BLOCK_COLS:
            reason = "wide_rows"
        if reason is None:
            return _launch(hidden_states, residual, weight, eps, offset, weight_in_fp32)
        backend.count_fallback("fp8_add_rms_norm", reason)
    summed = residual + hidden_states
    normed = norm_reference(summed, weight, eps, offset, weight_in_fp32).contiguous()
    quantized = quantize(normed, dtype_for(normed)) if normed.shape[-1] else empty_rows(normed)
    return normed, summed.contiguous(), quantized.values.contiguous(), quantized.scale.contiguous()


def _launch(
    hidden_states: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, weight_in_fp32: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, summed, values, scale = _fake(hidden_states, residual, weight, eps, offset, weight_in_fp32)
    hidden_size = summed.shape[-1]
    row_count = summed.numel() // hidden_size
    x, stride = row_tiles.flatten(hidden_states)
    residual, residual_stride = row_tiles.flatten(residual)
    weight = None if weight is None else weight.contiguous()
    block_rows, block_cols, num_warps = row_tiles.tile(hidden_size, row_count)
    with backend.device_guard(summed):
        fp8_add_rms_norm_kernel.launch(
            (-(-row_count // block_rows), 1, 1),
            num_warps,
            (x, residual, x if weight is None else weight, normed, summed, values.view(torch.uint8), scale),
            (row_count,),
            (stride, residual_stride),
            (eps, offset),
            (
                hidden_size, weight is not None, weight_in_fp32, values.dtype == torch.float8_e4m3fnuz,
                converts(values), block_rows, block_cols,
            ),
        )  # fmt: skip
    return normed, summed, values, scale


def _fake(
    hidden_states: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, weight_in_fp32: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = empty_sum(hidden_states, residual)
    normed = torch.empty_like(summed, dtype=result_dtype(summed.dtype, weight, weight_in_fp32))
    return (normed, summed, *empty_rows(normed))


_op = backend.register(
    "fp8_add_rms_norm",
    "(Tensor hidden_states, Tensor residual, Tensor? weight, float eps, float offset, bool weight_in_fp32)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
)
