"""Products of 2 to 16 rows with large weights, with what stands before and after them in the same kernel.

I in_features, O out_features, M rows. The formulas are those of `linear.py`; what an RMSNorm divides by is a factor of
the row, so the product need not wait for it:

    norm(x) Wᵀ = rsqrt(mean(x²) + eps) * ((x * w) Wᵀ)

The time is again that of reading the weight, once: a program takes some rows of it and all M rows of the input, filled
up to the 16 that the tensor cores want. `x * w` is computed in fp32 and rounded once to the weight's dtype, where the
norm as an operator rounds before and after its weight; sums are fp32. The activation of a gated product is an operator
of its own: a kernel with both halves took 61 µs a call longer than cuBLAS (H100, 1B Llama, 8 rows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import backend
from .launch import HIP, Kernel, overlaps
from .prologue import Prologue, norm_arguments
from .tiles import Tile

MOST_ROWS = 16
STAGES = 2 if HIP else 4
"""Tiles of a program in flight; LDS is 64 KiB on AMD cards."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _input(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        rows,
        col,
        count,
        offset,
        I: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        WEIGHT: tl.constexpr,
    ):
        """Load columns of all rows, times the norm's weight where there is one, and their squares in fp32."""
        x = tl.load(x_ptr + rows[:, None] * I + col, mask=(rows < count)[:, None] & (col < I)[None, :], other=0.0)
        wide = x.to(tl.float32)
        square = wide * wide
        if NORM and WEIGHT:
            norm = tl.load(norm_ptr + col, mask=col < I, other=0.0).to(tl.float32) + offset
            x = (wide * norm[None, :]).to(x.dtype)
        return x, square

    @triton.jit(do_not_specialize=["count"])
    def _skinny_linear_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        weight_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        count,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        column = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = column < O
        weight_row = weight_ptr + column.to(tl.int64)[:, None] * I
        rows = tl.arange(0, M)
        col = tl.arange(0, BLOCK_COLS)
        weight = tl.load(weight_row + col, mask=live[:, None] & (col < I)[None, :], other=0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        x, square = _input(x_ptr, norm_ptr, rows, col, count, offset, I, NORM, NORM_WEIGHT)
        y = tl.dot(x, tl.trans(weight), input_precision="ieee")
        for start in tl.range(BLOCK_COLS, I, BLOCK_COLS, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_COLS)
            weight = tl.load(weight_row + col, mask=live[:, None] & (col < I)[None, :], other=0.0)
            x, more = _input(x_ptr, norm_ptr, rows, col, count, offset, I, NORM, NORM_WEIGHT)
            square += more
            y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
        if NORM:
            y *= tl.rsqrt(tl.sum(square, 1) / I + eps)[:, None]
        if BIAS:
            y += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)[None, :]
        at = rows[:, None] * O + column[None, :]
        there = (rows < count)[:, None] & live[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=there)

    skinny_linear_kernel = Kernel(_skinny_linear_kernel, dot=True)


def takes_norm(input: Tensor) -> bool:
    """Return whether these kernels compute the norm of such rows: `x * w` before the division may overflow fp16."""
    return input.dtype != torch.float16


def launch_skinny_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    shape: Tile,
) -> None:
    """Run the kernel of `linear` for up to 16 rows with a tile."""
    block_rows, block_cols, num_warps = shape
    rows, cols = weight.shape
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    with backend.device_guard(input):
        skinny_linear_kernel.launch(
            (-(-rows // block_rows), 1, 1),
            num_warps,
            (
                input.contiguous(), norm, weight, weight if bias is None else bias,
                input if residual is None else residual.contiguous(), out,
            ),
            (out.numel() // rows,),
            (),
            (eps, offset),
            (
                cols, rows, prologue is not None, has_weight, bias is not None, residual is not None, overlap,
                MOST_ROWS, block_rows, block_cols, STAGES,
            ),
            overlap=overlap,
        )  # fmt: skip
