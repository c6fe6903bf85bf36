"""Products of 2 to 32 rows with a weight of integers (`integer_weights`), on the tensor cores.

I in_features, O out_features, M rows; the formulas and the form are those of `linear.block_rows`: the weight is the
left side, programs share a tile of it where there are few, and the product of a group is scaled by itself. `q - zero`
is exact in 16 bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core import backend
from ..device.split_k_semaphores import arrivals
from ..launching.launch import HIP, WAVE, Kernel, overlaps, processors, wait_for_stores
from ..launching.tiles import Tile
from ..linear.prologue import norm_arguments
from ..norms.norm_form import Prologue
from .integer_weights import Integers

CASES = """
def product(count, rows, cols, norm, bits=4, zero=False):
    rows = many(rows)
    zeros = tensor(rows, cols // 128, dtype=torch.uint8) if zero else None
    words = tensor(rows, cols * bits // 32, dtype=torch.int32)
    weight = Integers(words, tensor(rows, cols // 128), zeros, bits, 128)
    out = tensor(count, 1, rows)
    given, added = (prologue(cols), None) if norm else (None, out)
    return launch_integer_rows(tensor(count, 1, cols), weight, None, given, added, out)

for count in (8, 32):
    case(f"8B, qkv, {count} rows", product, count, 6144, LLAMA_8B.hidden_size, norm=not HIP)
    case(f"8B, down, {count} rows", product, count, LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size, norm=False)
case("8B, qkv, 8 bits, zeros", product, 8, 6144, LLAMA_8B.hidden_size, False, 8, True)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
    from .integer_weights import integers_of

    @triton.jit(do_not_specialize=["count"])
    def _integer_rows_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        values_ptr,
        scale_ptr,
        zero_ptr,
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
        BITS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ZERO: tl.constexpr,
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
        """2 to M rows: BLOCK_COLS columns of one group at a time, whose product is then scaled.

        SPLITS programs share BLOCK_ROWS rows of the weight, as in `skinny`: the last to arrive adds up their parts.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        split = tl.program_id(0)
        tile = tl.program_id(1)
        places: tl.constexpr = 32 // BITS
        share: tl.constexpr = (I + SPLITS * BLOCK_COLS - 1) // (SPLITS * BLOCK_COLS) * BLOCK_COLS
        begin = split * share
        column = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = column < O
        row_ptr = values_ptr + column.to(tl.int64)[:, None] * (I // places)
        group_row = column * (I // COLUMNS)
        rows = tl.arange(0, M)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        y = tl.zeros((BLOCK_ROWS, M), tl.float32)
        square = tl.zeros((M, BLOCK_COLS), tl.float32)
        for start in tl.range(begin, tl.minimum(begin + share, I), BLOCK_COLS, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_COLS)
            word = start // places + tl.arange(0, BLOCK_COLS // places)
            words = tl.load(row_ptr + word, mask=live[:, None], other=0)
            scale = tl.load(scale_ptr + group_row + start // COLUMNS, mask=live, other=0.0)
            x = tl.load(x_ptr + rows[:, None] * I + col[None, :], mask=(rows < count)[:, None], other=0.0)
            if NORM:
                wide = x.to(tl.float32)
                square += wide * wide
                if NORM_WEIGHT:
                    x = (wide * (tl.load(norm_ptr + col).to(tl.float32) + offset)[None, :]).to(x.dtype)
            integers = integers_of(words, BITS)
            if ZERO:
                zero = tl.load(zero_ptr + group_row + start // COLUMNS, mask=live, other=0)
                integers -= zero.to(tl.int32)[:, None]
            else:
                integers -= 1 << (BITS - 1)
            part = tl.dot(integers.to(tl.float32).to(x.dtype), tl.trans(x), input_precision="ieee")
            y += part * scale.to(tl.float32)[:, None]
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

    integer_rows_kernel = Kernel(_integer_rows_kernel, dot=True)

MOST_ROWS = 32
STAGES = 2 if HIP else 4
"""Tiles of a program in flight."""
PROGRAMS = 3
"""Programs that a processor has room for."""


@functools.cache
def rows_rule(size: int, tiles: int, processors: int) -> Tile:
    """Return rows of a program, warps, programs that share these and tiles in flight, of a row of `tiles` tiles."""
    block_rows = 32 if HIP or size % 64 else 64
    wanted = PROGRAMS * processors // -(-size // block_rows)
    return block_rows, 128 // WAVE, max(1, min(wanted, tiles // STAGES)), STAGES


def launch_integer_rows(
    input: Tensor,
    weight: Integers,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    tile: Tile | None = None,
) -> None:
    """Write the product of several rows into `out` `[M, O]`; the input's columns are in the weight's order."""
    size, cols = weight.shape
    count = out.numel() // size
    most = 16 if count <= 16 else MOST_ROWS
    block_cols = min(weight.columns & -weight.columns, 128)
    device = input.get_device() if input.is_cuda else None
    block_rows, num_warps, splits, stages = tile or rows_rule(size, cols // block_cols, processors(device))
    # Programs without a column of their own would never arrive.
    splits = -(-cols // (-(-cols // (splits * block_cols)) * block_cols))
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap, blocks = overlaps(input), -(-size // block_rows)
    part = square = arrived = out
    if splits > 1:
        arrived = arrivals(input, blocks)
        part = input.new_empty(blocks * splits * most * block_rows, dtype=torch.float32)
        square = part if prologue is None else input.new_empty(blocks * splits * most, dtype=torch.float32)
    with backend.device_guard(input):
        integer_rows_kernel.launch(
            (splits, blocks, 1),
            num_warps,
            (
                input.contiguous(), norm, weight.values,
                weight.scale, weight.values if weight.zero is None else weight.zero, input if bias is None else bias,
                input if residual is None else residual.contiguous(), part, square, arrived, out,
            ),
            (count,),
            (),
            (eps, offset),
            (
                cols, size, weight.bits, weight.columns, weight.zero is not None,
                prologue is not None, has_weight, bias is not None, residual is not None, overlap,
                wait_for_stores(input) if splits > 1 else "", most, block_rows, block_cols, splits, stages,
            ),
            overlap=overlap,
        )  # fmt: skip
