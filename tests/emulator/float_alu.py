"""Vector instructions on floats, by name, on numpy's floats of the instruction's width.

Reciprocals, roots, exponentials and logarithms are the nearest number here, and within one unit in the last place on a
chip. In float32 they take subnormals for zero (LLVM expands around that, "AMDGPULegalizerInfo").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

F16, F32, F64 = np.float16, np.float32, np.float64


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return `a * b + c`, rounded once; in float64 by way of numpy's longest float, so nearly always."""
    kind = np.asarray(a).dtype.type
    wide: Any = np.longdouble if kind is F64 else F64
    product, c = np.asarray(a).astype(wide) * np.asarray(b).astype(wide), np.asarray(c).astype(wide)
    total = product + c
    if kind is F32:
        # a product of two float32 is exact: only a sum that is halfway, or subnormal, may be rounded wrong
        word = total.view(np.uint64)
        doubtful = (word & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
        doubtful |= np.abs(total) < np.finfo(F32).tiny
        if doubtful.any():
            total = np.where(doubtful, _rounded_to_odd(product, c, total), total)
    return total.astype(kind)


def _rounded_to_odd(a: Any, b: Any, total: Any) -> Any:
    """Return `a + b` with its last digit odd where digits are lost, so that it can be rounded once more."""
    part = total - a
    lost = (a - (total - part)) + (b - part)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    beside = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & np.isfinite(lost) & even, beside, total)


def _flushed(value: Any) -> Any:
    value = np.asarray(value)
    if value.dtype != F32:
        return value
    return np.where(np.abs(value) < np.finfo(F32).tiny, np.copysign(F32(0), value), value)


def _by_double(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def found(a: Any) -> Any:
        a = _flushed(a)
        return _flushed(function(a.astype(F64)).astype(a.dtype))

    return found


def _fract(a: Any) -> Any:
    below_one = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return np.minimum(a - np.floor(a), below_one)


def _median(a: Any, b: Any, c: Any) -> Any:
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), np.fmin(np.fmin(a, b), c), middle)


def scaled(a: Any, exponent: Any) -> Any:
    """Return `a * 2**exponent`, rounded once."""
    a = np.asarray(a)
    wide = np.longdouble if a.dtype == F64 else F64
    return np.ldexp(a.astype(wide), np.clip(exponent, -3000, 3000)).astype(a.dtype)


FLOAT: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "subrev": lambda a, b: b - a, "mul": lambda a, b: a * b,
    "mul_legacy": lambda a, b: np.where((a == 0) | (b == 0), a.dtype.type(0), a * b),
    "max": np.fmax, "min": np.fmin, "max3": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "min3": lambda a, b, c: np.fmin(np.fmin(a, b), c), "med3": _median,
    "maximum3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "minimum3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "rcp": _by_double(lambda a: 1 / a), "rcp_iflag": _by_double(lambda a: 1 / a),
    "rsq": _by_double(lambda a: 1 / np.sqrt(a)), "sqrt": _by_double(np.sqrt), "exp": _by_double(np.exp2),
    "log": _by_double(np.log2), "sin": _by_double(lambda a: np.sin(2 * np.pi * a)),
    "cos": _by_double(lambda a: np.cos(2 * np.pi * a)),
    "rndne": np.rint, "trunc": np.trunc, "floor": np.floor, "ceil": np.ceil, "fract": _fract,
    "fma": fma, "mad": fma, "mov": lambda a: a,
    "frexp_mant": lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a),
}  # fmt: skip
"""Of one type, without the type: `v_add_f16`, `v_add_f32` and `v_add_f64` are `add`."""


def exponent(a: Any) -> Any:
    """Return the exponent's bits of floats of 32 or 64 bits."""
    a = np.asarray(a)
    if a.dtype == F64:
        return (a.view(np.uint64) >> np.uint64(52)).astype(np.int64) & 0x7FF
    return (a.view(np.uint32) >> np.uint32(23)).astype(np.int64) & 0xFF


def _subnormal(a: Any) -> Any:
    return (a != 0) & (exponent(a) == 0)


def div_scale(value: Any, denominator: Any, numerator: Any) -> tuple[Any, Any]:
    """Return what a quotient's part is scaled to, and whether the quotient has to be scaled back (V_DIV_SCALE).

    Where the inverse and the quotient are subnormal AMD's text scales the denominator by 2**64, to infinity; divisions
    are right with 2**-64.
    """
    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    of_double = value.dtype == F64
    step, near, tiny = (128, 768, 53) if of_double else (64, 96, 23)
    one = value.dtype.type(1)
    inverse_small = _subnormal((one / denominator).astype(value.dtype))  # which v_rcp_f32 would take for zero
    quotient_small = _subnormal((numerator / denominator).astype(value.dtype))
    up, down = scaled(value, step), scaled(value, -step)
    is_denominator, is_numerator = value == denominator, value == numerator
    cases = [
        ((numerator == 0) | (denominator == 0), one * np.nan, False),
        (exponent(numerator) - exponent(denominator) >= near, np.where(is_denominator, up, value), True),
        (_subnormal(denominator), up, False),
        (inverse_small & quotient_small, np.where(is_denominator, down, value), True),
        (inverse_small, down, False),
        (quotient_small, np.where(is_numerator, up, value), True),
        (exponent(numerator) <= tiny, up, False),
    ]
    conditions = [case[0] for case in cases]
    result = np.select(conditions, [np.broadcast_to(case[1], value.shape) for case in cases], value)
    back = np.select(conditions, [np.full(value.shape, case[2]) for case in cases], False)
    return result.astype(value.dtype), back


def div_fmas(a: Any, b: Any, c: Any, back: Any) -> Any:
    """Return `a * b + c`, scaled back in the lanes where V_DIV_SCALE says so.

    AMD's text says by 2**32, which undoes no scaling of 2**64; the texts of later chips by 2**±64, up where the
    quotient is large.
    """
    sum_ = fma(a, b, c)
    of_double = sum_.dtype == F64
    step, middle = (128, 1023) if of_double else (64, 127)
    return np.where(back, scaled(sum_, np.where(exponent(c) > middle, step, -step)), sum_)


def div_fixup(quotient: Any, denominator: Any, numerator: Any) -> Any:
    """Return the quotient with its sign, and what it is of zeros, infinities and numbers that are none."""
    kind = np.asarray(quotient).dtype.type
    sign = np.signbit(denominator) ^ np.signbit(numerator)
    gap = exponent(numerator) - exponent(denominator)
    least = -150 if kind is F32 else -1075
    size = np.abs(quotient)
    size = np.where(gap < least, kind(0), size)
    size = np.where(np.isinf(denominator) | (numerator == 0), kind(0), size)
    size = np.where((denominator == 0) | np.isinf(numerator), kind(np.inf), size)
    both = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    size = np.where(both | np.isnan(denominator) | np.isnan(numerator), kind(np.nan), size)
    return np.where(sign, -size, size).astype(kind)


def classes(a: Any, wanted: Any) -> Any:
    """Return whether each number is of a class whose bit is set (V_CMP_CLASS)."""
    kind = a.dtype.type
    bits = a.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[a.itemsize])
    quiet = (bits >> bits.dtype.type({2: 9, 4: 22, 8: 51}[a.itemsize]) & bits.dtype.type(1)).astype(bool)
    negative, small = np.signbit(a), (a != 0) & (np.abs(a) < np.finfo(kind).tiny)
    normal = np.isfinite(a) & (a != 0) & ~small
    found: Any = False
    tests = (np.isnan(a) & ~quiet, np.isnan(a) & quiet, np.isinf(a) & negative, normal & negative, small & negative,
             (a == 0) & negative,
             (a == 0) & ~negative, small & ~negative, normal & ~negative, np.isinf(a) & ~negative)  # fmt: skip
    for bit, test in enumerate(tests):
        found = found | test & (wanted >> np.uint32(bit) & np.uint32(1)).astype(bool)
    return found


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "f": lambda a, b: (a == b) & False, "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "lg": lambda a, b: (a < b) | (a > b), "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: (a == a) & (b == b), "u": lambda a, b: (a != a) | (b != b), "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)), "ngt": lambda a, b: ~(a > b), "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b), "nlt": lambda a, b: ~(a < b), "t": lambda a, b: (a == b) | True,
    "tru": lambda a, b: (a == b) | True,
}  # fmt: skip
"""Comparisons by name: those of floats with `n` are true where one is not a number."""
