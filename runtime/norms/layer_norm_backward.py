"""The gradients of LayerNorm, alone and behind a residual add, in one pass over memory.

N rows, H the hidden size, G the rows of an N-D weight, x what was normalised, g the gradient of the result, s that of
the sum behind it, if any:

    r = rsqrt(mean((x - mean(x))²) + eps),   n = (x - mean(x)) r,   u = g * weight
    dx = r (u - mean(u) - n mean(u n)) + s
    dweight = Σ_rows g n,   dbias = Σ_rows g

All in fp32. Nothing but x and the weight is kept for it: a row that is read for the gradient gives its mean and r
again. Each program walks over some rows and adds up its parts of `dweight` and `dbias`, which are summed at the end in
a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device import row_tiles
from ..launching.launch import Kernel

CASES = """
def gradients(size, add=False, bias=True, heads=0):
    weight = tensor(heads, size) if heads else tensor(size)
    shape = (PROMPT, heads, size) if heads else (PROMPT, size)
    after = tensor(*shape) if add else None
    layer_norm_backward(tensor(*shape), after, tensor(*shape), weight, weight if bias else None, EPS, (True, bias))

case("768 columns", gradients, 768)
case("1024 columns, adds", gradients, 1024, True)
case("4096 columns, no bias", gradients, 4096, bias=False)
case("128 columns, 32 heads", gradients, 128, bias=False, heads=32)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["row_count"])
    def _layer_norm_backward_kernel(  # type: ignore[no-untyped-def]
        gradient_ptr,
        after_ptr,
        x_ptr,
        weight_ptr,
        out_ptr,
        weight_parts_ptr,
        bias_parts_ptr,
        row_count,
        inner,
        outer_stride,
        inner_stride,
        eps,
        H: tl.constexpr,
        G: tl.constexpr,
        ADD: tl.constexpr,
        WEIGHTED: tl.constexpr,
        FOR_WEIGHT: tl.constexpr,
        FOR_BIAS: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Walk over the rows of one row of the weight."""
        group = tl.program_id(1)
        col = tl.arange(0, BLOCK_COLS)[None, :]
        of_weight = tl.zeros((1, BLOCK_COLS), tl.float32)
        of_bias = tl.zeros((1, BLOCK_COLS), tl.float32)
        if WEIGHTED:
            weight = tl.load(weight_ptr + group * H + col, mask=col < H, other=0.0).to(tl.float32)
        for first in range(tl.program_id(0) * BLOCK_ROWS, row_count, tl.num_programs(0) * BLOCK_ROWS):
            turn = first + tl.arange(0, BLOCK_ROWS)[:, None]
            mask = (turn < row_count) & (col < H)
            row = turn * G + group
            place = row.to(tl.int64) * H + col
            x_row = x_ptr + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
            x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(tl.float32)
            centred = tl.where(col < H, x - tl.sum(x, axis=1, keep_dims=True) / H, 0.0)
            rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / H + eps)
            normed = centred * rstd
            scaled = gradient
            if WEIGHTED:
                scaled = gradient * weight
            if FOR_WEIGHT:
                of_weight += tl.sum(gradient * normed, axis=0, keep_dims=True)
            if FOR_BIAS:
                of_bias += tl.sum(gradient, axis=0, keep_dims=True)
            along = tl.sum(scaled * normed, axis=1, keep_dims=True) / H
            out = rstd * (scaled - tl.sum(scaled, axis=1, keep_dims=True) / H - normed * along)
            if ADD:
                out += tl.load(after_ptr + place, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)
        part = (tl.program_id(0) * G + group) * H + col
        if FOR_WEIGHT:
            tl.store(weight_parts_ptr + part, of_weight, mask=col < H)
        if FOR_BIAS:
            tl.store(bias_parts_ptr + part, of_bias, mask=col < H)

    layer_norm_backward_kernel = Kernel(_layer_norm_backward_kernel)


def refusal(hidden_states: Tensor) -> str | None:
    """Return why the kernel does not take rows of these, besides what the forward's kernel refuses; or None."""
    if hidden_states.shape[-1] > row_tiles.MAX_BLOCK_COLS:
        return "wide"
    return None if hidden_states.numel() and row_tiles.order(hidden_states) == () else "layout"


def layer_norm_backward(
    gradient: Tensor,
    after: Tensor | None,
    hidden_states: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    needed: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of what was normalised, in its dtype, and of weight and bias, where they are wanted.

    Args:
        gradient: `[N, H]`, of the norm.
        after: `[N, H]`, of the sum that was normalised, where something else reads it.
        hidden_states: `[N, H]`, what was normalised.
        weight: `[H]`, or `[G, H]` where N ends in G, or None.
        bias: shaped as the weight, or None.
        eps: added to the variance.
        needed: whether the weight's is wanted, and whether the bias's is.
    """
    hidden_size = hidden_states.shape[-1]
    x, inner, outer_stride, inner_stride = row_tiles.collapse(hidden_states)
    gradient = gradient.contiguous()
    adds = after is not None  # it may be the very tensor that the norm's gradient is: that of `normed + summed`
    after = gradient if after is None else after.contiguous()
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    parameter = weight if weight is not None else bias
    groups = 1 if parameter is None else parameter.numel() // hidden_size
    row_count = hidden_states.numel() // hidden_size // groups
    block_rows, block_cols, num_warps = row_tiles.tile(hidden_size, row_count)
    programs = max(1, row_tiles.programs(out, -(-row_count // block_rows)) // groups)
    for_weight, for_bias = needed[0] and weight is not None, needed[1] and bias is not None
    of_weight, of_bias = (
        torch.empty((programs if wanted else 1, groups * hidden_size), dtype=torch.float32, device=out.device)
        for wanted in (for_weight, for_bias)
    )
    with backend.device_guard(out):
        layer_norm_backward_kernel.launch(
            (programs, groups, 1),
            num_warps,
            (gradient, after, x, x if weight is None else weight.contiguous(), out, of_weight, of_bias),
            (row_count,),
            (inner, outer_stride, inner_stride),
            (eps,),
            (hidden_size, groups, adds, weight is not None, for_weight, for_bias, block_rows, block_cols),
        )
    return out, _summed(of_weight, weight, for_weight), _summed(of_bias, bias, for_bias)


def _summed(parts: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor | None:
    return parts.sum(0).view(parameter.shape).to(parameter.dtype) if wanted and parameter is not None else None
