"""Products of one row that read the same input, side by side in one kernel, which may leave the row's norm behind too.

I in_features, O_i out_features of product i:

    y_i = activation(x' W_iᵀ + b_i) * factor_i        x' = norm(x), or x        and x' itself, of a LayerNorm

Queries that a file projects for themselves, beside keys and values that cross-attention projects from something else,
are a product more in every layer; a norm that is read by a product and, as a residual, once more behind it is another
kernel. The weights stay where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core import backend
from ..launching.launch import Kernel, overlaps
from ..linear.gemv import are_parameters
from ..linear.linear import is_one_row, tile_for
from ..linear.prologue import LayerNormPrologue, Norm, norm_arguments, shift_of
from .pending_ops import Product

MOST = 3
"""Products of a kernel."""

CASES = """
def beside(cols, outs, norm=None, activation="", keeps=False):
    x, outs = tensor(1, 1, cols), [many(out) for out in outs]
    made = [tensor(1, 1, out) for out in outs]
    bias = norm is not None
    products = [Product(x, tensor(out, cols), parameter(out) if bias else None, norm, activation) for out in outs]
    return launch_beside(products, made, tensor(1, 1, cols) if keeps else None)

case("Whisper large, q k v", beside, 1280, (1280, 2560), layer_norm(1280))
case("BART large, q k v", beside, 1024, (1024, 2048), layer_norm(1024), keeps=True)
case("BART large, up", beside, 1024, (4096,), layer_norm(1024), "gelu", True)
case("T5 large, q k v", beside, 1024, (1024, 2048), prologue(1024))
case("three of 1,000", beside, 1000, (1000, 500, 250))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.gated_activation import _activate
    from ..linear.gemv import first_columns, norm_parameters, normalised, scaled

    @triton.jit
    def _beside_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        shift_ptr,
        weight_ptr,
        second_weight_ptr,
        third_weight_ptr,
        bias_ptr,
        second_bias_ptr,
        third_bias_ptr,
        out_ptr,
        second_out_ptr,
        third_out_ptr,
        normed_ptr,
        eps,
        offset,
        factor,
        second_factor,
        third_factor,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        SECOND_O: tl.constexpr,
        THIRD_O: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        CENTRED: tl.constexpr,
        SHIFT: tl.constexpr,
        BIAS: tl.constexpr,
        SECOND_BIAS: tl.constexpr,
        THIRD_BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        KEEPS: tl.constexpr,
        OVERLAP: tl.constexpr,
        AHEAD: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        program = tl.program_id(0)
        start_of_second: tl.constexpr = (O + BLOCK_ROWS - 1) // BLOCK_ROWS
        start_of_third: tl.constexpr = start_of_second + (SECOND_O + BLOCK_ROWS - 1) // BLOCK_ROWS
        first_row, end, biases = program * BLOCK_ROWS, O, O if BIAS else 0
        if SECOND_O > 0:
            beyond = program >= start_of_second
            first_row = tl.where(beyond, (program - start_of_second) * BLOCK_ROWS, first_row)
            end = tl.where(beyond, SECOND_O, end)
            biases = tl.where(beyond, SECOND_O if SECOND_BIAS else 0, biases)
            weight_ptr = tl.where(beyond, second_weight_ptr, weight_ptr)
            bias_ptr = tl.where(beyond, second_bias_ptr, bias_ptr)
            out_ptr = tl.where(beyond, second_out_ptr, out_ptr)
            factor = tl.where(beyond, second_factor, factor)
        if THIRD_O > 0:
            far = program >= start_of_third
            first_row = tl.where(far, (program - start_of_third) * BLOCK_ROWS, first_row)
            end = tl.where(far, THIRD_O, end)
            biases = tl.where(far, THIRD_O if THIRD_BIAS else 0, biases)
            weight_ptr = tl.where(far, third_weight_ptr, weight_ptr)
            bias_ptr = tl.where(far, third_bias_ptr, bias_ptr)
            out_ptr = tl.where(far, third_out_ptr, out_ptr)
            factor = tl.where(far, third_factor, factor)
        row = first_row + tl.arange(0, BLOCK_ROWS)
        live = row < end
        weight_row = weight_ptr + row.to(tl.int64)[:, None] * I
        col = tl.arange(0, BLOCK_COLS)
        weight = tl.load(weight_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
        if AHEAD:
            bias = tl.load(bias_ptr + row, mask=row < biases, other=0.0)
        early: tl.constexpr = AHEAD and I <= BLOCK_COLS
        gain = 0.0
        shift = 0.0
        if early:
            gain, shift = norm_parameters(norm_ptr, shift_ptr, col, col < I, NORM_WEIGHT, SHIFT)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if not AHEAD:
            bias = tl.load(bias_ptr + row, mask=row < biases, other=0.0)
        x, square, mean, inverse = first_columns(
            x_ptr,
            norm_ptr,
            shift_ptr,
            gain,
            shift,
            col,
            eps,
            offset,
            I,
            NORM,
            NORM_WEIGHT,
            CENTRED,
            SHIFT,
            early,
            BLOCK_COLS,
        )
        if KEEPS:  # the only block of columns: no load of weights waits for the store
            kept = tl.where(program == 0, I, 0)
            tl.store(normed_ptr + col, x.to(normed_ptr.dtype.element_ty), mask=col < kept)
        total = weight.to(tl.float32) * x
        for start in tl.static_range(BLOCK_COLS, I, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            weight = tl.load(weight_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
            if CENTRED:
                x = normalised(x_ptr, norm_ptr, shift_ptr, col, col < I, offset, mean, inverse, NORM_WEIGHT, SHIFT)
            else:
                x, more = scaled(x_ptr, norm_ptr, col, col < I, offset, NORM, NORM_WEIGHT)
                square += more
            total += weight.to(tl.float32) * x
        y = tl.sum(total, 1)
        if NORM and not CENTRED:
            y *= tl.rsqrt(tl.sum(square, 0) / I + eps)
        if BIAS or SECOND_BIAS or THIRD_BIAS:
            y += bias.to(tl.float32)
        if ACTIVATION != "":
            y = _activate(y, ACTIVATION)
        y *= factor
        tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=live)

    beside_kernel = Kernel(_beside_kernel)


def alike(product: Product, other: Product) -> bool:
    """Return whether one kernel can have both products: their rows are the same, and what is before and after them."""
    plain = other.residual is None and not other.transposed and other.activation == product.activation
    return plain and is_same(product.input, other.input) and is_same_norm(product.prologue, other.prologue)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, read in the same way."""
    if one is other:
        return True
    lies = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (one, other)]
    return lies[0] == lies[1]


def is_same_norm(one: Norm | None, other: Norm | None) -> bool:
    """Return whether two norms have the same weights, and everything else alike; so do two that are none."""
    if one is None or other is None:
        return one is other
    if type(one) is not type(other):
        return False
    return all(
        is_same(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(one, other, strict=True)
    )


def launch_beside(products: Sequence[Product], outs: Sequence[Tensor], normed: Tensor | None) -> bool:
    """Write products of one row; return False where each has to be launched alone.

    Args:
        products: up to `MOST` that are `alike`.
        outs: what each is written into, of the input's dtype.
        normed: what their LayerNorm is written into, by the program of the first rows, which has to have all columns
            at once: between loads of weights a store is slower than a kernel for the norm; None for nothing.
    """
    first = products[0]
    rows = [product.weight.shape[0] for product in products]
    cols = first.weight.shape[1]
    shape = tile_for("linear", sum(rows), cols, first.weight)
    if shape is None or not is_one_row(first.input) or (normed is not None and cols > shape[1]):
        return False
    block_rows, block_cols, num_warps = shape
    x, filling = first.input, MOST - len(products)
    weights = [product.weight for product in products]
    biases = [x if product.bias is None else product.bias for product in products]
    norm, eps, offset, has_weight = norm_arguments(first.prologue, x)
    shift = shift_of(first.prologue)
    overlap, ahead = overlaps(x), are_parameters(first.prologue, *(product.bias for product in products))
    with backend.device_guard(x):
        beside_kernel.launch(
            (sum(-(-count // block_rows) for count in rows), 1, 1),
            num_warps,
            (
                x.contiguous(), norm, x if shift is None else shift, *weights, *weights[:1] * filling, *biases,
                *biases[:1] * filling, *outs, *[outs[0]] * filling, x if normed is None else normed,
            ),
            (),
            (),
            (eps, offset, *(product.factor for product in products), *(1.0,) * filling),
            (
                cols, *rows, *(0,) * filling, first.prologue is not None, has_weight,
                isinstance(first.prologue, LayerNormPrologue), shift is not None,
                *(product.bias is not None for product in products), *(False,) * filling, first.activation,
                normed is not None, overlap, overlap and ahead, block_rows, block_cols,
            ),
            overlap=overlap,
        )  # fmt: skip
    return True
