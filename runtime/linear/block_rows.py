"""Products of 2 to 16 rows with a block-scaled weight (`blocks`), on the tensor cores.

I in_features, O out_features, M rows; the formulas are those of `skinny`, and so is the form: the weight is the left
side, and where there are fewer tiles of it than the chip has room for programs, several share one, each with a part
of the columns. The product of a block is scaled by itself, so that a tile has the columns of one. The input is the
right side, which is read from shared memory: as the left one it would be each warp's, and its norm computed by every
warp anew, in 15 instructions for each weight in place of 5.8 (8 rows, sm_90, Triton 3.6).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core import backend
from ..device.split_k_semaphores import arrivals
from ..launching.launch import HIP, WAVE, Kernel, overlaps, processors, wait_for_stores
from ..launching.tiles import Tile
from ..norms.norm_form import Prologue
from .blocks import Blocks, as_read
from .prologue import norm_arguments

CASES = """
def product(rows, cols, norm):
    rows = many(rows)
    scale = tensor(-(-rows // 128), -(-cols // 128), dtype=torch.float32)
    weight = Blocks(tensor(rows, cols, dtype=torch.float8_e4m3fn), scale, 128, 128)
    out = tensor(8, 1, rows)
    given, added = (prologue(cols), None) if norm else (None, out)
    return launch_block_rows(tensor(8, 1, cols), weight, None, given, added, out)

case("8B, qkv, 8 rows", product, 6144, LLAMA_8B.hidden_size, norm=not HIP)
case("8B, down, 8 rows", product, LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size, norm=False)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
    from .blocks import narrowed, scaled_by, widened

    @triton.jit(do_not_specialize=["count"])
    def _block_rows_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        values_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        part_ptr,
        square_ptr,
        arrived_ptr,
        out_ptr,
        count,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        CUT: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        SPLITS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """2 to M rows on the tensor cores: BLOCK_COLS columns of one block at a time, whose product is then scaled.

        SPLITS programs share BLOCK_ROWS rows of the weight, as in `skinny`: the last to arrive adds up their parts.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        split = tl.program_id(0)
        tile = tl.program_id(1)
        share: tl.constexpr = (I + SPLITS * BLOCK_COLS - 1) // (SPLITS * BLOCK_COLS) * BLOCK_COLS
        begin = split * share
        column = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = column < O
        row_ptr = values_ptr + column.to(tl.int64)[:, None] * I
        scale_row_ptr = scale_ptr + column // ROWS * ((I + COLUMNS - 1) // COLUMNS)
        rows = tl.arange(0, M)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        y = tl.zeros((BLOCK_ROWS, M), tl.float32)
        square = tl.zeros((M, BLOCK_COLS), tl.float32)
        for start in tl.range(begin, tl.minimum(begin + share, I), BLOCK_COLS, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_COLS)
            if I % BLOCK_COLS == 0 and O % BLOCK_ROWS == 0:
                loaded = tl.load(row_ptr + col)
                scale = tl.load(scale_row_ptr + start // COLUMNS)
            else:
                loaded = tl.load(row_ptr + col, mask=live[:, None] & (col < I)[None, :], other=0.0)
                scale = tl.load(scale_row_ptr + start // COLUMNS, mask=live, other=0)
            there = (rows < count)[:, None]
            if I % BLOCK_COLS:
                there = there & (col < I)[None, :]
            x = tl.load(x_ptr + rows[:, None] * I + col, mask=there, other=0.0)
            if NORM:
                wide = x.to(tl.float32)
                square += wide * wide
                if NORM_WEIGHT:
                    norm = tl.load(norm_ptr + col, mask=col < I, other=0.0).to(tl.float32) + offset
                    x = (wide * norm[None, :]).to(x.dtype)
            weight = narrowed(widened(loaded, DECODE, False), x.dtype, CUT)
            part = tl.dot(weight, tl.trans(x), input_precision="ieee")
            y += scaled_by(part, scale[:, None], False, EXPONENTS)
        if NORM:
            squares = tl.sum(square, 1)
        written = live[:, None] & (rows < count)[None, :]
        if SPLITS > 1:
            inner = tl.arange(0, BLOCK_ROWS)[:, None] + rows[None, :] * BLOCK_ROWS
            parts = part_ptr + tile.to(tl.int64) * SPLITS * M * BLOCK_ROWS + inner
            tl.store(parts + split * M * BLOCK_ROWS, y, mask=written)
            if NORM:
                square_row = square_ptr + tile * SPLITS * M + rows
                tl.store(square_row + split * M, squares, mask=rows < count)
            publish(WAIT)
            if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
                return
            tl.store(arrived_ptr + tile, 0)
            y = tl.zeros((BLOCK_ROWS, M), tl.float32)
            if NORM:
                squares = tl.zeros((M,), tl.float32)
            for one in tl.static_range(SPLITS):
                y += tl.load(parts + one * M * BLOCK_ROWS, mask=written, other=0.0, cache_modifier=".cg")
                if NORM:
                    squares += tl.load(square_row + one * M, mask=rows < count, other=0.0, cache_modifier=".cg")
        if NORM:
            y *= tl.rsqrt(squares / I + eps)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)[:, None]
        at = rows[None, :] * O + column[:, None]
        if RESIDUAL:
            y += tl.load(residual_ptr + at, mask=written, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=written)

    block_rows_kernel = Kernel(_block_rows_kernel, dot=True)

MOST_ROWS = 16
STAGES = 2 if HIP else 4
"""Tiles of a program of several rows in flight; LDS is 64 KiB on AMD cards."""
PROGRAMS = 3
"""Programs of several rows that a processor has room for, each with STAGES - 1 tiles of 8 KiB in flight."""


@functools.cache
def rows_rule(size: int, tiles: int, processors: int) -> Tile:
    """Return rows of a program, warps, programs that share these and tiles in flight, of a row of `tiles` tiles."""
    block_rows = 32 if HIP or size % 64 else 64
    wanted = PROGRAMS * processors // -(-size // block_rows)
    return block_rows, 128 // WAVE, max(1, min(wanted, tiles // STAGES)), STAGES


def launch_block_rows(
    input: Tensor,
    weight: Blocks,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    tile: Tile | None = None,
) -> None:
    """Run the kernel, with rows of a program, warps, programs that share these and tiles in flight from `tile`."""
    size, cols = weight.shape
    block_cols = min(weight.columns & -weight.columns, 128)
    device = input.get_device() if input.is_cuda else None
    block_rows, num_warps, splits, stages = tile or rows_rule(size, -(-cols // block_cols), processors(device))
    # Programs without a column of their own would never arrive.
    splits = -(-cols // (-(-cols // (splits * block_cols)) * block_cols))
    values, scale, decode = as_read(weight)
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap, blocks = overlaps(input), -(-size // block_rows)
    part = square = arrived = out
    if splits > 1:
        arrived = arrivals(input, blocks)
        part = input.new_empty(blocks * splits * MOST_ROWS * block_rows, dtype=torch.float32)
        square = part if prologue is None else input.new_empty(blocks * splits * MOST_ROWS, dtype=torch.float32)
    with backend.device_guard(input):
        block_rows_kernel.launch(
            (splits, blocks, 1),
            num_warps,
            (
                input.contiguous(), norm, values, scale, input if bias is None else bias,
                input if residual is None else residual.contiguous(), part, square, arrived, out,
            ),
            (out.numel() // size,),
            (),
            (eps, offset),
            (
                cols, size, weight.rows, weight.columns, weight.exponents, decode, HIP, prologue is not None,
                has_weight, bias is not None, residual is not None, overlap,
                wait_for_stores(input) if splits > 1 else "", MOST_ROWS, block_rows, block_cols, splits, stages,
            ),
            overlap=overlap,
        )  # fmt: skip
