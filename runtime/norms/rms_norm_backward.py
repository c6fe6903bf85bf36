"""The gradients of RMSNorm, alone and behind a residual add, in one pass over memory.

N rows, H the hidden size, x what was normalised, g the gradient of the result, s that of the sum behind it, if any:

    r = rsqrt(mean(x²) + eps),   n = x r,   u = g * (weight + offset)
    dx = r (u - n mean(u n)) + s
    dweight = Σ_rows g n                 n rounded as the norm rounds it before the product with the weight

All in fp32. Nothing but x and the weight is kept for it: a row that is read for the gradient gives r again. Each
program walks over some rows and adds up its part of `dweight`; the parts are summed at the end.
"""

from __future__ import annotations

import torch

from ..core import backend
from ..device import row_tiles
from ..launching.launch import Kernel

CASES = """
def gradients(size, add=False, rows=PROMPT, **rounding):
    x, weight = tensor(rows, size), tensor(size)
    after = tensor(rows, size) if add else None
    rms_norm_backward(tensor(rows, size), after, x, weight, EPS, True, **rounding)

for model in LLAMAS:
    case(model.name, gradients, model.hidden_size)
case("8B, adds", gradients, LLAMA_8B.hidden_size, True)
case("Gemma 9B", gradients, GEMMA_9B.hidden_size, offset=1.0, weight_in_fp32=True)
case("Qwen3, heads", gradients, QWEN3_30B.head_dim, rows=PROMPT * QWEN3_30B.heads)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["row_count"])
    def _rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr,
        after_ptr,
        x_ptr,
        weight_ptr,
        out_ptr,
        parts_ptr,
        row_count,
        inner,
        outer_stride,
        inner_stride,
        eps,
        offset,
        H: tl.constexpr,
        ADD: tl.constexpr,
        WEIGHTED: tl.constexpr,
        WEIGHT_IN_FP32: tl.constexpr,
        FOR_WEIGHT: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        col = tl.arange(0, BLOCK_COLS)[None, :]
        of_weight = tl.zeros((1, BLOCK_COLS), tl.float32)
        if WEIGHTED:
            weight = tl.load(weight_ptr + col, mask=col < H, other=0.0)
            shifted = weight.to(tl.float32) + offset
            if not WEIGHT_IN_FP32:
                shifted = shifted.to(weight.dtype).to(tl.float32)
        for first in range(tl.program_id(0) * BLOCK_ROWS, row_count, tl.num_programs(0) * BLOCK_ROWS):
            row = first + tl.arange(0, BLOCK_ROWS)[:, None]
            mask = (row < row_count) & (col < H)
            place = row.to(tl.int64) * H + col
            x_row = x_ptr + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
            x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / H + eps)
            normed = x * rstd
            scaled = gradient
            if WEIGHTED:
                scaled = gradient * shifted
            if FOR_WEIGHT:
                factor = normed
                if not WEIGHT_IN_FP32:
                    factor = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
                of_weight += tl.sum(gradient * factor, axis=0, keep_dims=True)
            out = rstd * (scaled - normed * (tl.sum(scaled * normed, axis=1, keep_dims=True) / H))
            if ADD:
                out += tl.load(after_ptr + place, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)
        if FOR_WEIGHT:
            tl.store(parts_ptr + tl.program_id(0) * H + col, of_weight, mask=col < H)

    rms_norm_backward_kernel = Kernel(_rms_norm_backward_kernel)


def refusal(hidden_states: torch.Tensor) -> str | None:
    """Return why the kernel does not take rows of these, besides what the forward's kernel refuses; or None."""
    if hidden_states.shape[-1] > row_tiles.MAX_BLOCK_COLS:
        return "wide"
    return None if hidden_states.numel() and row_tiles.order(hidden_states) == () else "layout"


def rms_norm_backward(
    gradient: torch.Tensor,
    after: torch.Tensor | None,
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    for_weight: bool,
    *,
    offset: float = 0.0,
    weight_in_fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of what was normalised, `[N, H]` in its dtype, and of the weight, where it is wanted.

    Args:
        gradient: `[N, H]`, of the norm.
        after: `[N, H]`, of the sum that was normalised, where something else reads it.
        hidden_states: `[N, H]`, what was normalised.
        weight: `[H]`, or None.
        eps: as in `rms_norm`, and so are the others.
        for_weight: whether the weight's is wanted.
        offset: added to the weight.
        weight_in_fp32: whether the weight is multiplied before the result is rounded.
    """
    hidden_size = hidden_states.shape[-1]
    row_count = hidden_states.numel() // hidden_size
    x, inner, outer_stride, inner_stride = row_tiles.collapse(hidden_states)
    gradient = gradient.contiguous()
    adds = after is not None  # it may be the very tensor that the norm's gradient is: that of `normed + summed`
    after = gradient if after is None else after.contiguous()
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    block_rows, block_cols, num_warps = row_tiles.tile(hidden_size, row_count)
    programs = row_tiles.programs(out, -(-row_count // block_rows))
    for_weight = for_weight and weight is not None
    parts = torch.empty((programs if for_weight else 1, hidden_size), dtype=torch.float32, device=out.device)
    with backend.device_guard(out):
        rms_norm_backward_kernel.launch(
            (programs, 1, 1),
            num_warps,
            (gradient, after, x, x if weight is None else weight.contiguous(), out, parts),
            (row_count,),
            (inner, outer_stride, inner_stride),
            (eps, offset),
            (
                hidden_size, adds, weight is not None, weight_in_fp32, for_weight, block_rows, block_cols,
            ),
        )  # fmt: skip
    return out, parts.sum(0).to(weight.dtype) if for_weight and weight is not None else None
