"""A product of one row with a weight of integers (`integer_weights`), with what stands before and after it.

I in_features, O out_features:

    y = norm(x) Wᵀ + b (+ residual)                  activation(x' W_gᵀ + b_g) * (x' W_uᵀ + b_u)

A thread has 16 bytes of a row, a *group*: 32 columns of 4 bits, or 16 of 8, which have one scale; and their columns of
the input, for all rows of its program. For each integer it takes an operation that puts it into a number's mantissa
and one that multiplies; for two of four bits one shift. What the bases of these numbers sum up to (`integer_weights`),
and what the zeros do, follows from sums of the input alone, which the rows of a program share.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import HIP, WAVE, Kernel, overlaps
from ..launching.tiles import Tile
from ..linear.prologue import norm_arguments
from ..norms.norm_form import Prologue
from .integer_weights import GROUP_BYTES, Integers

CASES = """
def weight(rows, cols, bits, zero, order):
    zeros = tensor(rows, cols // 128, dtype=torch.uint8) if zero else None
    words = tensor(rows, cols * bits // 32, dtype=torch.int32)
    places = tensor(cols, dtype=torch.int32) if order else None
    return Integers(words, tensor(rows, cols // 128), zeros, bits, 128, places)

def product(rows, cols, norm, kind="", bits=4, zero=False, order=False):
    rows = rows if kind else many(rows)  # halves of whole blocks
    out = tensor(1, 1, rows // 2 if kind else rows)
    given, added = (prologue(cols), None) if norm else (None, None if kind else out)
    return launch_integer_row(tensor(1, 1, cols), weight(rows, cols, bits, zero, order), None, given, added, out, kind)

size, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
case("8B, qkv", product, 6144, size, norm=True)
case("8B, gate and up", product, 2 * inner, size, norm=True, kind="silu")
case("8B, down", product, size, inner, norm=False)
case("8B, qkv, 8 bits", product, 6144, size, norm=True, bits=8)
case("8B, down, zeros", product, size, inner, norm=False, zero=True)
case("8B, gate and up, order", product, 2 * inner, size, True, "silu", 4, True, True)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.block_groups import block_scales, row_groups
    from ..linear.gated_activation import _activate

    @triton.jit
    def _octet(x_ptr, order_ptr, norm_ptr, offset, col, mask, NORM: tl.constexpr, ORDERED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load eight columns of each group, `[1, 8 GROUPS]` in fp32, times the norm's weight; and as they were."""
        if ORDERED:
            col = tl.load(order_ptr + col, mask=mask, other=0)
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        gained = x
        if NORM:
            gained = x * (tl.load(norm_ptr + col, mask=mask, other=0.0).to(tl.float32) + offset)
        return gained, x

    @triton.jit
    def _eight(x, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return eight columns of each group `[1, 8 GROUPS]` one by one, each `[1, GROUPS]`."""
        even, odd = tl.split(tl.reshape(x, (1, GROUPS, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
        return x0, x1, x2, x3, x4, x5, x6, x7

    @triton.jit
    def _times_eight(  # type: ignore[no-untyped-def]
        words, NUMBER: tl.constexpr, x, sums, low_base, high_base, BITS: tl.constexpr, EXACT: tl.constexpr
    ):
        """Add the products of eight columns, number NUMBER of a group, with a word of 4 bits or two of 8."""
        if BITS == 4:
            w0, w1 = _pair_of_four(words[NUMBER] << 12, low_base, high_base, EXACT)
            w2, w3 = _pair_of_four(words[NUMBER] << 4, low_base, high_base, EXACT)
            w4, w5 = _pair_of_four(words[NUMBER] >> 4, low_base, high_base, EXACT)
            w6, w7 = _pair_of_four(words[NUMBER] >> 12, low_base, high_base, EXACT)
        else:
            w0, w1, w2, w3 = _four_of_eight(words[2 * NUMBER], low_base, EXACT)
            w4, w5, w6, w7 = _four_of_eight(words[2 * NUMBER + 1], low_base, EXACT)
        sums += w0 * x[0]
        sums += w1 * x[1]
        sums += w2 * x[2]
        sums += w3 * x[3]
        sums += w4 * x[4]
        sums += w5 * x[5]
        sums += w6 * x[6]
        return sums + w7 * x[7]

    @triton.jit
    def _pair_of_four(word, low_base, high_base, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what bits 12 to 15 are, plus 2048, and what bits 16 to 19 are, plus 128; if EXACT without these."""
        low = ((word & 0xF000) | low_base).to(tl.float32, bitcast=True)
        high = ((word & 0xF0000) | high_base).to(tl.float32, bitcast=True)
        if EXACT:
            low -= 2048.0
            high -= 128.0
        return low, high

    @triton.jit
    def _of_eight(word, base, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what bits 15 to 22 are, plus 256; if EXACT without that."""
        number = ((word & 0x7F8000) | base).to(tl.float32, bitcast=True)
        if EXACT:
            number -= 256.0
        return number

    @triton.jit
    def _four_of_eight(word, base, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
        return (
            _of_eight(word << 15, base, EXACT),
            _of_eight(word << 7, base, EXACT),
            _of_eight(word >> 1, base, EXACT),
            _of_eight(word >> 9, base, EXACT),
        )

    @triton.jit
    def _words(loaded, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the four words of each group, each `[R, GROUPS]`."""
        even, odd = tl.split(tl.reshape(loaded, (loaded.shape[0], GROUPS, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        return w0, w1, w2, w3

    @triton.jit(do_not_specialize=["low_base", "high_base"])
    def _integer_linear_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        order_ptr,
        norm_ptr,
        values_ptr,
        scale_ptr,
        zero_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        low_base,
        high_base,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        BITS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ZERO: tl.constexpr,
        ORDERED: tl.constexpr,
        EXACT: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        ACTIVATION: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
    ):
        """One row; with an ACTIVATION the gated product, for which a program takes the same rows of both halves."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        width: tl.constexpr = 128 // BITS
        groups: tl.constexpr = I // width
        sharing: tl.constexpr = COLUMNS // width
        column = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = (column < O)[:, None]
        row_ptr = values_ptr + column.to(tl.int64)[:, None] * (4 * groups)
        second_ptr = row_ptr + O * (4 * groups)
        scale_row = column[:, None] * (I // COLUMNS)
        second_scale = scale_row + O * (I // COLUMNS)
        loaded = row_groups(row_ptr, live, 0, groups, 4, BLOCK_GROUPS)
        if ACTIVATION != "":
            second = row_groups(second_ptr, live, 0, groups, 4, BLOCK_GROUPS)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        total = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.float32)
        total_up = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.float32)
        square = tl.zeros((1, BLOCK_GROUPS), tl.float32)
        for start in tl.range(0, groups, BLOCK_GROUPS, num_stages=1):
            following = row_groups(row_ptr, live, start + BLOCK_GROUPS, groups, 4, BLOCK_GROUPS)
            if ACTIVATION != "":
                second_following = row_groups(second_ptr, live, start + BLOCK_GROUPS, groups, 4, BLOCK_GROUPS)
            scale = block_scales(scale_ptr + scale_row, live, start, groups, sharing, False, BLOCK_GROUPS)
            zero = tl.full((1, 1), 1 << (BITS - 1), tl.float32)
            if ZERO:
                zero = block_scales(zero_ptr + scale_row, live, start, groups, sharing, False, BLOCK_GROUPS)
            if ACTIVATION != "":
                up_scale = block_scales(scale_ptr + second_scale, live, start, groups, sharing, False, BLOCK_GROUPS)
                up_zero = tl.full((1, 1), 1 << (BITS - 1), tl.float32)
                if ZERO:
                    up_zero = block_scales(zero_ptr + second_scale, live, start, groups, sharing, False, BLOCK_GROUPS)
                words_up = _words(second, BLOCK_GROUPS)
            words = _words(loaded, BLOCK_GROUPS)
            sums = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.float32)
            sums_up = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.float32)
            base = tl.zeros((1, BLOCK_GROUPS), tl.float32)
            plain = tl.zeros((1, BLOCK_GROUPS), tl.float32)
            place = tl.arange(0, 8 * BLOCK_GROUPS)
            col = ((start + place // 8) * width + place % 8)[None, :]
            for eight in tl.static_range(width // 8):
                gained, read = _octet(
                    x_ptr, order_ptr, norm_ptr, offset, col + 8 * eight, col < I, NORM_WEIGHT, ORDERED
                )
                if NORM:
                    square += tl.sum(tl.reshape(read * read, (1, BLOCK_GROUPS, 8)), 2)
                x = _eight(gained, BLOCK_GROUPS)
                lower = (x[0] + x[2]) + (x[4] + x[6])
                upper = (x[1] + x[3]) + (x[5] + x[7])
                plain += lower + upper
                if not EXACT:
                    base += 2048.0 * lower + 128.0 * upper if BITS == 4 else 256.0 * (lower + upper)
                sums = _times_eight(words, eight, x, sums, low_base, high_base, BITS, EXACT)
                if ACTIVATION != "":
                    sums_up = _times_eight(words_up, eight, x, sums_up, low_base, high_base, BITS, EXACT)
            total += (sums - (base + zero * plain)) * scale
            loaded = following
            if ACTIVATION != "":
                total_up += (sums_up - (base + up_zero * plain)) * up_scale
                second = second_following
        live = column < O
        factor = 1.0
        if NORM:
            factor = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / I + eps)
        y = tl.sum(total, 1) * factor
        if BIAS:
            y += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            up = tl.sum(total_up, 1) * factor
            if BIAS:
                up += tl.load(bias_ptr + O + column, mask=live, other=0.0).to(tl.float32)
            y = _activate(y, ACTIVATION) * up
        if RESIDUAL:
            y += tl.load(residual_ptr + column, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=live)

    integer_linear_kernel = Kernel(_integer_linear_kernel)


_BASES = {4: (0x45000000, 0x43000000), 8: (0x43800000, 0x43800000)}
"""The bits of 2048 and 128, and of 256. As arguments they lie in registers, and what puts an integer's bits beside
them is one instruction of NVIDIA's; with two constants it would be two, at half the rate of a product."""


def launch_integer_row(
    input: Tensor,
    weight: Integers,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    kind: str = "",
    tile: Tile | None = None,
) -> None:
    """Write the product of one row, or with `kind` the gated one, into `out` `[1, O]`."""
    size, cols = weight.shape
    size = size // 2 if kind else size
    groups = cols * weight.bits // (8 * GROUP_BYTES)
    block_rows, block_groups, num_warps = tile or rule(
        size, groups, gated=bool(kind), ordered=weight.order is not None
    )
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    with backend.device_guard(input):
        integer_linear_kernel.launch(
            (-(-size // block_rows), 1, 1),
            num_warps,
            (
                input.contiguous(), _or(weight.order, weight.values), norm, weight.values, weight.scale,
                _or(weight.zero, weight.values), _or(bias, input), _or(residual, input).contiguous(), out,
            ),
            _BASES[weight.bits],
            (),
            (eps, offset),
            (
                cols, size, weight.bits, weight.columns, weight.zero is not None, weight.order is not None,
                input.dtype == torch.float32, prologue is not None, has_weight, bias is not None,
                residual is not None, kind, overlap, block_rows, block_groups,
            ),
            overlap=overlap,
        )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


@functools.cache
def rule(size: int, groups: int, *, gated: bool, ordered: bool) -> Tile:
    """Return rows (of each half), groups and warps of a program: a thread has a group of all these rows.

    With eight rows of 8B's weights 5.0, 8.3, 14.6 and 26.2 µs, with four 5.5, 8.3, 15.9 and 28.1 (H200, Triton 3.6);
    columns in an order take more registers than eight rows of two halves leave.
    """
    block_groups = min(128, 1 << (groups - 1).bit_length())
    block_rows = (4 if HIP or (gated and ordered) else 8) // (2 if gated and HIP else 1)
    while size % block_rows:
        block_rows //= 2
    return block_rows, block_groups, max(WAVE, block_groups) // WAVE
