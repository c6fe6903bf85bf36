"""Vector instructions on integers, by name: functions of the bits that they read (MI300 ISA, "VOP1" to "VOP3P")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .waves import LANE, U32, U64

I32, I64, U16, I16 = np.int32, np.int64, np.uint16, np.int16
ALL = U32(0xFFFFFFFF)
LOW = U32(0xFFFF)


def signed(bits: Any) -> Any:
    """Return 32 bits as a signed number."""
    return np.asarray(bits, U32).view(I32)


def long(bits: Any) -> Any:
    """Return a number of 64 bits, for products and sums that need them."""
    return np.asarray(bits).astype(U64)


def low(value: Any) -> Any:
    """Return the lower 32 bits of integers of 64."""
    return (np.asarray(value).astype(I64) & 0xFFFFFFFF).astype(U32)


def short(bits: Any) -> Any:
    """Return the lower 16 bits as a signed number."""
    return (np.asarray(bits, U32) & LOW).astype(U16).view(I16)


def from_short(value: Any) -> Any:
    """Return signed numbers of 16 bits as bits, zeros above."""
    return np.asarray(value, I16).view(U16).astype(U32)


def _signed_24(bits: Any) -> Any:
    return ((np.asarray(bits).astype(I64) & 0xFFFFFF) ^ 0x800000) - 0x800000


def _bfe_u(a: Any, offset: Any, width: Any) -> Any:
    return (long(a) >> long(offset & U32(31)) & (U64(1) << long(width & U32(31))) - U64(1)).astype(U32)


def _bfe_i(a: Any, offset: Any, width: Any) -> Any:
    field, width = _bfe_u(a, offset, width).astype(I64), (width & U32(31)).astype(I64)
    sign = np.where(width > 0, I64(1) << np.maximum(width - 1, 0), 0)
    return low((field ^ sign) - sign)


def reversed_bits(value: Any) -> Any:
    """Return 32 bits, the first last."""
    found = np.asarray(value, U32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        found = found >> U32(shift) & U32(mask) | (found & U32(mask)) << U32(shift)
    return found >> U32(16) | found << U32(16)


def leading_zeros(value: Any) -> Any:
    """Return how many zeros come before the first one, and -1 where there is none."""
    value = np.asarray(value, U32)
    return np.where(value == 0, ALL, (32 - np.frexp(value.astype(np.float64))[1]).astype(I32).view(U32))


def _leading_signs(value: Any) -> Any:
    number = signed(value)
    return leading_zeros(np.where(number < 0, ~number, number).astype(I32).view(U32))


def ones(value: Any) -> Any:
    """Return how many bits are set, of 32."""
    value = np.asarray(value, U32)
    value = value - (value >> U32(1) & U32(0x55555555))
    value = (value & U32(0x33333333)) + (value >> U32(2) & U32(0x33333333))
    return ((value + (value >> U32(4)) & U32(0x0F0F0F0F)) * U32(0x01010101)) >> U32(24)


def _ones_below(begin: int) -> Callable[[Any, Any], Any]:
    below = np.array([(1 << int(np.clip(lane - begin, 0, 32))) - 1 for lane in LANE], U64).astype(U32)
    return lambda mask, added: ones(np.asarray(mask) & below) + added


def _permuted(a: Any, b: Any, select: Any) -> Any:
    eight = long(a) << U64(32) | long(b)
    found: Any = U32(0)
    for byte in range(4):
        chosen = select >> U32(8 * byte) & U32(0xFF)
        plain = (eight >> long(np.minimum(chosen, 7) * U32(8)) & U64(0xFF)).astype(U32)
        sign_of = np.clip(chosen.astype(I64) - 8, 0, 3) * 16 + 15
        sign = (eight >> sign_of.astype(U64) & U64(1)).astype(U32) * U32(0xFF)
        value = np.where(chosen < 8, plain, np.where(chosen < 12, sign, np.where(chosen == 12, U32(0), U32(0xFF))))
        found = found | value.astype(U32) << U32(8 * byte)
    return found


def _median(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _of_signed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*map(signed, given)).view(U32)


def _of_short(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: from_short(function(*map(short, given)))


def _of_unsigned_short(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*(np.asarray(value, U32) & LOW for value in given)) & LOW


def truth_table(table: int) -> Callable[[Any, Any, Any], Any]:
    """Return the function of three bits of which `table` holds a bit for each of their values (BITOP3)."""

    def found(a: Any, b: Any, c: Any) -> Any:
        result: Any = U32(0)
        for case in range(8):
            if table >> case & 1:
                result = result | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        return result

    return found


WORD: dict[str, Callable[..., Any]] = {
    "and_b32": lambda a, b: a & b, "or_b32": lambda a, b: a | b, "xor_b32": lambda a, b: a ^ b,
    "xnor_b32": lambda a, b: ~(a ^ b), "not_b32": lambda a: ~a, "mov_b32": lambda a: a,
    "lshlrev_b32": lambda a, b: b << (a & U32(31)), "lshrrev_b32": lambda a, b: b >> (a & U32(31)),
    "ashrrev_i32": lambda a, b: (signed(b) >> signed(a & U32(31))).view(U32),
    "add_u32": lambda a, b: a + b, "sub_u32": lambda a, b: a - b, "subrev_u32": lambda a, b: b - a,
    "add_i32": lambda a, b: a + b, "sub_i32": lambda a, b: a - b,
    "add3_u32": lambda a, b, c: a + b + c, "add_lshl_u32": lambda a, b, c: (a + b) << (c & U32(31)),
    "lshl_add_u32": lambda a, b, c: (a << (b & U32(31))) + c, "lshl_or_b32": lambda a, b, c: a << (b & U32(31)) | c,
    "and_or_b32": lambda a, b, c: a & b | c, "or3_b32": lambda a, b, c: a | b | c,
    "xad_u32": lambda a, b, c: (a ^ b) + c, "bfe_u32": _bfe_u, "bfe_i32": _bfe_i,
    "bfi_b32": lambda a, b, c: a & b | ~a & c,
    "bfm_b32": lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    "bfrev_b32": reversed_bits, "perm_b32": _permuted,
    "alignbit_b32": lambda a, b, c: ((long(a) << U64(32) | long(b)) >> long(c & U32(31))).astype(U32),
    "alignbyte_b32": lambda a, b, c: ((long(a) << U64(32) | long(b)) >> long((c & U32(3)) * U32(8))).astype(U32),
    "mul_lo_u32": lambda a, b: a * b, "mul_hi_u32": lambda a, b: (long(a) * long(b) >> U64(32)).astype(U32),
    "mul_hi_i32": lambda a, b: low(signed(a).astype(I64) * signed(b).astype(I64) >> 32),
    "mul_u32_u24": lambda a, b: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)),
    "mul_hi_u32_u24": lambda a, b: (long(a & U32(0xFFFFFF)) * long(b & U32(0xFFFFFF)) >> U64(32)).astype(U32),
    "mul_i32_i24": lambda a, b: low(_signed_24(a) * _signed_24(b)),
    "mad_u32_u24": lambda a, b, c: (a & U32(0xFFFFFF)) * (b & U32(0xFFFFFF)) + c,
    "mad_i32_i24": lambda a, b, c: low(_signed_24(a) * _signed_24(b) + signed(c).astype(I64)),
    "max_u32": np.maximum, "min_u32": np.minimum, "max_i32": _of_signed(np.maximum), "min_i32": _of_signed(np.minimum),
    "max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "max3_i32": _of_signed(lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_i32": _of_signed(lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "med3_i32": _of_signed(_median), "med3_u32": _median,
    "sad_u32": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
    "ffbh_u32": leading_zeros, "ffbh_i32": _leading_signs, "ffbl_b32": lambda a: leading_zeros(reversed_bits(a)),
    "bcnt_u32_b32": lambda a, b: ones(a) + b, "mbcnt_lo_u32_b32": _ones_below(0), "mbcnt_hi_u32_b32": _ones_below(32),
    "accvgpr_read_b32": lambda a: a, "accvgpr_write_b32": lambda a: a, "accvgpr_mov_b32": lambda a: a,
    "lshlrev_b16": lambda a, b: (b & LOW) << (a & U32(15)) & LOW,
    "lshrrev_b16": lambda a, b: (b & LOW) >> (a & U32(15)),
    "ashrrev_i16": lambda a, b: from_short(short(b) >> short(a & U32(15))),
    "add_u16": _of_unsigned_short(lambda a, b: a + b), "sub_u16": _of_unsigned_short(lambda a, b: a - b),
    "subrev_u16": _of_unsigned_short(lambda a, b: b - a), "mul_lo_u16": _of_unsigned_short(lambda a, b: a * b),
    "mad_legacy_u16": _of_unsigned_short(lambda a, b, c: a * b + c),
    "mad_u16": _of_unsigned_short(lambda a, b, c: a * b + c),
    "max_u16": _of_unsigned_short(np.maximum), "min_u16": _of_unsigned_short(np.minimum),
    "max_i16": _of_short(np.maximum), "min_i16": _of_short(np.minimum),
}  # fmt: skip
"""Of 32 bits."""

LONG: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "mov_b64": ((64,), lambda a: a),
    "lshlrev_b64": ((32, 64), lambda a, b: b << long(a & U32(63))),
    "lshrrev_b64": ((32, 64), lambda a, b: b >> long(a & U32(63))),
    "ashrrev_i64": ((32, 64), lambda a, b: (np.asarray(b).view(I64) >> long(a & U32(63)).astype(I64)).view(U64)),
    "lshl_add_u64": ((64, 32, 64), lambda a, b, c: (a << long(b & U32(7))) + c),
    "mad_u64_u32": ((32, 32, 64), lambda a, b, c: long(a) * long(b) + c),
    "mad_i64_i32": (
        (32, 32, 64),
        lambda a, b, c: (signed(a).astype(I64) * signed(b).astype(I64) + np.asarray(c).view(I64)).view(U64),
    ),
}
"""The bits of each operand, and a function to 64."""

SATURATED: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "add_u32": (0, 0xFFFFFFFF, lambda a, b: np.asarray(a).astype(I64) + np.asarray(b).astype(I64)),
    "sub_u32": (0, 0xFFFFFFFF, lambda a, b: np.asarray(a).astype(I64) - np.asarray(b).astype(I64)),
    "subrev_u32": (0, 0xFFFFFFFF, lambda a, b: np.asarray(b).astype(I64) - np.asarray(a).astype(I64)),
    "add_i32": (-(1 << 31), (1 << 31) - 1, lambda a, b: signed(a).astype(I64) + signed(b).astype(I64)),
    "sub_i32": (-(1 << 31), (1 << 31) - 1, lambda a, b: signed(a).astype(I64) - signed(b).astype(I64)),
    "add_u16": (0, 0xFFFF, lambda a, b: (a & LOW).astype(I64) + (b & LOW).astype(I64)),
    "sub_u16": (0, 0xFFFF, lambda a, b: (a & LOW).astype(I64) - (b & LOW).astype(I64)),
}
"""With `clamp`: the least, the largest, the exact value."""
