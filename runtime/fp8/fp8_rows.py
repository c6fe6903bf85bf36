"""Rows of activations in 8 bits, each with its scale.

N is any leading shape, I the row, `s[n]` the smallest power of two with max|x[n]| <= s[n] * LARGEST (`device.e4m3`):

    values[n] = e4m3(x[n] / s[n])

An operator that writes rows may quantise them in the same pass and remember the result with the tensor that it returns
(`remember`); whoever multiplies them asks `quantized_rows`, which quantises what was not, or was written to since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device import row_tiles
from ..device.e4m3 import Quantized, dtype_for, has_fp8, quantize, rounded_numbers
from ..guards.tensor_version import version_of
from ..launching.launch import Kernel, chip_of, pretends

CASES = """
case("8B, prompt", quantized_rows, tensor(PROMPT, LLAMA_8B.hidden_size))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.e4m3 import encode, magnitude, scale_of

    @triton.jit(do_not_specialize=["row_count"])
    def _fp8_rows_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        code_ptr,
        scale_ptr,
        row_count,
        stride,
        I: tl.constexpr,  # noqa: E741
        FNUZ: tl.constexpr,
        CONVERT: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        live = row < row_count
        x_row = x_ptr + row.to(tl.int64) * stride
        code_row = code_ptr + row.to(tl.int64) * I
        if I <= BLOCK_COLS:
            col = tl.arange(0, BLOCK_COLS)[None, :]
            mask = live & (col < I)
            x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
            scale, inverse = scale_of(tl.max(magnitude(x), axis=1, keep_dims=True), FNUZ)
            tl.store(code_row + col, encode(x * inverse, FNUZ, CONVERT), mask=mask)
        else:
            largest = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.int32)
            for start in range(0, I, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                x = tl.load(x_row + col, mask=live & (col < I), other=0.0).to(tl.float32)
                largest = tl.maximum(largest, magnitude(x))
            scale, inverse = scale_of(tl.max(largest, axis=1, keep_dims=True), FNUZ)
            for start in range(0, I, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                mask = live & (col < I)
                x = tl.load(x_row + col, mask=mask, other=0.0).to(tl.float32)
                tl.store(code_row + col, encode(x * inverse, FNUZ, CONVERT), mask=mask)
        tl.store(scale_ptr + row, scale, mask=live)

    fp8_rows_kernel = Kernel(_fp8_rows_kernel)


def quantized_rows(x: Tensor) -> Quantized:
    """Return the rows of `x` `[N, I]` in 8 bits: those remembered with it, else quantised now."""
    remembered = getattr(x, "_fp8_rows", None)
    if remembered is not None and remembered[0] == version_of(x):
        found: Quantized = remembered[1]
        return found
    return Quantized(*_op(x))


def remember(x: Tensor, quantized: Quantized) -> None:
    """Keep the rows of `x` in 8 bits with it, until something writes to it."""
    if (version := version_of(x)) is not None:
        x._fp8_rows = (version, quantized)  # type: ignore[attr-defined]


def empty_rows(x: Tensor) -> Quantized:
    """Return memory for the rows of `x` in 8 bits."""
    return Quantized(x.new_empty(x.shape, dtype=dtype_for(x)), x.new_empty(x.shape[:-1], dtype=torch.float32))


def _forward(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.numel() and backend.uses_triton(x):
        if x.dtype in row_tiles.KERNEL_DTYPES:
            return _launch(x)
        backend.count_fallback("fp8_rows", "dtype")
    return _reference(x)


def _reference(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] == 0:
        return empty_rows(x)
    values, scale = quantize(x, dtype_for(x))
    return values.contiguous(), scale.contiguous()


def _launch(x: Tensor, convert: bool | None = None) -> tuple[Tensor, Tensor]:
    out = empty_rows(x)
    size = x.shape[-1]
    count = x.numel() // size
    x, stride = row_tiles.flatten(x)
    block_rows, block_cols, num_warps = row_tiles.tile(size, count)
    with backend.device_guard(x):
        fp8_rows_kernel.launch(
            (-(-count // block_rows), 1, 1),
            num_warps,
            (x, out.values.view(torch.uint8), out.scale),
            (count,),
            (stride,),
            (),
            (
                size,
                out.values.dtype == torch.float8_e4m3fnuz,
                converts(x) if convert is None else convert,
                block_rows,
                block_cols,
            ),
        )
    return out


def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(x)


_proven: dict[int, bool] = {}
"""By device."""


def converts(tensor: Tensor) -> bool:
    """Return whether kernels round to 8 bits by the chip's conversion: AMD's chips that have one, once it is proven.

    At the first use outside a capture it has to give plain torch's bytes for every number of the format, halfway
    between neighbours and next to that; else integers are rounded, and `explain` counts it.
    """
    chip = chip_of(tensor)
    if chip is None or chip.backend != "hip" or not has_fp8(tensor):
        return False
    if pretends():
        return True
    device = tensor.get_device()
    if device not in _proven:
        if torch.cuda.is_current_stream_capturing():
            return False
        _proven[device] = rounds_alike(tensor)
    if not _proven[device]:
        backend.count_fallback("fp8_rows", "conversion_differs")
    return _proven[device]


def rounds_alike(like: Tensor) -> bool:
    """Return whether the conversion of the device of `like` gives plain torch's bytes."""
    dtype = dtype_for(like)
    numbers = rounded_numbers(dtype)[None]  # whose largest makes the scale a 1
    got, _ = _launch(numbers.to(like.device), convert=True)
    return torch.equal(got.view(torch.uint8).cpu(), quantize(numbers, dtype).values.view(torch.uint8))


_op = backend.register("fp8_rows", "(Tensor x) -> (Tensor, Tensor)", _forward, _fake)
