"""Vector instructions: what they read and write, and which function of the tables they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import conversions, cross_lane, packed_alu
from .assembly_text import VCC, Instruction
from .float_alu import COMPARE, FLOAT, classes, div_fixup, div_fmas, div_scale, fma, scaled
from .integer_alu import LONG, SATURATED, WORD, low, signed, truth_table
from .isa_errors import UnknownInstruction
from .operands import FLOATS, as_float, floating, plain, scalar, source, vector, writer
from .small_floats import Format
from .waves import U32, U64, Waves, bits, lanes

Run = Callable[[Waves], Any]
_TYPED = re.compile(r"(\w+?)_f(16|32|64)")
_COMPARISON = re.compile(r"cmp_(\w+?)_([fiu])(16|32|64)")
_CARRY = re.compile(r"(add|addc|sub|subb|subrev|subbrev)_co_u32")


def vector_instruction(one: Instruction, eight: dict[str, Format]) -> Run:
    """Return what an instruction `v_…` does.

    Raises:
        UnknownInstruction: nobody has said what it does.
    """
    name = one.name.removeprefix("v_")
    if name == "nop":
        return lambda waves: None
    for find in (_moves_between_lanes, _compares, _selects, _carries, _multiplies_and_adds, _divides, _of_integers):
        if (run := find(one, name)) is not None:
            return run
    for module in (packed_alu.packed, conversions.conversion):
        if (run := module(one, name, eight)) is not None:
            return run
    if (run := _of_floats(one, name)) is not None:
        return run
    raise UnknownInstruction(one.text)


def _moves_between_lanes(one: Instruction, name: str) -> Run | None:
    if name == "readfirstlane_b32":
        return cross_lane.read_lane(one, None)
    if name == "readlane_b32":
        return cross_lane.read_lane(one, scalar(one.operands[2]))
    if name == "writelane_b32":
        return cross_lane.write_lane(one, scalar(one.operands[1]), scalar(one.operands[2]))
    if name in ("permlane32_swap_b32", "permlane16_swap_b32"):
        return cross_lane.swap(one)
    return None


def _compares(one: Instruction, name: str) -> Run | None:
    match = _COMPARISON.fullmatch(name)
    if match is None:
        return None
    to, width, kind = one.operands[0].number, int(match[3]), match[2]
    if match[1] == "class":
        number, wanted = floating(one, 1, width), source(one, 2)
        return lambda waves: waves.put_pair(to, bits(classes(_wide(number(waves)), wanted(waves)) & waves.on))
    test = COMPARE[match[1]]
    if kind == "f":
        first, second = floating(one, 1, width), floating(one, 2, width)
    else:
        plain(one)
        first, second = (_integer(one, position, width, kind == "i") for position in (1, 2))
    return lambda waves: waves.put_pair(to, bits(test(first(waves), second(waves)) & waves.on))


def _wide(value: Any) -> Any:
    return np.ascontiguousarray(value)


def _integer(one: Instruction, position: int, width: int, is_signed: bool) -> Run:
    read = source(one, position, 64 if width == 64 else 32, signed=is_signed)
    kind: Any = {
        (16, 0): np.uint16,
        (16, 1): np.int16,
        (32, 0): U32,
        (32, 1): np.int32,
        (64, 0): U64,
        (64, 1): np.int64,
    }[width, is_signed]
    if width == 16:
        return lambda waves: np.asarray(read(waves)).astype(np.uint16).view(kind)
    return lambda waves: np.asarray(read(waves)).view(kind)


def _selects(one: Instruction, name: str) -> Run | None:
    if name != "cndmask_b32":
        return None
    write, mask = writer(one), scalar(one.operands[3], 64)
    of_floats = any(operand.negated or operand.absolute for operand in one.operands)
    first, second = ((floating if of_floats else source)(one, position) for position in (1, 2))

    def run(waves: Waves) -> None:
        chosen = np.where(lanes(mask(waves), waves.count), second(waves), first(waves))
        write(waves, chosen.view(U32))

    return run


def _carries(one: Instruction, name: str) -> Run | None:
    match = _CARRY.fullmatch(name)
    if match is None:
        return None
    kind, write, to = match[1], writer(one), one.operands[1].number
    first, second = source(one, 2), source(one, 3)
    carried = scalar(one.operands[4], 64) if len(one.operands) > 4 else None

    def run(waves: Waves) -> None:
        a, b = (np.asarray(read(waves)).astype(np.int64) for read in (first, second))
        carry = lanes(carried(waves), waves.count).astype(np.int64) if carried else 0
        exact = a + b + carry if kind.startswith("add") else (b - a if kind.endswith("rev") else a - b) - carry
        exact = np.broadcast_to(exact, (waves.count, 64))
        write(waves, low(exact))
        waves.put_pair(to, bits(((exact < 0) | (exact > 0xFFFFFFFF)) & waves.on))

    return run


def _multiplies_and_adds(one: Instruction, name: str) -> Run | None:
    if name in ("mad_u64_u32", "mad_i64_i32"):  # whose second operand is a carry that nobody reads
        widths, function = LONG[name]
        reads = [source(one, position + 2, width) for position, width in enumerate(widths)]
        to = one.operands[0].number
        return lambda waves: waves.write_pair(to, function(*(read(waves) for read in reads)))
    return None


def _divides(one: Instruction, name: str) -> Run | None:
    match = re.fullmatch(r"div_(scale|fmas|fixup)_f(32|64)", name)
    if match is None:
        return None
    width, first = int(match[2]), 2 if match[1] == "scale" else 1
    reads = [floating(one, first + position, width) for position in range(3)]
    put = _float_writer(one, width)
    if match[1] == "fixup":
        return lambda waves: put(waves, div_fixup(*(read(waves) for read in reads)))
    if match[1] == "fmas":
        return lambda waves: put(
            waves, div_fmas(*(read(waves) for read in reads), lanes(waves.pair(VCC), waves.count))
        )
    to = one.operands[1].number

    def run(waves: Waves) -> None:
        value, back = div_scale(*(np.broadcast_to(read(waves), (waves.count, 64)) for read in reads))
        put(waves, value)
        waves.put_pair(to, bits(back & waves.on))

    return run


def _of_integers(one: Instruction, name: str) -> Run | None:
    if name in WORD:
        plain(one)
        reads = [source(one, position) for position in range(1, len(one.operands))]
        write, function = writer(one), WORD[name]
        if "clamp" in one.modifiers:
            if name not in SATURATED:
                raise UnknownInstruction(one.text)
            least, most, exact = SATURATED[name]
            function = lambda *given: low(np.clip(exact(*given), least, most))
        if len(reads) == 1:
            (read,) = reads
            return lambda waves: write(waves, function(read(waves)))
        if len(reads) == 2:
            first, second = reads
            return lambda waves: write(waves, function(first(waves), second(waves)))
        return lambda waves: write(waves, function(*[read(waves) for read in reads]))
    if name in LONG:
        plain(one)
        widths, of_long = LONG[name]
        to = one.operands[0].number
        longs = [source(one, position + 1, width) for position, width in enumerate(widths)]
        return lambda waves: waves.write_pair(to, of_long(*[np.asarray(read(waves)) for read in longs]))
    if name in ("bitop3_b32", "bitop3_b16"):
        three, write = [source(one, position) for position in (1, 2, 3)], writer(one)
        mask = U32(0xFFFF if name.endswith("16") else 0xFFFFFFFF)
        of_bits = truth_table(one.number("bitop3"))
        return lambda waves: write(waves, of_bits(*[read(waves) for read in three]) & mask)
    return None


def _float_writer(one: Instruction, width: int) -> Callable[[Waves, Any], None]:
    """Return what writes floats, after `clamp`, `mul:2` or `div:2`."""
    kind, to, write = FLOATS[width], one.operands[0].number, writer(one)
    factor = kind(float(one.modifiers.get("mul", "1")) / float(one.modifiers.get("div", "1")))
    clamp = "clamp" in one.modifiers

    def put(waves: Waves, value: Any) -> None:
        value = np.asarray(value, kind)
        if factor != 1:
            value = value * factor
        if clamp:
            value = np.where(np.isnan(value), kind(0), np.clip(value, kind(0), kind(1)))
        if width == 64:
            waves.write_pair(to, value.view(U64))
        elif width == 16:
            write(waves, value.view(np.uint16).astype(U32))
        else:
            write(waves, value.view(U32))

    return put


def _of_floats(one: Instruction, name: str) -> Run | None:
    match = _TYPED.fullmatch(name.replace("frexp_exp_i32_", "frexp_exp_").replace("frexp_exp_i16_", "frexp_exp_"))
    if match is None or "op_sel" in one.modifiers:
        return None
    kind, width = match[1], int(match[2])
    put = _float_writer(one, width)
    if kind in ("fmac", "mac"):
        first, second = floating(one, 1, width), floating(one, 2, width)
        total = as_float(vector(one.operands[0], 64 if width == 64 else 32), one.operands[0], width)
        return lambda waves: put(waves, fma(first(waves), second(waves), total(waves)))
    if kind in ("fmaak", "madak", "fmamk", "madmk"):  # the constant stands where it is multiplied or added
        kind = "fma"
    if kind == "ldexp":
        number, exponent = floating(one, 1, width), source(one, 2)
        return lambda waves: put(waves, scaled(number(waves), signed(exponent(waves))))
    if kind == "frexp_exp":
        number, to = floating(one, 1, width), one.operands[0].number
        return lambda waves: waves.write(to, _binary_exponent(number(waves)))
    if kind in FLOAT:
        function = FLOAT[kind]
        reads = [floating(one, position, width) for position in range(1, len(one.operands))]
        return lambda waves: put(waves, function(*[read(waves) for read in reads]))
    return None


def _binary_exponent(value: Any) -> Any:
    return np.where(np.isfinite(value), np.frexp(value)[1], 0).astype(np.int32).view(U32)
