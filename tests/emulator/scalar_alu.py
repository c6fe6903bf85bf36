"""Scalar instructions: arithmetic of one number for a wave (MI300 ISA, "SOP1" to "SOPK").

All scalars are `[N]`, of 32 or 64 bits without a sign; SCC is `[N]` of bool.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import EXEC, Instruction
from .float_alu import COMPARE
from .integer_alu import leading_zeros, ones, reversed_bits
from .isa_errors import UnknownInstruction
from .operands import scalar
from .scalar_control import control, load
from .waves import U32, U64, Waves

Run = Callable[[Waves], Any]
I32, I64 = np.int32, np.int64
_LOGIC: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip


def scalar_instruction(one: Instruction, labels: dict[str, int]) -> Run:
    """Return what an instruction `s_…` does.

    Raises:
        UnknownInstruction: nobody has said what it does.
    """
    name = one.name.removeprefix("s_")
    for find in (control, load, _moves, _logic, _sums, _shifts, _fields, _comparisons, _others):
        if (run := find(one, name, labels)) is not None:
            return run
    raise UnknownInstruction(one.text)


def _width(name: str) -> int:
    return 64 if name.endswith("64") else 32


def _put(one: Instruction, width: int) -> Callable[[Waves, Any], None]:
    number = one.operands[0].number
    if width == 64:
        return lambda waves, value: waves.put_pair(number, value)
    return lambda waves, value: waves.put(number, value)


def signed(value: Any, width: int = 32) -> Any:
    """Return the bits as signed numbers of 64 bits."""
    value = np.asarray(value)
    return value.astype(U64).view(I64) if width == 64 else value.astype(U32).view(I32).astype(I64)


def _moves(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    width = _width(name)
    if name in ("mov_b32", "mov_b64"):
        put, read = _put(one, width), scalar(one.operands[1], width)
        return lambda waves: put(waves, read(waves))
    if name in ("cselect_b32", "cselect_b64"):
        put, first, second = _put(one, width), scalar(one.operands[1], width), scalar(one.operands[2], width)
        return lambda waves: put(waves, np.where(waves.scc, first(waves), second(waves)))
    if name in ("movk_i32", "addk_i32", "mulk_i32", "cmovk_i32"):
        value, put = _sixteen(one), _put(one, 32)
        to = one.operands[0].number
        if name == "movk_i32":
            return lambda waves: put(waves, U32(value & 0xFFFFFFFF))
        if name == "cmovk_i32":
            return lambda waves: put(waves, np.where(waves.scc, U32(value & 0xFFFFFFFF), waves.scalar[to]))
        if name == "mulk_i32":
            return lambda waves: put(waves, waves.scalar[to] * U32(value & 0xFFFFFFFF))

        def add(waves: Waves) -> None:
            exact = signed(waves.scalar[to]) + value
            waves.scc = np.broadcast_to((exact < -(1 << 31)) | (exact >= 1 << 31), (waves.count,))
            put(waves, (exact & 0xFFFFFFFF).astype(U32))

        return add
    return None


def _sixteen(one: Instruction, is_signed: bool = True) -> int:
    value = int(one.operands[1].value) & 0xFFFF
    return value - 0x10000 if is_signed and value & 0x8000 else value


def _set_scc(waves: Waves, value: Any) -> None:
    waves.scc = np.broadcast_to(np.asarray(value, bool), (waves.count,))


def _logic(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    width = _width(name)
    if match := re.fullmatch(r"(\w+?)_saveexec_b64", name):
        function, put, read = _LOGIC[match[1]], _put(one, 64), scalar(one.operands[1], 64)

        def save(waves: Waves) -> None:
            old = waves.exec
            new = function(np.asarray(read(waves)), old)
            put(waves, old)
            waves.put_pair(EXEC, new)
            _set_scc(waves, new != 0)

        return save
    match = re.fullmatch(r"(\w+?)_b(32|64)", name)
    if match is None or (match[1] not in _LOGIC and match[1] != "not"):
        return None
    put, reads = _put(one, width), [scalar(operand, width) for operand in one.operands[1:]]
    of_bits: Callable[..., Any] = (lambda a: ~np.asarray(a)) if match[1] == "not" else _LOGIC[match[1]]

    def run(waves: Waves) -> None:
        value = of_bits(*[read(waves) for read in reads])
        put(waves, value)
        _set_scc(waves, value != 0)

    return run


def _sums(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    match = re.fullmatch(r"(add|addc|sub|subb|mul|mul_hi|min|max|absdiff)_([iu])32|lshl(\d)_(add)_u32", name)
    if match is None:
        return None
    kind, is_signed, shift = match[1] or "add", match[2] == "i", int(match[3] or 0)
    put, first, second = _put(one, 32), scalar(one.operands[1]), scalar(one.operands[2])

    def run(waves: Waves) -> None:
        a, b = (signed(r(waves)) if is_signed else np.asarray(r(waves)).astype(I64) for r in (first, second))
        carry = waves.scc.astype(I64) if kind in ("addc", "subb") else 0
        if kind in ("min", "max"):
            _set_scc(waves, a < b if kind == "min" else a > b)
            exact = np.minimum(a, b) if kind == "min" else np.maximum(a, b)
        elif kind in ("mul", "mul_hi"):
            exact = (a.astype(U64) * b.astype(U64)).view(I64) if not is_signed else a * b
            exact = (
                exact.view(U64) >> U64(32)
                if kind == "mul_hi" and not is_signed
                else exact >> (32 * (kind == "mul_hi"))
            )
        else:
            exact = (
                np.abs(a - b) if kind == "absdiff" else ((a << shift) + b + carry if "add" in kind else a - b - carry)
            )
            over = (exact < -(1 << 31)) | (exact >= 1 << 31) if is_signed else (exact < 0) | (exact > 0xFFFFFFFF)
            _set_scc(waves, exact != 0 if kind == "absdiff" else over)
        put(waves, (np.asarray(exact).astype(U64) & U64(0xFFFFFFFF)).astype(U32))

    return run


def _shifts(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    match = re.fullmatch(r"(lshl|lshr|ashr)_[bi](32|64)", name)
    if match is None:
        return None
    width = int(match[2])
    put, first, second = _put(one, width), scalar(one.operands[1], width), scalar(one.operands[2])
    kind: Any = U64 if width == 64 else U32

    def run(waves: Waves) -> None:
        value = np.asarray(first(waves))
        by = (np.asarray(second(waves)) & U32(width - 1)).astype(kind)
        if match[1] == "ashr":
            whole: Any = I64 if width == 64 else I32
            found = (value.view(whole) >> by.astype(whole)).view(kind)
        else:
            found = value << by if match[1] == "lshl" else value >> by
        put(waves, found)
        _set_scc(waves, found != 0)

    return run


def _fields(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    width = _width(name)
    if name in ("bfm_b32", "bfm_b64"):
        put, first, second = _put(one, width), scalar(one.operands[1]), scalar(one.operands[2])
        kind: Any = U64 if width == 64 else U32

        def mask(waves: Waves) -> None:
            count, at = ((np.asarray(read(waves)) & U32(width - 1)).astype(kind) for read in (first, second))
            put(waves, ((kind(1) << count) - kind(1)) << at)

        return mask
    match = re.fullmatch(r"bfe_([iu])(32|64)", name)
    if match is None:
        return None
    put, first, second = _put(one, width), scalar(one.operands[1], width), scalar(one.operands[2])

    def run(waves: Waves) -> None:
        where = np.asarray(second(waves)).astype(I64)
        at, count = where & width - 1, np.minimum(where >> 16 & 0x7F, width)
        value = signed(first(waves), width) if match[1] == "i" else np.asarray(first(waves)).astype(U64).view(I64)
        value = value >> at if match[1] == "i" else (value.view(U64) >> at.astype(U64)).view(I64)
        drop = 64 - np.maximum(count, 1)
        found = value.astype(U64) << drop.astype(U64)
        found = found.view(I64) >> drop if match[1] == "i" else (found >> drop.astype(U64)).view(I64)
        found = np.where(count == 0, 0, found).astype(I64).view(U64)
        put(waves, found if width == 64 else (found & U64(0xFFFFFFFF)).astype(U32))
        _set_scc(waves, (found if width == 64 else found & U64(0xFFFFFFFF)) != 0)

    return run


def _comparisons(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    if match := re.fullmatch(r"bitcmp([01])_b(32|64)", name):
        width, wanted = int(match[2]), int(match[1])
        value, at = scalar(one.operands[0], width), scalar(one.operands[1])

        def test(waves: Waves) -> None:
            by = np.asarray(at(waves)).astype(U64) & U64(width - 1)
            _set_scc(waves, (np.asarray(value(waves)).astype(U64) >> by & U64(1)) == wanted)

        return test
    match = re.fullmatch(r"cmp(k?)_(\w\w)_([iu])(32|64)", name)
    if match is None:
        return None
    width, is_signed = int(match[4]), match[3] == "i"
    compare = COMPARE["ne" if match[2] == "lg" else match[2]]
    first = scalar(one.operands[0], width)
    if match[1]:
        value = I64(_sixteen(one, is_signed))
        second: Run = lambda waves: value
    else:
        right = scalar(one.operands[1], width)
        second = lambda waves: signed(right(waves), width) if is_signed else np.asarray(right(waves))
    if is_signed:
        return lambda waves: _set_scc(waves, compare(signed(first(waves), width), second(waves)))
    return lambda waves: _set_scc(
        waves, compare(np.asarray(first(waves)).astype(U64), np.asarray(second(waves)).astype(U64))
    )


def _others(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    width = _width(name)
    if name in ("bitset0_b32", "bitset1_b32"):
        to, at = one.operands[0].number, scalar(one.operands[1])

        def set_bit(waves: Waves) -> None:
            bit = U32(1) << (np.asarray(at(waves)) & U32(31))
            waves.put(to, waves.scalar[to] | bit if name[6] == "1" else waves.scalar[to] & ~bit)

        return set_bit
    if match := re.fullmatch(r"pack_([lh])([lh])_b32_b16", name):
        put, reads = _put(one, 32), [scalar(operand) for operand in one.operands[1:]]
        shifts = [U32(16 * (part == "h")) for part in match.groups()]

        def pack(waves: Waves) -> None:
            lower, upper = (
                np.asarray(r(waves)) >> shift & U32(0xFFFF) for r, shift in zip(reads, shifts, strict=True)
            )
            put(waves, lower | upper << U32(16))

        return pack
    if name not in _UNARY:
        return None
    function, sets_scc = _UNARY[name]
    put, read = _put(one, 64 if name == "brev_b64" else 32), scalar(one.operands[1], width)

    def run(waves: Waves) -> None:
        value = function(np.asarray(read(waves)))
        put(waves, value)
        if sets_scc:
            _set_scc(waves, value != 0)

    return run


def _both_halves(function: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda value: function((value & U64(0xFFFFFFFF)).astype(U32), (value >> U64(32)).astype(U32))


def _first_of_two(low: Any, high: Any) -> Any:
    from_high = leading_zeros(high)
    return np.where(high == 0, np.where(low == 0, U32(0xFFFFFFFF), leading_zeros(low) + U32(32)), from_high)


def _last_of_two(low: Any, high: Any) -> Any:
    return _first_of_two(reversed_bits(high), reversed_bits(low))


def _sign(bits: int) -> Callable[[Any], Any]:
    top = U32(1 << bits - 1)
    return lambda value: ((value & U32((1 << bits) - 1)) ^ top) - top


_UNARY: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "brev_b32": (reversed_bits, False),
    "brev_b64": (_both_halves(lambda a, b: reversed_bits(a).astype(U64) << U64(32) | reversed_bits(b)), False),
    "bcnt1_i32_b32": (ones, True), "bcnt0_i32_b32": (lambda a: U32(32) - ones(a), True),
    "bcnt1_i32_b64": (_both_halves(lambda a, b: ones(a) + ones(b)), True),
    "bcnt0_i32_b64": (_both_halves(lambda a, b: U32(64) - ones(a) - ones(b)), True),
    "abs_i32": (lambda a: np.abs(a.astype(U32).view(I32)).view(U32), True),
    "sext_i32_i8": (_sign(8), False), "sext_i32_i16": (_sign(16), False),
    "ff1_i32_b32": (lambda a: leading_zeros(reversed_bits(a)), False),
    "ff1_i32_b64": (_both_halves(_last_of_two), False),
    "flbit_i32_b32": (leading_zeros, False), "flbit_i32_b64": (_both_halves(_first_of_two), False),
}  # fmt: skip
"""Of one operand: the function, and whether SCC says that the result is not zero."""
