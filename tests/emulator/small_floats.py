"""Floats of 16, 8 and 4 bits: which numbers they have, and rounding to them, to nearest with ties to even.

MI300's 8-bit floats are "fnuz" (one zero, one NaN at 0x80, a bias of 8 or 16); MI350's those of the Open Compute
Project (OFP8, revision 1.0), whose e5m2 is the upper half of a float16. FP4 is e2m1 of the OCP Microscaling
specification.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .waves import U32


@dataclass(frozen=True)
class Format:
    """An 8-bit float."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    one_zero: bool
    """fnuz: the code of -0 is not a number, all others are."""
    infinities: bool = False

    @functools.cached_property
    def numbers(self) -> NDArray[np.float32]:
        """Return the number of each of the 256 codes."""
        return np.array([self._number(code) for code in range(256)], np.float32)

    def _number(self, code: int) -> float:
        sign = -1.0 if code & 0x80 else 1.0
        exponent = code >> self.mantissa_bits & (1 << self.exponent_bits) - 1
        mantissa = code & (1 << self.mantissa_bits) - 1
        highest = exponent == (1 << self.exponent_bits) - 1
        if self.one_zero:
            if code == 0x80:
                return float("nan")
        elif self.infinities and highest:
            return float("nan") if mantissa else sign * float("inf")
        elif highest and mantissa == (1 << self.mantissa_bits) - 1:
            return float("nan")
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - self.bias)
        return float(sign * (1 + fraction) * 2.0 ** (exponent - self.bias))

    @functools.cached_property
    def _positive(self) -> NDArray[np.float64]:
        """Every finite number from zero on: of code 0, 1, 2, …"""
        numbers = self.numbers[:128].astype(np.float64)
        return numbers[: int(np.isfinite(numbers).argmin()) or 128] if not np.isfinite(numbers).all() else numbers

    def encode(self, value: Any, saturates: bool) -> NDArray[np.uint32]:
        """Return the codes of the nearest numbers; what is too large is the largest, or else infinite or no number."""
        value = np.asarray(value, np.float32).astype(np.float64)
        size, positive = np.abs(value), self._positive
        high = np.clip(np.searchsorted(positive, size), 1, len(positive) - 1)
        under, over = positive[high - 1], positive[high]
        up = (over - size < size - under) | ((over - size == size - under) & (high % 2 == 0))
        code = np.where(up, high, high - 1)
        step = positive[-1] - positive[-2]
        # half a step beyond the largest rounds down only if its last bit is zero
        limit = positive[-1] + step / 2
        beyond = size > limit if len(positive) % 2 else size >= limit
        code = np.where(size > positive[-1], len(positive) - 1, code)
        not_a_number = 0x80 if self.one_zero else 0x7F
        if not saturates:
            code = np.where(beyond, len(positive) if self.infinities else not_a_number, code)
        code = np.where(np.isnan(value), not_a_number, code)
        keeps_sign = (code != 0x80) & ((code != 0) | (not self.one_zero))
        return (code + np.where(np.signbit(value) & keeps_sign, 0x80, 0)).astype(U32)


_E4M3FNUZ, _E5M2FNUZ = Format(4, 3, 8, one_zero=True), Format(5, 2, 16, one_zero=True)
_E4M3, _E5M2 = Format(4, 3, 7, one_zero=False), Format(5, 2, 15, one_zero=False, infinities=True)


def formats(chip: str) -> dict[str, Format]:
    """Return what `fp8` and `bf8` in the name of an instruction mean on a chip."""
    return {"fp8": _E4M3FNUZ, "bf8": _E5M2FNUZ} if chip.startswith("gfx94") else {"fp8": _E4M3, "bf8": _E5M2}


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def bfloat16_bits(value: Any) -> NDArray[np.uint32]:
    """Round float32 to bfloat16; return its bits."""
    given = np.asarray(value, np.float32)
    word = given.view(U32)
    rounded = word + (word >> U32(16) & U32(1)) + U32(0x7FFF) >> U32(16)
    return np.where(np.isnan(given), word >> U32(16) | U32(0x40), rounded).astype(U32)


def from_bfloat16(bits: Any) -> Any:
    """Return bfloat16's bits as float32."""
    return (np.asarray(bits).astype(U32) << U32(16)).view(np.float32)


def float16_bits(value: Any) -> NDArray[np.uint32]:
    """Round to float16; return its bits."""
    return np.ascontiguousarray(np.asarray(value).astype(np.float16)).view(np.uint16).astype(U32)


def from_float16(bits: Any) -> Any:
    """Return float16's bits as float32."""
    return np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)
