"""The 8-bit float e4m3: 1 sign, 4 exponent and 3 mantissa bits, with a power of two for each row of a matrix.

    x[n, i] ≈ s[n] q[n, i]        s[n] the smallest power of two with max|x[n]| <= s[n] * LARGEST

A float loses nothing to a scale that is a power of two (only its subnormals begin elsewhere), and everything becomes
exact but the one rounding: `s q` is a bf16, products of two of them are an fp32, and a kernel, a vendor's library and
plain torch quantise to the same bits. Rows with an infinity or NaN get a NaN as scale, so that it shows in the result.

`e4m3fn` (NVIDIA, MI350) ends at 448; `e4m3fnuz` (MI300) has another bias, no negative zero, and ends at 240. Which a
chip takes is `launch.fp8_dtype`. Where Triton converts it in hardware a kernel reads it as it is; elsewhere (below
compute capability 8.9, MI200, the interpreter) as bytes that it decodes by shifts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import chip_of, fp8_dtype

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def scale_of(largest_bits, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the scale of rows and its inverse, from the bits of their largest magnitudes."""
        field = ((largest_bits + (0x0FFFFF if FNUZ else 0x1FFFFF)) >> 23) - (7 if FNUZ else 8)
        field = tl.where(field < 1, 1, field)
        bits = tl.where(largest_bits >= 0x7F800000, 0x7FC00000, field << 23)
        return bits.to(tl.float32, bitcast=True), ((254 - field) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def magnitude(x):  # type: ignore[no-untyped-def]
        """Return the bits of |x|, an fp32: integers in the order of the numbers, above them all NaN."""
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF

    @triton.jit
    def encode(x, FNUZ: tl.constexpr, CONVERT: tl.constexpr = False):  # type: ignore[no-untyped-def]
        """Return fp32 numbers within the format's range as its bytes, rounded to nearest, ties to even.

        With CONVERT by the chip's own conversion, two at a time (`rows.converts`); else by operations on integers,
        which round alike on every chip.
        """
        if CONVERT:
            if FNUZ:
                return x.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
            else:
                return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        bits = x.to(tl.int32, bitcast=True)
        absolute = bits & 0x7FFFFFFF
        rounded = (absolute + 0x7FFFF + ((absolute >> 20) & 1)) >> 20
        # Adding a power of two whose last bit is the format's smallest number rounds to a multiple of that.
        if FNUZ:
            small = (absolute.to(tl.float32, bitcast=True) + 8192.0).to(tl.int32, bitcast=True) - 0x46000000
            code = tl.where(absolute < 0x3C000000, small, rounded - 952)
        else:
            small = (absolute.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            code = tl.where(absolute < 0x3C800000, small, rounded - 960)
        code = tl.where(code > 127, 127, code)
        sign = (bits >> 24) & 0x80
        if FNUZ:
            sign = tl.where(code == 0, 0, sign)
        return (code | sign).to(tl.uint8)


class Quantized(NamedTuple):
    """Rows in 8 bits: `values` `[..., I]` in e4m3 and `scale` `[...]` in fp32."""

    values: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return `scale * values`; exact in bf16, fp32 and fp64."""
        if dtype == torch.bfloat16:
            return self.values.to(dtype) * self.scale.to(dtype).unsqueeze(-1)
        wide = torch.promote_types(dtype, torch.float32)
        return (self.values.to(wide) * self.scale.to(wide).unsqueeze(-1)).to(dtype)


def quantize(rows: Tensor, dtype: torch.dtype) -> Quantized:
    """Return rows `[..., I]` in 8 bits, in plain torch."""
    wide = rows.to(torch.float32)
    scale, inverse = scales(wide.abs().amax(-1), dtype)
    return Quantized((wide * inverse.unsqueeze(-1)).to(dtype), scale)


def scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales of rows whose largest magnitudes, in fp32, are `largest`, and their inverses."""
    bits = largest.view(torch.int32)
    carry, bias = (0x0FFFFF, 7) if dtype == torch.float8_e4m3fnuz else (0x1FFFFF, 8)
    field = (((bits + carry) >> 23) - bias).clamp_min(1)
    scale = torch.where(bits >= 0x7F800000, 0x7FC00000, field << 23).to(torch.int32)
    return scale.view(torch.float32), ((254 - field) << 23).view(torch.float32)


def dtype_for(tensor: Tensor) -> torch.dtype:
    """Return the format of the device of `tensor`."""
    chip = chip_of(tensor)
    return fp8_dtype("" if chip is None else chip.arch)


def as_read(values: Tensor) -> Tensor:
    """Return e4m3 values as kernels on their device read them."""
    return values if has_fp8(values) else values.view(torch.uint8)


def rounded_numbers(dtype: torch.dtype) -> Tensor:
    """Return numbers that show how a conversion rounds, fp32, on a CPU.

    All numbers of the format, those halfway between neighbours, and the fp32 next to these on either side.
    """
    numbers = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    middle = (numbers[1:] + numbers[:-1]) / 2
    beside = (torch.nextafter(middle, torch.full_like(middle, far)) for far in (-1e9, 1e9))
    return torch.cat((numbers, middle, *beside))


def has_fp8(tensor: Tensor) -> bool:
    """Return whether the device of `tensor` converts and multiplies the format in hardware."""
    chip = chip_of(tensor)
    if chip is None:
        return False
    return int(chip.arch[3:]) >= 89 if chip.backend == "cuda" else chip.arch.startswith(("gfx94", "gfx95", "gfx12"))
