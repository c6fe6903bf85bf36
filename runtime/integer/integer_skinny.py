"""Products of 2 to 16 rows in 16 bits with a weight of 4-bit integers, on NVIDIA's matrix units (`integer_mma`).

The formulas are those of `integer_linear`. A program has WARPS warps: thread `4 r + q` of one has a group of 32
columns of row `r` of eight and the same group of another row, the warps and the four `q` next to each other; the four
have one scale between them. UNROLL steps of these are loaded at once, of TILES tiles of rows, which share the columns
of SETS times eight inputs. No load is masked: the last step of a row begins in the one before, whose columns then
count as zeros, and so does the last tile of rows, which two programs then write alike. The other rows are the next
eight, or of a gated product those of the second half.

One row has a kernel on the ordinary units: with one, these took 25 µs where that takes 26 for the gate and up of 8B,
but 18.6 for 14.6 for its down (H200, Triton 3.6).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import Kernel, chip_of, collects, overlaps, processors
from ..linear.prologue import norm_arguments
from ..norms.norm_form import Prologue
from .integer_weights import Integers

CASES = """
from hf_rewrite_runtime.launching.launch import HIP

if not HIP:
    def product(count, rows, cols, norm, kind="", zero=False):
        zeros = tensor(rows, cols // 128, dtype=torch.uint8) if zero else None
        weight = Integers(tensor(rows, cols // 8, dtype=torch.int32), tensor(rows, cols // 128), zeros, 4, 128)
        out = tensor(count, 1, rows // 2 if kind else rows)
        given, added = (prologue(cols), None) if norm else (None, None if kind else out)
        return launch_integer_skinny(tensor(count, 1, cols), weight, None, given, added, out, kind)

    size, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
    for count in (8, 16):
        case(f"8B, qkv, {count} rows", product, count, 6144, size, norm=True)
        case(f"8B, gate, up, {count} rows", product, count, 2 * inner, size, norm=True, kind="silu")
        case(f"8B, down, {count} rows", product, count, size, inner, norm=False)
    case("8B, down, zeros", product, 8, size, inner, norm=False, zero=True)
"""

MOST_ROWS = 16

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.gated_activation import _activate
    from .integer_mma import integer_products, pairs_of, squares_of, times

    @triton.jit
    def _loaded(  # type: ignore[no-untyped-def]
        one_ptr, other_ptr, start, TILE: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr
    ):
        """Load the words of UNROLL steps from group `start` on, of either row of each tile."""
        words = ()
        for u in tl.static_range(UNROLL):
            for tile in tl.static_range(TILES):
                at = (tile * TILE + start + u * STEP) * 4
                words += (tl.load(one_ptr + at), tl.load(other_ptr + at))  # type: ignore[assignment]
        return words

    @triton.jit
    def _columns(x_ptr, mask, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load a group's 32 columns as 16 words of pairs."""
        x = ()
        for i in tl.static_range(4):
            x += pairs_of(tl.load(x_ptr + 4 * i, mask=mask, other=0), PTX)
        return x

    @triton.jit
    def _zeros(zero_ptr, group, ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
        if ZERO:
            return tl.load(zero_ptr + group).to(tl.int32)
        else:
            return tl.full(group.shape, 8, tl.int32)

    @triton.jit
    def _factors(square, eps, SIZE: tl.constexpr, WARPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what a norm multiplies columns `2 q` and `2 q + 1` by, each `[1, 4]`."""
        squares = tl.sum(tl.sum(tl.reshape(square, (WARPS, 8, 4)), 2), 0)
        even, odd = tl.split(tl.reshape(tl.rsqrt(squares / SIZE + eps), (1, 4, 2)))
        return even, odd

    @triton.jit(do_not_specialize=["count"])
    def _integer_skinny_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        values_ptr,
        scale_ptr,
        zero_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        count,
        eps,
        GROUPS: tl.constexpr,
        O: tl.constexpr,  # noqa: E741
        SHARING: tl.constexpr,
        ZERO: tl.constexpr,
        HALF: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        ACTIVATION: tl.constexpr,
        OVERLAP: tl.constexpr,
        PTX: tl.constexpr,
        SETS: tl.constexpr,
        TILES: tl.constexpr,
        WARPS: tl.constexpr,
        UNROLL: tl.constexpr,
    ):
        """`x_ptr` and `norm_ptr` are of words; a row has GROUPS groups, of which SHARING have one scale."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        gated: tl.constexpr = ACTIVATION != ""
        height: tl.constexpr = 8 if gated else 16
        thread = tl.arange(0, 32 * WARPS)
        row = thread % 32 // 4
        quarter = thread % 4
        group = thread // 32 * 4 + quarter
        word = tl.arange(0, 4)[None, :]
        first = tl.minimum(tl.program_id(0) * height * TILES, O - height * TILES)
        place = (first + row).to(tl.int64) * GROUPS + group
        apart: tl.constexpr = O * GROUPS if gated else 8 * GROUPS
        tile_size: tl.constexpr = height * GROUPS
        step: tl.constexpr = 4 * WARPS
        last: tl.constexpr = GROUPS - step * UNROLL
        one_ptr = values_ptr + place[:, None] * 4 + word
        other_ptr = one_ptr + apart * 4
        columns = group[:, None] * 16 + word
        sums = ()
        for _ in tl.static_range(4 * SETS * TILES):
            sums += (tl.zeros((32 * WARPS,), tl.float32),)  # type: ignore[assignment]
        square = ()
        for _ in tl.static_range(SETS):
            square += (tl.zeros((32 * WARPS,), tl.float32),)  # type: ignore[assignment]
        following = _loaded(one_ptr, other_ptr, 0, tile_size, step, TILES, UNROLL)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for start in tl.range(0, GROUPS, step * UNROLL):
            begin = tl.minimum(start, last)
            loaded = following
            if step * UNROLL < GROUPS:
                after = tl.minimum(start + step * UNROLL, last)
                following = _loaded(one_ptr, other_ptr, after, tile_size, step, TILES, UNROLL)
            for u in tl.static_range(UNROLL):
                at = begin + u * step
                new = group + at >= start
                if NORM_WEIGHT:
                    gain = _columns(norm_ptr + at * 16 + columns, new[:, None], PTX)
                x = ()
                squares = ()
                for number in tl.static_range(SETS):
                    says = new & (row + 8 * number < count)
                    of_row = (row + 8 * number)[:, None] * (16 * GROUPS)
                    said = _columns(x_ptr + at * 16 + columns + of_row, says[:, None], PTX)
                    if NORM:
                        even, odd = squares_of(said, HALF, PTX)
                        own = tl.where(row == 2 * quarter, even, tl.where(row == 2 * quarter + 1, odd, 0.0))
                        squares += (square[number] + own,)  # type: ignore[assignment]
                    if NORM_WEIGHT:
                        gained = ()
                        for i in tl.static_range(16):
                            gained += (times(said[i], gain[i], HALF, PTX),)  # type: ignore[assignment]
                        x += (gained,)  # type: ignore[assignment]
                    else:
                        x += (said,)  # type: ignore[assignment]
                if NORM:
                    square = squares
                added = ()
                for tile in tl.static_range(TILES):
                    here = (place + tile * tile_size + at) // SHARING
                    there = (place + apart + tile * tile_size + at) // SHARING
                    one_scale = tl.load(scale_ptr + here).to(tl.float32)
                    other_scale = tl.load(scale_ptr + there).to(tl.float32)
                    products = integer_products(
                        loaded[2 * (u * TILES + tile)],
                        loaded[2 * (u * TILES + tile) + 1],
                        x,
                        thread % 32,
                        _zeros(zero_ptr, here, ZERO),
                        _zeros(zero_ptr, there, ZERO),
                        HALF,
                        PTX,
                    )
                    for number in tl.static_range(SETS):
                        added += (  # type: ignore[assignment]
                            sums[4 * (tile * SETS + number)] + products[4 * number] * one_scale,
                            sums[4 * (tile * SETS + number) + 1] + products[4 * number + 1] * one_scale,
                            sums[4 * (tile * SETS + number) + 2] + products[4 * number + 2] * other_scale,
                            sums[4 * (tile * SETS + number) + 3] + products[4 * number + 3] * other_scale,
                        )
                sums = added
        for tile in tl.static_range(TILES):
            column = first + tile * height + tl.arange(0, 8)[:, None]
            further = column + (O if gated else 8)
            for number in tl.static_range(SETS):
                for side in tl.static_range(2):
                    of_row = 8 * number + 2 * tl.arange(0, 4)[None, :] + side
                    there = of_row < count
                    y = tl.sum(tl.reshape(sums[4 * (tile * SETS + number) + side], (WARPS, 8, 4)), 0)
                    z = tl.sum(tl.reshape(sums[4 * (tile * SETS + number) + side + 2], (WARPS, 8, 4)), 0)
                    if NORM:
                        factors = _factors(square[number], eps, 32 * GROUPS, WARPS)
                        y *= factors[side]
                        z *= factors[side]
                    if BIAS:
                        y += tl.load(bias_ptr + column).to(tl.float32)
                        z += tl.load(bias_ptr + further).to(tl.float32)
                    out = out_ptr + of_row * O
                    if gated:
                        gated_sum = _activate(y, ACTIVATION) * z
                        tl.store(out + column, gated_sum.to(out_ptr.dtype.element_ty), mask=there & (column < O))
                    else:
                        if RESIDUAL:
                            residual = residual_ptr + of_row * O
                            y += tl.load(residual + column, mask=there & (column < O), other=0.0).to(tl.float32)
                            z += tl.load(residual + further, mask=there & (column < O), other=0.0).to(tl.float32)
                        tl.store(out + column, y.to(out_ptr.dtype.element_ty), mask=there & (column < O))
                        tl.store(out + further, z.to(out_ptr.dtype.element_ty), mask=there & (column < O))

    integer_skinny_kernel = Kernel(_integer_skinny_kernel)


class Form(NamedTuple):
    """How a program divides its part of a weight."""

    tiles: int
    """Tiles of rows: of 16, or of 8 of either half."""
    warps: int
    unroll: int
    """Steps of `4 warps` groups that are loaded at once."""


_agrees: dict[tuple[object, ...], bool] = {}
"""Whether the threads of a variant were seen to be where its products need them."""


def form_for(input: Tensor, weight: Integers, prologue: Prologue | None, kind: str) -> Form | None:
    """Return how to divide the weight; None where these kernels do not compute the product.

    They read rows of 16 bits by words, a norm whose weight has the input's dtype and nothing added to it, and scales
    of 128 columns or more.
    """
    chip = chip_of(input)
    multiplies = chip is None or (chip.backend == "cuda" and int(chip.arch.removeprefix("sm_")) >= 80)
    if not multiplies or weight.bits != 4 or weight.order is not None or input.dtype == torch.float32:
        return None
    gain = None if prologue is None else prologue.weight
    if prologue is not None and (prologue.offset or (gain is not None and gain.dtype != input.dtype)):
        return None
    if any(tensor is not None and tensor.data_ptr() % 16 for tensor in (input, gain)):
        return None
    rows, cols = weight.shape
    count = input.numel() // cols
    if not 1 < count <= MOST_ROWS or weight.columns % 128:
        return None
    return rule(rows, cols // 32, count, processors(input.get_device() if input.is_cuda else None), bool(kind))


@functools.cache
def rule(rows: int, groups: int, count: int, processors: int, gated: bool) -> Form | None:
    """Return tiles, warps and steps for a weight; None where it has too few rows or columns."""
    size, height = (rows // 2, 8) if gated else (rows, 16)
    wide = count <= 8 and size >= 4 * processors * height
    first = Form(2, 4, 1) if wide else Form(1, 8, 1)
    for form in (first, Form(1, 4, 1), Form(1, 2, 1), Form(1, 1, 1)):
        if groups >= 4 * form.warps * form.unroll and size >= height * form.tiles and size % 8 == 0:
            return form
    return None


def run_integer_skinny(
    input: Tensor,
    weight: Integers,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    kind: str = "",
) -> bool:
    """Write the product, or with `kind` the gated one, into `out` `[N, O]` where these kernels compute it.

    The host looks at what a variant's first launch outside a capture wrote: threads that are not where they should be
    write no numbers, and then the other kernels are asked, from there on. So they are for what a capture meets first.

    Returns:
        Whether `out` was written.
    """
    form = form_for(input, weight, prologue, kind)
    sets = out.numel() > 8 * out.shape[-1]
    variant = input.device, input.dtype, *weight.shape, weight.columns, prologue is None, kind, form, sets
    if form is None or _agrees.get(variant) is False:
        return False
    captured = input.is_cuda and torch.cuda.is_current_stream_capturing()
    if captured and variant not in _agrees:
        return False
    launch_integer_skinny(input, weight, bias, prologue, residual, out, kind, form)
    if variant not in _agrees and not collects():
        if bool(out.isnan().any()):
            given = [tensor for tensor in (input, residual, bias, weight.scale) if tensor is not None]
            if all(bool(tensor.isfinite().all()) for tensor in given):
                _agrees[variant] = False
                backend.count_fallback("integer_linear", "threads_elsewhere")
            return False
        _agrees[variant] = True
    return True


def launch_integer_skinny(
    input: Tensor,
    weight: Integers,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    kind: str = "",
    form: Form | None = None,
) -> None:
    """Run the kernel."""
    rows, cols = weight.shape
    form = form or form_for(input, weight, prologue, kind)
    assert form is not None
    size = rows // 2 if kind else rows
    count = input.numel() // cols
    norm, eps, _, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    with backend.device_guard(input):
        integer_skinny_kernel.launch(
            (-(-size // ((8 if kind else 16) * form.tiles)), 1, 1),
            form.warps,
            (
                input.contiguous().view(torch.int32), norm.view(torch.int32), weight.values, weight.scale,
                weight.values if weight.zero is None else weight.zero, input if bias is None else bias,
                input if residual is None else residual.contiguous(), out,
            ),
            (count,),
            (),
            (eps,),
            (
                cols // 32, size, weight.columns // 32, weight.zero is not None, input.dtype == torch.float16,
                prologue is not None, has_weight, bias is not None, residual is not None, kind, overlap,
                chip_of(input) is not None, -(-count // 8), *form,
            ),
            overlap=overlap,
        )  # fmt: skip
