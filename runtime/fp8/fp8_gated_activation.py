"""`activation(gate) * up` of a gated MLP, its rows quantised to 8 bits in the same pass.

N is any leading shape, I the intermediate size, `s` as in `device.e4m3`:

    y = activation(gate) * up            rounded as `gated_activation` rounds it
    values[n] = e4m3(y[n] / s[n])        the product itself is never written
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device import row_tiles
from ..device.e4m3 import Quantized, dtype_for, quantize
from ..launching.launch import WAVE, Kernel
from ..linear.gated_activation import _REFERENCE, _refusal
from .fp8_rows import converts, empty_rows

CASES = """
def activated(model):
    gate, up = tensor(PROMPT, 2 * model.intermediate_size).chunk(2, -1)
    return quantized_gated_activation(gate, up, "silu")

case("8B, prompt", activated, LLAMA_8B)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.e4m3 import encode, magnitude, scale_of
    from ..linear.gated_activation import _activate

    @triton.jit
    def _product(gate_row, up_row, col, mask, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return columns of the product in fp32, rounded to the gate's dtype."""
        gate = tl.load(gate_row + col, mask=mask, other=0.0)
        up = tl.load(up_row + col, mask=mask, other=0.0)
        activated = _activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
        return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)

    @triton.jit
    def _fp8_gated_activation_kernel(  # type: ignore[no-untyped-def]
        gate_ptr,
        up_ptr,
        code_ptr,
        scale_ptr,
        gate_stride,
        up_stride,
        I: tl.constexpr,  # noqa: E741
        ACTIVATION: tl.constexpr,
        FNUZ: tl.constexpr,
        CONVERT: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        gate_row = gate_ptr + row * gate_stride
        up_row = up_ptr + row * up_stride
        code_row = code_ptr + row * I
        if I <= BLOCK_COLS:
            col = tl.arange(0, BLOCK_COLS)
            y = _product(gate_row, up_row, col, col < I, ACTIVATION)
            scale, inverse = scale_of(tl.max(magnitude(y), axis=0), FNUZ)
            tl.store(code_row + col, encode(y * inverse, FNUZ, CONVERT), mask=col < I)
        else:
            largest = tl.zeros((BLOCK_COLS,), tl.int32)
            for start in range(0, I, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)
                y = _product(gate_row, up_row, col, col < I, ACTIVATION)
                largest = tl.maximum(largest, magnitude(y))
            scale, inverse = scale_of(tl.max(largest, axis=0), FNUZ)
            for start in range(0, I, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)
                y = _product(gate_row, up_row, col, col < I, ACTIVATION)
                tl.store(code_row + col, encode(y * inverse, FNUZ, CONVERT), mask=col < I)
        tl.store(scale_ptr + row, scale)

    fp8_gated_activation_kernel = Kernel(_fp8_gated_activation_kernel)

MAX_BLOCK_COLS = 16384
"""A wider row is walked twice, and the activation computed twice."""


def quantized_gated_activation(gate: Tensor, up: Tensor, kind: str) -> Quantized:
    """Return the rows of `activation(gate) * up` in 8 bits.

    Args:
        gate: `[N, I]`, any strides; usually a column slice of a packed projection.
        up: `[N, I]`, likewise.
        kind: of the activation, as `gated_activation.activation_kind` names it.
    """
    return Quantized(*_op(gate, up, kind))


def _forward(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if gate.numel() and backend.uses_triton(gate):
        reason = _refusal(gate, up) or (None if gate.dtype == up.dtype else "dtype")
        if reason is None:
            return _launch(gate, up, activation)
        backend.count_fallback("fp8_gated_activation", reason)
    return _reference(gate, up, activation)


def _reference(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    product = _REFERENCE[activation](gate) * up
    if product.shape[-1] == 0:
        return empty_rows(product)
    values, scale = quantize(product, dtype_for(gate))
    return values.contiguous(), scale.contiguous()


def _launch(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    out = empty_rows(gate)
    size = gate.shape[-1]
    gate, gate_stride = row_tiles.flatten(gate)
    up, up_stride = row_tiles.flatten(up)
    block = min(1 << (size - 1).bit_length(), MAX_BLOCK_COLS)
    with backend.device_guard(gate):
        fp8_gated_activation_kernel.launch(
            (gate.numel() // size, 1, 1),
            max(1, min(512, block // 16) // WAVE),
            (gate, up, out.values.view(torch.uint8), out.scale),
            (),
            (gate_stride, up_stride),
            (),
            (size, activation, out.values.dtype == torch.float8_e4m3fnuz, converts(out.values), block),
        )
    return out


def _fake(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return empty_rows(gate)


_op = backend.register(
    "fp8_gated_activation", "(Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)", _forward, _fake
)
