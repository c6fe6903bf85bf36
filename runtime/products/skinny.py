"""Products of 2 to 32 rows with large weights, with what stands before and after them in the same kernel.

I in_features, O out_features, M rows. The formulas are those of `linear.py`; what an RMSNorm divides by is a factor of
the row, so the product need not wait for it:

    norm(x) Wᵀ = rsqrt(mean(x²) + eps) * ((x * w) Wᵀ)

The time is again that of reading the weight, once: a program multiplies a tile of it, 64 rows as a rule, with all M
rows of the input, filled up to 16 or 32; the weight is the left side, whose 64 rows the tensor cores of Hopper take
from shared memory as they are. Where there are fewer tiles than the chip has room for programs, several share one and
each takes a part of the columns (split-K): the last to arrive adds up what all of them have written, in one order.
`x * w` is computed in fp32 and rounded once to the weight's dtype, where the norm as an operator rounds before and
after its weight; sums are fp32. The activation of a gated product is an operator of its own: a kernel with both halves
took 61 µs a call longer than cuBLAS (H100, 1B Llama, 8 rows).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..core.arrivals import arrivals
from ..core.launch import HIP, Kernel, overlaps, shared_memory, wait_for_stores
from ..core.tiles import STAGES
from .prologue import Prologue, norm_arguments

MOST_ROWS = 32
HEIGHTS = (16, 32)
"""Rows that the tensor cores are given; what is missing is filled up."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..core.arrivals import publish
    from .gated_activation import _activate

    @triton.jit
    def _weight(  # type: ignore[no-untyped-def]
        row_ptr,
        row,
        start,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Load columns of the rows of a program; a mask only where the tiles do not divide the weight."""
        col = start + tl.arange(0, BLOCK_COLS)
        if I % BLOCK_COLS == 0:
            if O % BLOCK_ROWS == 0:
                return tl.load(row_ptr + col)
            else:
                return tl.load(row_ptr + col, mask=(row < O)[:, None], other=0.0)
        else:
            return tl.load(row_ptr + col, mask=(row < O)[:, None] & (col < I)[None, :], other=0.0)

    @triton.jit
    def _input(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        rows,
        start,
        count,
        offset,
        I: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        WEIGHT: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Load columns of all rows, times the norm's weight where there is one, and their squares in fp32."""
        col = start + tl.arange(0, BLOCK_COLS)
        mask = (rows < count)[:, None]
        if I % BLOCK_COLS:
            mask = mask & (col < I)[None, :]
        x = tl.load(x_ptr + rows[:, None] * I + col, mask=mask, other=0.0)
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
        part_ptr,
        square_ptr,
        arrived_ptr,
        out_ptr,
        count,
        eps,
        offset,
        factor,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        SPLITS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        split = tl.program_id(0)
        tile = tl.program_id(1)
        share: tl.constexpr = (I + SPLITS * BLOCK_COLS - 1) // (SPLITS * BLOCK_COLS) * BLOCK_COLS
        begin = split * share
        end = tl.minimum(begin + share, I)
        column = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        rows = tl.arange(0, M)
        weight_row = weight_ptr + column.to(tl.int64)[:, None] * I
        first = begin
        y = tl.zeros([BLOCK_ROWS, M], tl.float32)
        if NORM:
            square = tl.zeros([M, BLOCK_COLS], tl.float32)
        if OVERLAP:  # one tile of the weight on its way while the kernel before ends
            weight = _weight(weight_row, column, begin, I, O, BLOCK_ROWS, BLOCK_COLS)
            tl.extra.cuda.gdc_wait()
            x, more = _input(x_ptr, norm_ptr, rows, begin, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
            first += BLOCK_COLS
        for start in tl.range(first, end, BLOCK_COLS, num_stages=STAGES):
            weight = _weight(weight_row, column, start, I, O, BLOCK_ROWS, BLOCK_COLS)
            x, more = _input(x_ptr, norm_ptr, rows, start, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
        if NORM:
            squares = tl.sum(square, 1)
        there = (column < O)[:, None] & (rows < count)[None, :]
        if SPLITS > 1:
            inner = tl.arange(0, BLOCK_ROWS)[:, None] + rows[None, :] * BLOCK_ROWS
            part = part_ptr + tile.to(tl.int64) * SPLITS * M * BLOCK_ROWS + inner
            tl.store(part + split * M * BLOCK_ROWS, y, mask=there)
            if NORM:
                square_row = square_ptr + tile * SPLITS * M + rows
                tl.store(square_row + split * M, squares, mask=rows < count)
            publish(WAIT)
            if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
                return
            tl.store(arrived_ptr + tile, 0)
            y = tl.zeros([BLOCK_ROWS, M], tl.float32)
            if NORM:
                squares = tl.zeros([M], tl.float32)
            for one in tl.static_range(SPLITS):
                y += tl.load(part + one * M * BLOCK_ROWS, mask=there, other=0.0, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(square_row + one * M, mask=rows < count, other=0.0, cache_modifier=".cg")
        if NORM:
            y *= tl.rsqrt(squares / I + eps)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + column, mask=column < O, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION != "":
            y = _activate(y, ACTIVATION)
        y *= factor
        at = rows[None, :] * O + column[:, None]
        if RESIDUAL:
            y += tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=there)

    skinny_linear_kernel = Kernel(_skinny_linear_kernel, dot=True)


def takes_norm(input: Tensor) -> bool:
    """Return whether these kernels compute the norm of such rows: `x * w` before the division may overflow fp16."""
    return input.dtype != torch.float16


def height_for(rows: int) -> int:
    """Return how many rows the kernel computes for `rows`."""
    return min(size for size in HEIGHTS if size >= rows)


def skinny_kind(rows: int) -> str:
    """Return the kind under which the tables have products of `rows` rows."""
    return "skinny_linear" if rows <= HEIGHTS[0] else f"skinny_linear_{height_for(rows)}"


class Form(NamedTuple):
    """How the work is divided."""

    block_rows: int
    """Rows of the weight that a program takes."""
    block_cols: int
    """Columns of one tile."""
    num_warps: int
    splits: int = 1
    """Programs that share a row of the weight, at most."""
    stages: int = STAGES
    """Tiles of a program in flight."""


def launch_skinny_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    form: tuple[int, ...],
    activation: str = "",
    factor: float = 1.0,
) -> None:
    """Run the kernel of `linear` for up to `MOST_ROWS` rows with a `Form`, or the first fields of one."""
    block_rows, block_cols, num_warps, splits, stages = Form(*form)
    rows, cols = weight.shape
    count = out.numel() // rows
    height = height_for(count)
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    blocks = -(-rows // block_rows)
    if prologue is None and not HIP:
        # The input is as often in shared memory as the weight then: once more than there are stages (Triton 3.6).
        tile = weight.element_size() * block_cols * (block_rows + height)
        most = shared_memory(input.get_device() if input.is_cuda else None) // tile - 1
        stages = max(1, min(stages, most))
    # Programs without a column of their own would never arrive.
    splits = -(-cols // (-(-cols // (splits * block_cols)) * block_cols))
    part = square = arrived = out
    if splits > 1:
        arrived = arrivals(input, blocks)
        part = input.new_empty(blocks * splits * height * block_rows, dtype=torch.float32)
        if prologue is not None:
            square = input.new_empty(blocks * splits * height, dtype=torch.float32)
    with backend.device_guard(input):
        skinny_linear_kernel.launch(
            (splits, blocks, 1),
            num_warps,
            (
                input.contiguous(), norm, weight, weight if bias is None else bias,
                input if residual is None else residual.contiguous(), part, square, arrived, out,
            ),
            (count,),
            (),
            (eps, offset, factor),
            (
                cols, rows, prologue is not None, has_weight, bias is not None, activation, residual is not None,
                overlap, wait_for_stores(input) if splits > 1 else "", height, block_rows, block_cols, splits, stages,
            ),
            overlap=overlap,
        )  # fmt: skip
