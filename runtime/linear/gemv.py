"""The kernels of one row, `[1, I]`, by a weight: a product, and a gated one, with what stands before and after them.

I in_features, O out_features. A program reads rows of the weight, all of whose columns it multiplies by the input in
fp32 on the ordinary units; with a norm it computes what that divides by from the same columns. `linear` has the
formulas. In a graph the bias of a product, and of a row in one block what its norm multiplies by and adds, come as the
weight does while the kernel ahead runs, where nothing in the step writes them: behind the wait each would be a trip to
memory of its own. So are residuals asked for with the row, and not behind its sums.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ..core import backend
from ..launching.launch import Kernel, overlaps
from ..launching.tiles import Tile
from . import joined_storage
from .prologue import LayerNormPrologue, Norm, norm_arguments, shift_of

if backend.triton_installed():
    import triton
    import triton.language as tl

    from .blocks import widened
    from .gated_activation import _activate

    @triton.jit
    def scaled(x_ptr, norm_ptr, col, mask, offset, NORM: tl.constexpr, WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load columns of the input, times the norm's weight where there is one, and their squares; all fp32."""
        x = tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32)
        square = x * x
        if NORM and WEIGHT:
            x *= tl.load(norm_ptr + col, mask=mask, other=0.0).to(tl.float32) + offset
        return x, square

    @triton.jit
    def norm_parameters(  # type: ignore[no-untyped-def]
        norm_ptr, shift_ptr, col, mask, WEIGHT: tl.constexpr, SHIFT: tl.constexpr
    ):
        """Load columns of what a norm multiplies by, and of what it adds; 0 for what it has not."""
        gain = 0.0
        shift = 0.0
        if WEIGHT:
            gain = tl.load(norm_ptr + col, mask=mask, other=0.0)
        if SHIFT:
            shift = tl.load(shift_ptr + col, mask=mask, other=0.0)
        return gain, shift

    @triton.jit
    def first_columns(  # type: ignore[no-untyped-def]
        x_ptr, norm_ptr, shift_ptr, gain, shift, col, eps, offset, I: tl.constexpr, NORM: tl.constexpr,  # noqa: E741
        WEIGHT: tl.constexpr, CENTRED: tl.constexpr, SHIFT: tl.constexpr, EARLY: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):  # fmt: skip
        """Return what `normalised`, or `scaled`, does of the first columns; if EARLY, `norm_parameters` are at hand.

        Beside it the squares, and mean and inverse deviation of the row: 0 where the norm has no use for them.
        """
        mean = 0.0
        inverse = 0.0
        if CENTRED:
            mean, inverse = statistics(x_ptr, eps, I, BLOCK_COLS)
        if not EARLY:
            gain, shift = norm_parameters(norm_ptr, shift_ptr, col, col < I, WEIGHT, SHIFT)
        x = tl.load(x_ptr + col, mask=col < I, other=0.0).to(tl.float32)
        square = x * x
        if CENTRED:
            x = (x - mean) * inverse
        if NORM and WEIGHT:
            x *= gain.to(tl.float32) + offset
        if SHIFT:
            x += shift.to(tl.float32)
        return x, square, mean, inverse

    @triton.jit
    def statistics(x_ptr, eps, I: tl.constexpr, BLOCK_COLS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E741
        """Return mean and inverse deviation of a row, both of what it is beyond its first element.

        So a mean far from zero takes no digits from the variance: it is at most I times the variance, squared.
        """
        first = tl.load(x_ptr).to(tl.float32)
        total = tl.zeros([BLOCK_COLS], tl.float32)
        square = tl.zeros([BLOCK_COLS], tl.float32)
        for start in tl.static_range(0, I, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            x = tl.load(x_ptr + col, mask=col < I, other=0.0).to(tl.float32)
            x = tl.where(col < I, x - first, 0.0)
            total += x
            square += x * x
        mean = tl.sum(total, 0) / I
        variance = tl.maximum(tl.sum(square, 0) / I - mean * mean, 0.0)
        return mean + first, tl.rsqrt(variance + eps)

    @triton.jit
    def normalised(  # type: ignore[no-untyped-def]
        x_ptr, norm_ptr, shift_ptr, col, mask, offset, mean, inverse, WEIGHT: tl.constexpr, SHIFT: tl.constexpr
    ):
        """Load columns of the input as a LayerNorm leaves them, in fp32."""
        x = (tl.load(x_ptr + col, mask=mask, other=0.0).to(tl.float32) - mean) * inverse
        if WEIGHT:
            x *= tl.load(norm_ptr + col, mask=mask, other=0.0).to(tl.float32) + offset
        if SHIFT:
            x += tl.load(shift_ptr + col, mask=mask, other=0.0).to(tl.float32)
        return x

    @triton.jit
    def _linear_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        shift_ptr,
        weight_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        eps,
        offset,
        factor,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        SCALED: tl.constexpr,
        DECODE: tl.constexpr,
        FNUZ: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        CENTRED: tl.constexpr,
        SHIFT: tl.constexpr,
        BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        AHEAD: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < O
        weight_row = weight_ptr + row[:, None] * I
        col = tl.arange(0, BLOCK_COLS)
        weight = tl.load(weight_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
        if SCALED:
            scale = tl.load(scale_ptr + row, mask=live, other=0.0)
        if AHEAD and BIAS:
            bias = tl.load(bias_ptr + row, mask=live, other=0.0)
        early: tl.constexpr = AHEAD and I <= BLOCK_COLS
        gain = 0.0
        shift = 0.0
        if early:
            gain, shift = norm_parameters(norm_ptr, shift_ptr, col, col < I, NORM_WEIGHT, SHIFT)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if RESIDUAL:
            residual = tl.load(residual_ptr + row, mask=live, other=0.0)
        if BIAS and not AHEAD:
            bias = tl.load(bias_ptr + row, mask=live, other=0.0)
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
        total = widened(weight, DECODE, FNUZ) * x
        for start in tl.static_range(BLOCK_COLS, I, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            weight = tl.load(weight_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
            if CENTRED:
                x = normalised(x_ptr, norm_ptr, shift_ptr, col, col < I, offset, mean, inverse, NORM_WEIGHT, SHIFT)
            else:
                x, more = scaled(x_ptr, norm_ptr, col, col < I, offset, NORM, NORM_WEIGHT)
                square += more
            total += widened(weight, DECODE, FNUZ) * x
        y = tl.sum(total, 1)
        if SCALED:
            y *= scale
        if NORM and not CENTRED:
            y *= tl.rsqrt(tl.sum(square, 0) / I + eps)
        if BIAS:
            y += bias.to(tl.float32)
        if ACTIVATION != "":
            y = _activate(y, ACTIVATION)
        y *= factor
        if RESIDUAL:
            y += residual.to(tl.float32)
        tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=live)

    @triton.jit
    def _gated_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        shift_ptr,
        weight_ptr,
        scale_ptr,
        bias_ptr,
        out_ptr,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        SCALED: tl.constexpr,
        DECODE: tl.constexpr,
        FNUZ: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        CENTRED: tl.constexpr,
        SHIFT: tl.constexpr,
        BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < O
        gate_row = weight_ptr + row[:, None] * I
        up_row = gate_row + O * I
        col = tl.arange(0, BLOCK_COLS)
        gate = tl.load(gate_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
        up = tl.load(up_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
        if SCALED:
            gate_scale = tl.load(scale_ptr + row, mask=live, other=0.0)
            up_scale = tl.load(scale_ptr + O + row, mask=live, other=0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if CENTRED:
            mean, inverse = statistics(x_ptr, eps, I, BLOCK_COLS)
            x = normalised(x_ptr, norm_ptr, shift_ptr, col, col < I, offset, mean, inverse, NORM_WEIGHT, SHIFT)
        else:
            x, square = scaled(x_ptr, norm_ptr, col, col < I, offset, NORM, NORM_WEIGHT)
        gates = widened(gate, DECODE, FNUZ) * x
        ups = widened(up, DECODE, FNUZ) * x
        for start in tl.static_range(BLOCK_COLS, I, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            gate = tl.load(gate_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
            up = tl.load(up_row + col, mask=live[:, None] & (col < I), other=0.0, cache_modifier=".cg")
            if CENTRED:
                x = normalised(x_ptr, norm_ptr, shift_ptr, col, col < I, offset, mean, inverse, NORM_WEIGHT, SHIFT)
            else:
                x, more = scaled(x_ptr, norm_ptr, col, col < I, offset, NORM, NORM_WEIGHT)
                square += more
            gates += widened(gate, DECODE, FNUZ) * x
            ups += widened(up, DECODE, FNUZ) * x
        g = tl.sum(gates, 1)
        u = tl.sum(ups, 1)
        if SCALED:
            g *= gate_scale
            u *= up_scale
        if NORM and not CENTRED:
            inverse = tl.rsqrt(tl.sum(square, 0) / I + eps)
            g *= inverse
            u *= inverse
        if BIAS:
            g += tl.load(bias_ptr + row, mask=live, other=0.0).to(tl.float32)
            u += tl.load(bias_ptr + O + row, mask=live, other=0.0).to(tl.float32)
        tl.store(out_ptr + row, (_activate(g, ACTIVATION) * u).to(out_ptr.dtype.element_ty), mask=live)

    linear_kernel = Kernel(_linear_kernel)
    gated_kernel = Kernel(_gated_kernel)


class Weight(NamedTuple):
    """A weight as the kernels of one row read it."""

    values: Tensor
    """`[O, I]`, in the input's dtype or in 8 bits."""
    scale: Tensor | None = None
    """`[O]`, fp32, what the rows of a weight in 8 bits are times; None for 1."""
    decode: bool = False
    """Whether the values are bytes, of a format that the device does not convert."""
    fnuz: bool = False
    """Whether the bytes are of e4m3fnuz, and not of e4m3fn."""


def launch_linear(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None,
    prologue: Norm | None,
    residual: Tensor | None,
    out: Tensor,
    shape: Tile,
    activation: str = "",
    factor: float = 1.0,
) -> None:
    """Run the kernel of `linear` with a tile."""
    block_rows, block_cols, num_warps = shape
    values, scale, decode, fnuz = weight
    rows, cols = values.shape
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    shift = shift_of(prologue)
    overlap = overlaps(input)
    with backend.device_guard(input):
        linear_kernel.launch(
            (-(-rows // block_rows), 1, 1),
            num_warps,
            (
                input.contiguous(), norm, _or(shift, input), values, _or(scale, input), _or(bias, input),
                _or(residual, input).contiguous(), out,
            ),
            (),
            (),
            (eps, offset, factor),
            (
                cols, rows, scale is not None, decode, fnuz, prologue is not None, has_weight,
                isinstance(prologue, LayerNormPrologue), shift is not None, bias is not None, activation,
                residual is not None, overlap, overlap and are_parameters(prologue, bias), block_rows, block_cols,
            ),
            overlap=overlap,
        )  # fmt: skip


def are_parameters(prologue: Norm | None, *biases: Tensor | None) -> bool:
    """Return whether no kernel of a step writes a norm's weights and biases: a kernel may load them before it waits.

    They are parameters, or several in one memory.
    """
    given = [*biases, *(() if prologue is None else (prologue.weight, shift_of(prologue)))]
    return all(tensor is None or type(tensor) is nn.Parameter or joined_storage.holds(tensor) for tensor in given)


def launch_gated(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None,
    kind: str,
    prologue: Norm | None,
    out: Tensor,
    shape: Tile,
) -> None:
    """Run the kernel of `gated_linear` with a tile."""
    block_rows, block_cols, num_warps = shape
    values, scale, decode, fnuz = weight
    rows, cols = values.shape[0] // 2, values.shape[1]
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    shift = shift_of(prologue)
    overlap = overlaps(input)
    with backend.device_guard(input):
        gated_kernel.launch(
            (-(-rows // block_rows), 1, 1),
            num_warps,
            (input.contiguous(), norm, _or(shift, input), values, _or(scale, input), _or(bias, input), out),
            (),
            (),
            (eps, offset),
            (
                cols, rows, scale is not None, decode, fnuz, prologue is not None, has_weight,
                isinstance(prologue, LayerNormPrologue), shift is not None, bias is not None, kind, overlap,
                block_rows, block_cols,
            ),
            overlap=overlap,
        )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
