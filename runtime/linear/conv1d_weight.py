"""Products of one row with a large weight that lies `[in_features, out_features]`, as in GPT-2's `Conv1D`.

I in_features, O out_features:

    y = activation(x' W + b) (* factor) (+ residual)           x' = norm(x), or x

Neighbouring numbers of such a weight belong to neighbouring outputs, so a program takes some columns and, in one block
of them, a part of the rows (split-K): the last to arrive adds up what all of them have written, in one order. The norm
is a LayerNorm, whose statistics each program takes from the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core import backend
from ..device.split_k_semaphores import arrivals
from ..launching.launch import WAVE, Kernel, overlaps, processors, wait_for_stores
from .linear import is_one_row, takes_few_rows
from .prologue import LayerNormPrologue, norm_arguments, shift_of

BLOCK_COLS = 64
"""Columns of a program: 128 bytes of a row, which memory gives at once."""
PROGRAMS = 2.4
"""For each processor; of a small weight one, where what is added up at the end counts for more than what is read."""
SMALL = 3 << 20
"""Numbers of a weight. In chains of launches on an H100 768 x 3072 took 7.9 µs with 2.4 and 6.5 with one, 3072 x 768
7.5 and 6.2, 1280 x 1280 6.6 and 5.6; 5120 x 1280 is slower with one."""
MOST_TILES = 8
"""Tiles of a program, which are all in flight."""

CASES = """
def product(cols, rows, activation, norm):
    rows = many(rows)
    before = LayerNormPrologue(tensor(cols), tensor(cols), EPS) if norm else None
    after = None if norm else tensor(1, 1, rows)
    launch_transposed(
        tensor(1, 1, cols), tensor(cols, rows), tensor(rows), before, after, tensor(1, 1, rows), activation
    )

case("1280 to 3840, LayerNorm", product, 1280, 3840, "", True)
case("1280, LayerNorm, GELU", product, 1280, 5120, "gelu_tanh", True)
case("5120 to 1280", product, 5120, 1280, "", False)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
    from .gated_activation import _activate
    from .gemv import normalised, statistics

    @triton.jit
    def _row(  # type: ignore[no-untyped-def]
        x_ptr, norm_ptr, shift_ptr, col, mask, offset, mean, inverse,
        NORM: tl.constexpr, NORM_WEIGHT: tl.constexpr, SHIFT: tl.constexpr,
    ):  # fmt: skip
        """Load some of the input in fp32, normalised or as it is; zeros where masked."""
        if NORM:
            x = normalised(x_ptr, norm_ptr, shift_ptr, col, mask, offset, mean, inverse, NORM_WEIGHT, SHIFT)
            return tl.where(mask, x, 0.0)
        else:
            return tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _transposed_linear_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        shift_ptr,
        weight_ptr,
        bias_ptr,
        residual_ptr,
        part_ptr,
        arrived_ptr,
        out_ptr,
        eps,
        offset,
        factor,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        SHIFT: tl.constexpr,
        BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        TILES: tl.constexpr,
        SPLITS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        split = tl.program_id(0)
        block = tl.program_id(1)
        column = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        live = column < O
        row = split * TILES * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        at = weight_ptr + row.to(tl.int64)[:, None] * O + column[None, :]
        weight = tl.load(at, mask=(row < I)[:, None] & live[None, :], other=0.0, cache_modifier=".cg")
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        mean = 0.0
        inverse = 1.0
        if NORM:
            mean, inverse = statistics(x_ptr, eps, I, 1024)
        x = _row(x_ptr, norm_ptr, shift_ptr, row, row < I, offset, mean, inverse, NORM, NORM_WEIGHT, SHIFT)
        total = weight.to(tl.float32) * x[:, None]
        for _tile in tl.static_range(1, TILES):
            row += BLOCK_ROWS
            at = weight_ptr + row.to(tl.int64)[:, None] * O + column[None, :]
            weight = tl.load(at, mask=(row < I)[:, None] & live[None, :], other=0.0, cache_modifier=".cg")
            x = _row(x_ptr, norm_ptr, shift_ptr, row, row < I, offset, mean, inverse, NORM, NORM_WEIGHT, SHIFT)
            total += weight.to(tl.float32) * x[:, None]
        y = tl.sum(total, 0)
        if SPLITS > 1:
            part = part_ptr + block * SPLITS * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            tl.store(part + split * BLOCK_COLS, y)
            publish(WAIT)
            if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
                return
            tl.store(arrived_ptr + block, 0)
            y = tl.zeros([BLOCK_COLS], tl.float32)
            for one in tl.static_range(SPLITS):
                y += tl.load(part + one * BLOCK_COLS, cache_modifier=".cg")
        if BIAS:
            y += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            y = _activate(y, ACTIVATION)
        y *= factor
        if RESIDUAL:
            y += tl.load(residual_ptr + column, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=live)

    transposed_linear_kernel = Kernel(_transposed_linear_kernel)


def takes_transposed(input: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether `bias + input @ weight` has a kernel: one row, and a weight `[I, O]`."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous() and weight.dim() == 2
    if not plain or not takes_few_rows(input) or not is_one_row(input):
        return False
    same = all(t.dtype == input.dtype and t.device == input.device for t in (weight, bias))
    return same and weight.shape[0] == input.shape[-1] and bias.shape == weight.shape[1:] and bias.is_contiguous()


def launch_transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prologue: LayerNormPrologue | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str = "",
    factor: float = 1.0,
) -> None:
    """Run the kernel."""
    cols, rows = weight.shape
    blocks = -(-rows // BLOCK_COLS)
    block_rows, splits = _form(cols, rows, processors(input.get_device() if input.is_cuda else None))
    tiles = -(-cols // (splits * block_rows))
    splits = -(-cols // (tiles * block_rows))
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    shift = shift_of(prologue)
    part = arrived = out
    if splits > 1:
        arrived = arrivals(input, blocks)
        part = input.new_empty(blocks * splits * BLOCK_COLS, dtype=torch.float32)
    overlap = overlaps(input)
    with backend.device_guard(input):
        transposed_linear_kernel.launch(
            (splits, blocks, 1),
            128 // WAVE,
            (
                input.contiguous(), norm, input if shift is None else shift, weight,
                weight if bias is None else bias, input if residual is None else residual.contiguous(), part,
                arrived, out,
            ),
            (),
            (),
            (eps, offset, factor),
            (
                cols, rows, prologue is not None, has_weight, shift is not None, bias is not None, activation,
                residual is not None, overlap, wait_for_stores(input) if splits > 1 else "", block_rows, BLOCK_COLS,
                tiles, splits,
            ),
            overlap=overlap,
        )  # fmt: skip


def _form(cols: int, rows: int, processors: int) -> tuple[int, int]:
    """Return the rows of a tile and the most parts that the rows are divided into."""
    block_rows, blocks = 32, -(-rows // BLOCK_COLS)
    programs = int(processors * (1 if cols * rows < SMALL else PROGRAMS)) + 8  # as many for an H100 as were measured
    splits = max(1, min(32, programs // blocks, cols // block_rows), -(-cols // (block_rows * MOST_TILES)))
    return block_rows, splits
