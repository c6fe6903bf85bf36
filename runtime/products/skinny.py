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
that it is for, so that the activation needs no kernel of its own. Rows that powers of two divide badly among the
processors go to programs of two tiles, one behind the other: 144 are 128 and 16, which read the input once.
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

    from .gated_activation import _activate
    from .skinny_tiles import halves, parts, put_part, rows_of_tile, rows_of_two_tiles

    @triton.jit
    def _halves_apart(place, GATED: tl.constexpr, O: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
        """Return rows of the weight: of a gated product one of the gate, then the one of the other half for it."""
        if GATED:
            return place // 2 + place % 2 * (O // 2)
        else:
            return place

    @triton.jit
    def _finish(  # type: ignore[no-untyped-def]
        y,
        squares,
        first,
        bias_ptr,
        residual_ptr,
        out_ptr,
        count,
        eps,
        factor,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        GATED: tl.constexpr,
        RESIDUAL: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
    ):
        """Compute what comes behind the sums of a tile that begins with row `first`, and store it."""
        column = _halves_apart(first + tl.arange(0, BLOCK_ROWS), GATED, O)
        rows = tl.arange(0, M)
        if NORM:
            y *= tl.rsqrt(squares / I + eps)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + column, mask=column < O, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate, up = halves(y, BLOCK_ROWS, M)
            pair = first // 2 + tl.arange(0, BLOCK_ROWS // 2)
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
        EXTRA: tl.constexpr,
    ):
        if AHEAD > 0:
            tl.extra.cuda.gdc_launch_dependents()
        split = tl.program_id(0)
        tile = tl.program_id(1)
        of_tile = tile * (BLOCK_ROWS + EXTRA)
        column = _halves_apart(of_tile + tl.arange(0, BLOCK_ROWS), GATED, O)
        if EXTRA > 0:
            of_more = of_tile + BLOCK_ROWS
            more_column = _halves_apart(of_more + tl.arange(0, EXTRA), GATED, O)
            y, z, squares = rows_of_two_tiles(
                x_ptr, norm_ptr, weight_ptr, column, more_column, count, offset,
                I, O, NORM, NORM_WEIGHT, AHEAD, M, BLOCK_ROWS, EXTRA, BLOCK_COLS, STAGES,
            )  # fmt: skip
            _finish(
                y, squares, of_tile, bias_ptr, residual_ptr, out_ptr, count, eps, factor,
                I, O, NORM, BIAS, ACTIVATION, GATED, RESIDUAL, M, BLOCK_ROWS,
            )  # fmt: skip
            _finish(
                z, squares, of_more, bias_ptr, residual_ptr, out_ptr, count, eps, factor,
                I, O, NORM, BIAS, ACTIVATION, GATED, RESIDUAL, M, EXTRA,
            )  # fmt: skip
            return
        share: tl.constexpr = (I + SPLITS * BLOCK_COLS - 1) // (SPLITS * BLOCK_COLS) * BLOCK_COLS
        begin = split * share
        end = tl.minimum(begin + share, I)
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
        _finish(
            y, squares, of_tile, bias_ptr, residual_ptr, out_ptr, count, eps, factor,
            I, O, NORM, BIAS, ACTIVATION, GATED, RESIDUAL, M, BLOCK_ROWS,
        )  # fmt: skip

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
    extra: int = 0
    """Rows of a second tile of the program, which begins behind the first; there are no splits then."""


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
        block_rows, block_cols, num_warps, splits, stages, extra = Form(*form)
        rows, cols = weight.shape
        height = height_for(count)
        blocks = -(-rows // (block_rows + extra))
        if prologue is None and not HIP:
            # The input is as often in shared memory as the weight then: once more than there are stages (Triton 3.6).
            tile = weight.element_size() * block_cols * (block_rows + extra + height)
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
        found = Form(block_rows, block_cols, num_warps, splits, stages, extra)
        return cls(found, height, blocks, part, square, arrived)

    def ahead(self, cols: int) -> int:
        """Return how many tiles of the weight are loaded before the kernel ahead has ended: two where that is all."""
        return 2 if cols == 2 * self.form.splits * self.form.block_cols and not self.form.extra else 1

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
    block_rows, block_cols, num_warps, splits, stages, extra = work.form
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
                block_rows, block_cols, splits, stages, extra,
            ),
            overlap=overlap,
        )  # fmt: skip
