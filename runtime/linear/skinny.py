"""Products of 2 to 32 rows with large weights, with what stands before and after them in the same kernel.

I in_features, O out_features, M rows. The formulas are those of `linear.py`; what an RMSNorm divides by is a factor of
the row, so the product need not wait for it:

    norm(x) Wᵀ = rsqrt(mean(x²) + eps) * ((x * w) Wᵀ)

The time is again that of reading the weight, once: a program multiplies a tile of it, 64 rows as a rule, with all M
rows of the input, filled up to 16 or 32; the weight is the left side, whose 64 rows the tensor cores of Hopper take
from shared memory as they are. Where there are fewer tiles than the chip has room for programs, several share one and
each takes a part of the columns (split-K): the last to arrive adds up what all of them have written, in one order.
`x * w` is computed in fp32 and rounded once to the weight's dtype, where the norm as an operator rounds before and
after its weight; sums are fp32. A tile of a gated product has each row of the gate beside the row of the other half
that it is for, so that the activation needs no kernel of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..device.split_k_semaphores import arrivals
from ..launching.launch import HIP, Kernel, overlaps, shared_memory, wait_for_stores
from ..launching.tiles import STAGES
from ..norms.norm_form import Prologue
from .prologue import norm_arguments

MOST_ROWS = 32
HEIGHTS = (16, 32)
"""Rows that the tensor cores are given; what is missing is filled up."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
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

    @triton.jit
    def halves(y, BLOCK_ROWS: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return every first and every second row."""
        return tl.split(tl.permute(tl.reshape(y, [BLOCK_ROWS // 2, 2, M]), (0, 2, 1)))

    @triton.jit
    def rows_of_tile(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        weight_ptr,
        column,
        begin,
        end,
        count,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        AHEAD: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Multiply rows `column` of the weight with all rows, in columns `begin` to `end`: `[BLOCK_ROWS, M]`, fp32.

        Also returns the sums of squares of the rows in these columns, `[M]`; zeros without a norm. With AHEAD that
        many tiles of the weight, one or two, are on their way while the kernel before ends.
        """
        rows = tl.arange(0, M)
        weight_row = weight_ptr + column.to(tl.int64)[:, None] * I
        first = begin
        y = tl.zeros([BLOCK_ROWS, M], tl.float32)
        squares = tl.zeros([M], tl.float32)
        if NORM:
            square = tl.zeros([M, BLOCK_COLS], tl.float32)
        if AHEAD > 0:
            weight = _weight(weight_row, column, begin, I, O, BLOCK_ROWS, BLOCK_COLS)
            if AHEAD > 1:
                next_weight = _weight(weight_row, column, begin + BLOCK_COLS, I, O, BLOCK_ROWS, BLOCK_COLS)
            tl.extra.cuda.gdc_wait()
            x, more = _input(x_ptr, norm_ptr, rows, begin, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
            first += BLOCK_COLS
            if AHEAD > 1:
                x, more = _input(x_ptr, norm_ptr, rows, first, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
                if NORM:
                    square += more
                y = tl.dot(next_weight, tl.trans(x), y, input_precision="ieee")
                first += BLOCK_COLS
        for start in tl.range(first, end, BLOCK_COLS, num_stages=STAGES):
            weight = _weight(weight_row, column, start, I, O, BLOCK_ROWS, BLOCK_COLS)
            x, more = _input(x_ptr, norm_ptr, rows, start, count, offset, I, NORM, NORM_WEIGHT, BLOCK_COLS)
            if NORM:
                square += more
            y = tl.dot(weight, tl.trans(x), y, input_precision="ieee")
        if NORM:
            squares = tl.sum(square, 1)
        return y, squares

    @triton.jit
    def put_part(  # type: ignore[no-untyped-def]
        part_ptr,
        square_ptr,
        arrived_ptr,
        tile,
        split,
        y,
        squares,
        count,
        NORM: tl.constexpr,
        WAIT: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        """Write what this program has of a tile's sums; return whether it is the last: then `parts` has them all."""
        rows = tl.arange(0, M)
        inner = tl.arange(0, BLOCK_ROWS)[:, None] + rows[None, :] * BLOCK_ROWS
        part = part_ptr + (tile.to(tl.int64) * SPLITS + split) * M * BLOCK_ROWS + inner
        there = (rows < count)[None, :]
        tl.store(part, y, mask=there)
        if NORM:
            tl.store(square_ptr + (tile * SPLITS + split) * M + rows, squares, mask=rows < count)
        publish(WAIT)
        return tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1

    @triton.jit
    def parts(  # type: ignore[no-untyped-def]
        part_ptr,
        square_ptr,
        arrived_ptr,
        tile,
        count,
        NORM: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        """Add up what all programs of a tile have written, in their order, and leave its counter as it was."""
        tl.store(arrived_ptr + tile, 0)
        rows = tl.arange(0, M)
        inner = tl.arange(0, BLOCK_ROWS)[:, None] + rows[None, :] * BLOCK_ROWS
        part = part_ptr + tile.to(tl.int64) * SPLITS * M * BLOCK_ROWS + inner
        there = (rows < count)[None, :]
        square_row = square_ptr + tile * SPLITS * M + rows
        y = tl.zeros([BLOCK_ROWS, M], tl.float32)
        squares = tl.zeros([M], tl.float32)
        for one in tl.static_range(SPLITS):
            y += tl.load(part + one * M * BLOCK_ROWS, mask=there, other=0.0, cache_modifier=".cg")
            if NORM:
                squares += tl.load(square_row + one * M, mask=rows < count, other=0.0, cache_modifier=".cg")
        return y, squares

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
        GATED: tl.constexpr,
        RESIDUAL: tl.constexpr,
        AHEAD: tl.constexpr,
        WAIT: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        SPLITS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        if AHEAD > 0:
            tl.extra.cuda.gdc_launch_dependents()
        split = tl.program_id(0)
        tile = tl.program_id(1)
        share: tl.constexpr = (I + SPLITS * BLOCK_COLS - 1) // (SPLITS * BLOCK_COLS) * BLOCK_COLS
        begin = split * share
        end = tl.minimum(begin + share, I)
        column = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        if GATED:  # a row of the gate, then the one of the other half that it is for
            column = column // 2 + column % 2 * (O // 2)
        rows = tl.arange(0, M)
        y, squares = rows_of_tile(
            x_ptr, norm_ptr, weight_ptr, column, begin, end, count, offset,
            I, O, NORM, NORM_WEIGHT, AHEAD, M, BLOCK_ROWS, BLOCK_COLS, STAGES,
        )  # fmt: skip
        if SPLITS > 1:
            if not put_part(
                part_ptr, square_ptr, arrived_ptr, tile, split, y, squares, count, NORM, WAIT, M, BLOCK_ROWS, SPLITS
            ):
                return
            y, squares = parts(part_ptr, square_ptr, arrived_ptr, tile, count, NORM, M, BLOCK_ROWS, SPLITS)
        if NORM:
            y *= tl.rsqrt(squares / I + eps)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + column, mask=column < O, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate, up = halves(y, BLOCK_ROWS, M)
            pair = tile * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
            at = rows[None, :] * (O // 2) + pair[:, None]
            gated = (_activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, gated, mask=(pair < O // 2)[:, None] & (rows < count)[None, :])
        else:
            there = (column < O)[:, None] & (rows < count)[None, :]
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


class Work(NamedTuple):
    """A product as its programs share it, and what they meet in."""

    form: Form
    """With as many splits and stages as there are."""
    height: int
    """Rows of the input that are computed."""
    blocks: int
    """Tiles of the weight."""
    part: Tensor
    """Where programs of one tile put their sums, fp32; any tensor where each tile has one program."""
    square: Tensor
    """Likewise the squares of the rows, where there is a norm."""
    arrived: Tensor
    """Their counters."""

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, count: int, prologue: Prologue | None, form: tuple[int, ...]) -> Work:
        """Divide the product of `count` rows by a `Form`, or the first fields of one."""
        block_rows, block_cols, num_warps, splits, stages = Form(*form)
        rows, cols = weight.shape
        height = height_for(count)
        blocks = -(-rows // block_rows)
        if prologue is None and not HIP:
            # The input is as often in shared memory as the weight then: once more than there are stages (Triton 3.6).
            tile = weight.element_size() * block_cols * (block_rows + height)
            most = shared_memory(input.get_device() if input.is_cuda else None) // tile - 1
            stages = max(1, min(stages, most))
        # Programs without a column of their own would never arrive.
        splits = -(-cols // (-(-cols // (splits * block_cols)) * block_cols))
        part = square = arrived = input
        if splits > 1:
            arrived = arrivals(input, blocks)
            part = input.new_empty(blocks * splits * height * block_rows, dtype=torch.float32)
            if prologue is not None:
                square = input.new_empty(blocks * splits * height, dtype=torch.float32)
        return cls(Form(block_rows, block_cols, num_warps, splits, stages), height, blocks, part, square, arrived)

    def ahead(self, cols: int) -> int:
        """Return how many tiles of the weight are loaded before the kernel ahead has ended: two where that is all."""
        _, block_cols, _, splits, _ = self.form
        return 2 if cols == 2 * splits * block_cols else 1

    def waits(self, input: Tensor) -> str:
        """Return what each program waits with for its own stores."""
        return wait_for_stores(input) if self.form.splits > 1 else ""


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
    gated: bool = False,
) -> None:
    """Run the kernel of `linear` for up to `MOST_ROWS` rows with a `Form`, or the first fields of one.

    With `gated` the weight's first half is the gate, and `out` is half as wide: the activation of the one half times
    the other. It has no residual and no factor.
    """
    rows, cols = weight.shape
    count = input.numel() // cols
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    work = Work.of(input, weight, count, prologue, form)
    block_rows, block_cols, num_warps, splits, stages = work.form
    with backend.device_guard(input):
        skinny_linear_kernel.launch(
            (splits, work.blocks, 1),
            num_warps,
            (
                input.contiguous(), norm, weight, weight if bias is None else bias,
                input if residual is None else residual.contiguous(), work.part, work.square, work.arrived, out,
            ),
            (count,),
            (),
            (eps, offset, factor),
            (
                cols, rows, prologue is not None, has_weight, bias is not None, activation, gated,
                residual is not None, work.ahead(cols) if overlap else 0, work.waits(input), work.height,
                block_rows, block_cols, splits, stages,
            ),
            overlap=overlap,
        )  # fmt: skip
