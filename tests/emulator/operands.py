"""Turns operands into functions that read them from waves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import SCC, Instruction, Operand
from .cross_lane import dpp_sources, writes_without_source
from .isa_errors import UnknownInstruction
from .waves import U32, U64, Waves

Read = Callable[[Waves], Any]
FLOATS: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}
_BITS: dict[int, Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def constant(operand: Operand, width: int, signed: bool = False, floating: bool = False) -> Any:
    """Return the bits of a constant where an instruction wants `width` bits, as 32 or 64.

    A literal has 32 bits: of a float of 64 it is the upper half, a signed integer of 64 is extended by its sign.
    """
    if isinstance(operand.value, float):
        return (
            U64(FLOATS[64](operand.value).view(U64))
            if width == 64
            else U32(FLOATS[width](operand.value).view(_BITS[width]))
        )
    value = operand.value
    if width != 64:
        return U32(value & 0xFFFFFFFF)
    if floating and not -16 <= value <= 64:
        return U64((value & 0xFFFFFFFF) << 32)
    if signed and 0x80000000 <= value <= 0xFFFFFFFF:
        value -= 1 << 32
    return U64(value & 0xFFFFFFFFFFFFFFFF)


def scalar(operand: Operand, width: int = 32, signed: bool = False) -> Read:
    """Return a reader of `[N]`."""
    if operand.kind == "constant":
        found = constant(operand, width, signed)
        return lambda waves: found
    if operand.kind != "s":
        raise UnknownInstruction(f"a scalar operand {operand.text}")
    number = operand.number
    if number == SCC:
        return lambda waves: waves.scc.astype(U32)
    if width == 64:
        return lambda waves: waves.pair(number)
    return lambda waves: waves.scalar[number]


def vector(operand: Operand, width: int = 32, signed: bool = False, floating: bool = False) -> Read:
    """Return a reader of `[N, 64]`, `[N, 1]` or one number for all; of 32 bits, or of 64."""
    if operand.kind == "constant":
        found = constant(operand, width, signed, floating)
        return lambda waves: found
    number = operand.number
    if operand.kind == "s":
        if number == SCC:
            return lambda waves: waves.scc.astype(U32)[:, None]
        if width == 64:
            return lambda waves: waves.pair(number)[:, None]
        return lambda waves: waves.scalar[number][:, None]
    if operand.kind != "v":
        raise UnknownInstruction(f"a vector operand {operand.text}")
    if width == 64:
        return lambda waves: waves.vector[number] | waves.vector[number + 1].astype(U64) << U64(32)
    return lambda waves: waves.vector[number]


def source(one: Instruction, position: int, width: int = 32, **options: bool) -> Read:
    """Return a reader of an operand as its instruction takes it: lanes moved (DPP), a part of a register (SDWA)."""
    operand = one.operands[position]
    read = vector(operand, width, **options)
    if one.form == "dpp" and position == 1:
        read = _moved(read, one)
    if one.form == "sdwa":
        read = _selected(read, one.modifiers.get(f"src{position - 1}_sel", "DWORD"), operand.extended)
    elif operand.extended:
        raise UnknownInstruction(one.text)
    return read


def _moved(read: Read, one: Instruction) -> Read:
    lanes, _ = dpp_sources(one)

    def moved(waves: Waves) -> Any:
        given = np.broadcast_to(read(waves), (waves.count, 64))
        there = (lanes >= 0) & waves.on[:, lanes]
        return np.where(there, given[:, lanes], 0).astype(given.dtype)

    return moved


def _selected(read: Read, part: str, extended: bool) -> Read:
    if part == "DWORD":
        return read
    kind, number = part.split("_")
    width = 8 if kind == "BYTE" else 16
    shift, mask, sign = U32(int(number) * width), U32((1 << width) - 1), U32(1 << (width - 1))
    if not extended:
        return lambda waves: read(waves) >> shift & mask
    return lambda waves: ((read(waves) >> shift & mask) ^ sign) - sign


def half(read: Read, upper: int) -> Read:
    """Return a reader of 16 bits of each number."""
    if upper:
        return lambda waves: np.asarray(read(waves), U32) >> U32(16)
    return lambda waves: np.asarray(read(waves), U32) & U32(0xFFFF)


def as_float(read: Read, operand: Operand, width: int = 32) -> Read:
    """Return a reader of floats, with the operand's `|…|` and `-`."""
    kind = FLOATS[width]

    def found(waves: Waves) -> Any:
        given = np.asarray(read(waves))
        value = given.astype(np.uint16).view(kind) if width == 16 else given.view(kind)
        value = np.abs(value) if operand.absolute else value
        return -value if operand.negated else value

    return found


def floating(one: Instruction, position: int, width: int = 32) -> Read:
    """Return a reader of a float operand."""
    return as_float(source(one, position, width, floating=True), one.operands[position], width)


def plain(one: Instruction) -> None:
    """Refuse an instruction whose integers have `-` or `|…|`."""
    if any(operand.negated or operand.absolute for operand in one.operands):
        raise UnknownInstruction(one.text)


def writer(one: Instruction) -> Callable[[Waves, Any], None]:
    """Return what writes the 32 bits of a result: to all of a register, a part of it (SDWA), or some lanes (DPP)."""
    number = one.operands[0].number
    part = one.modifiers.get("dst_sel", "DWORD")
    if one.form == "dpp":
        return _dpp_writer(one, number)
    if one.form != "sdwa" or part == "DWORD":
        return lambda waves, value: waves.write(number, value)
    kind, position = part.split("_")
    width = 8 if kind == "BYTE" else 16
    shift = U32(int(position) * width)
    mask = U32((1 << width) - 1 << int(position) * width)
    unused = one.modifiers.get("dst_unused", "UNUSED_PAD")
    if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise UnknownInstruction(one.text)

    def write(waves: Waves, value: Any) -> None:
        rest = waves.vector[number] & ~mask if unused == "UNUSED_PRESERVE" else U32(0)
        waves.write(number, rest | np.asarray(value, U32) << shift & mask)

    return write


def _dpp_writer(one: Instruction, number: int) -> Callable[[Waves, Any], None]:
    sources, written = dpp_sources(one)
    always = writes_without_source(one)

    def write(waves: Waves, value: Any) -> None:
        on = waves.on & written
        if not always:
            on = on & (sources >= 0) & waves.on[:, sources]
        np.copyto(waves.vector[number], value, where=on, casting="unsafe")

    return write
