"""Loads, stores and atomic operations: `global_…`, `buffer_…`, and spilled registers (MI300 ISA, "Vector memory")."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import M0, Instruction, Operand
from .isa_errors import UnknownInstruction
from .lds_instructions import keys, lane_bytes, words, write_half
from .operands import scalar
from .waits import Flight
from .waves import U32, U64, Waves

Run = Callable[[Waves], Any]
_SIZES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ushort": 2, "sshort": 2, "short": 2, "ubyte": 1, "sbyte":
    1, "byte": 1, "short_d16": 2, "short_d16_hi": 2, "ubyte_d16": 1, "ubyte_d16_hi": 1, "sbyte_d16": 1,
    "sbyte_d16_hi": 1,
    "byte_d16_hi": 1,
}  # fmt: skip
_NAME = re.compile(r"(global|buffer)_(load|store|atomic)_(lds_)?(\w+)")
_SCRATCH = re.compile(r"scratch_(load|store)_(dword(?:x[234])?)")
_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: old + new, "sub": lambda old, new: old - new, "swap": lambda old, new: new,
    "umax": max, "umin": min, "or": lambda old, new: old | new, "and": lambda old, new: old & new,
    "xor": lambda old, new: old ^ new,
    "smax": lambda old, new: max(old, new, key=lambda bits: bits ^ 0x80000000),
    "smin": lambda old, new: min(old, new, key=lambda bits: bits ^ 0x80000000),
}  # fmt: skip
"""On numbers of 32 bits without a sign."""
Where = Callable[[Waves], tuple[Any, Any]]
"""The address of each lane, `[N, 64]`, and which lanes are within the buffer."""


def memory_instruction(one: Instruction) -> Run:
    """Return what an instruction of this kind does.

    Raises:
        UnknownInstruction: nobody has said what it does.
    """
    if one.name == "buffer_wbl2":
        return _write_back if "sc1" in one.modifiers else _nothing
    if one.name == "buffer_inv":
        return (lambda waves: waves.memory.invalidate(waves)) if "sc1" in one.modifiers else _nothing
    if one.name in ("buffer_wbinvl1", "buffer_wbinvl1_vol"):
        return lambda waves: waves.memory.invalidate(waves)
    if match := _SCRATCH.fullmatch(one.name):
        return _scratch(one, match[1], match[2])
    match = _NAME.fullmatch(one.name)
    if match is None:
        raise UnknownInstruction(one.text)
    if match[2] == "atomic":
        return _atomic(one, match[1], match[4])
    if match[4] not in _SIZES:
        raise UnknownInstruction(one.text)
    if match[2] == "store":
        return _store(one, match[1], match[4])
    return _load(one, match[1], match[4], bool(match[3]) or "lds" in one.modifiers)


def _write_back(waves: Waves) -> None:
    waves.counters.issue_vector(Flight(land=waves.memory.write_back(waves)))


def _nothing(waves: Waves) -> None:
    """Stay within the workgroup, whose waves share a cache."""


def _buffer(one: Instruction, given: list[Operand], size: int) -> Where:
    """Return addresses of a raw buffer: what is beyond its size reads zero and is not written."""
    lane, resource, base = given
    if {"idxen"} & one.modifiers.keys():
        raise UnknownInstruction(one.text)
    more, offset, first = scalar(base), one.number("offset"), resource.number
    register = lane.number if "offen" in one.modifiers else None

    def where(waves: Waves) -> tuple[Any, Any]:
        if (waves.scalar[first + 1] >> U32(16) & U32(0x3FFF)).any():
            raise UnknownInstruction(f"{one.text}: a buffer with a stride")
        begin = waves.pair(first) & U64(0xFFFFFFFFFFFF)
        start = np.int64(0) if register is None else waves.vector[register].astype(np.int64)
        at = np.broadcast_to(start + offset, (waves.count, 64))
        inside = at + size <= waves.scalar[first + 2].astype(np.int64)[:, None]
        extra = np.broadcast_to(np.asarray(more(waves)), (waves.count,)).astype(np.int64)
        return (at + extra[:, None]).astype(U64) + begin[:, None], inside

    return where


def _global(one: Instruction, given: list[Operand]) -> Where:
    lane, base = given
    offset, number = one.number("offset"), lane.number
    if base.kind == "s":
        register = base.number
        return lambda waves: (
            waves.vector[number] + (waves.pair(register) + U64(offset & (1 << 64) - 1))[:, None],
            True,
        )
    if base.text != "off":
        raise UnknownInstruction(one.text)
    return lambda waves: (
        (waves.vector[number] | waves.vector[number + 1].astype(U64) << U64(32)) + U64(offset & (1 << 64) - 1),
        True,
    )


def _where(one: Instruction, kind: str, given: list[Operand], size: int) -> Where:
    return _buffer(one, given, size) if kind == "buffer" else _global(one, given)


def _load(one: Instruction, kind: str, what: str, to_lds: bool) -> Run:
    size = _SIZES[what]
    where = _where(one, kind, one.operands if to_lds else one.operands[1:], size)
    to, registers, held = one.operands[0].number, max(size // 4, 1), keys(one)

    def bytes_of(waves: Waves) -> Any:
        address, inside = where(waves)
        on = waves.on & inside
        if on.all():
            return waves.memory.load(address.reshape(-1), size, waves).reshape(waves.count, 64, size)
        found = np.zeros((waves.count, 64, size), np.uint8)
        if on.any():
            found[on] = waves.memory.load(address[on], size, waves)
        return found

    def run(waves: Waves) -> None:
        values = words(bytes_of(waves), what.startswith(("sshort", "sbyte")))
        if "d16" in what:
            write_half(waves, to, values[:, :, 0], what.endswith("hi"))
        else:
            for register in range(registers):
                waves.write(to + register, values[:, :, register])
        waves.counters.issue_vector(Flight(held))

    def run_to_lds(waves: Waves) -> None:
        begin = (waves.scalar[M0] & U32(0x3FFFF)).astype(np.int64)[:, None]
        address = begin + one.number("offset") + np.arange(64) * max(size, 4)
        data = bytes_of(waves)
        padded = np.pad(data, ((0, 0), (0, 0), (0, max(4 - size, 0))))
        waves.counters.issue_vector(waves.shared.expect(waves, address, padded, waves.on))

    return run_to_lds if to_lds else run


def _store(one: Instruction, kind: str, what: str) -> Run:
    size, registers = _SIZES[what], max(_SIZES[what] // 4, 1)
    if kind == "buffer":
        source, given = one.operands[0].number, one.operands[1:]
    else:
        source, given = one.operands[1].number, [one.operands[0], one.operands[2]]
    where = _where(one, kind, given, size)

    def run(waves: Waves) -> None:
        address, inside = where(waves)
        on = waves.on & inside
        land = None
        if on.any():
            data = lane_bytes(waves, source, registers, size, what.endswith("hi"))
            land = waves.memory.store(address[on], data[on], waves)
        waves.counters.issue_vector(Flight(land=land))

    return run


def _atomic(one: Instruction, kind: str, what: str) -> Run:
    returns = bool({"sc0", "glc"} & one.modifiers.keys())
    if what not in _ATOMIC or kind == "buffer":
        raise UnknownInstruction(one.text)
    operands = one.operands if returns else [one.operands[0], *one.operands]
    to, (lane, data, base) = operands[0].number, operands[1:] if returns else one.operands
    where, operation = _global(one, [lane, base]), _ATOMIC[what]

    def run(waves: Waves) -> str:
        address, _ = where(waves)
        found = np.zeros((waves.count, 64), U32)
        for wave, lane_number in np.argwhere(waves.on):
            at = address[wave, lane_number : lane_number + 1]
            old = int(waves.memory.now(at))
            found[wave, lane_number] = old
            new = operation(old, int(waves.vector[data.number, wave, lane_number])) & 0xFFFFFFFF
            waves.memory.put_now(at, new)
        if returns:
            waves.write(to, found)
        waves.counters.issue_vector(Flight(frozenset([to]) if returns else frozenset()))
        return "atomic"

    return run


def _scratch(one: Instruction, kind: str, what: str) -> Run:
    """Registers that are spilled: words of each lane's own memory, at a constant offset."""
    size, held = _SIZES[what], one.operands[0 if kind == "load" else 1]
    address = one.operands[1 if kind == "load" else 0]
    if address.text != "off" or one.operands[2].text != "off" or one.number("offset") % 4:
        raise UnknownInstruction(one.text)
    first, number, count = one.number("offset") // 4, held.number, size // 4

    def load(waves: Waves) -> None:
        for word in range(count):
            waves.write(number + word, waves.scratch[first + word])
        waves.counters.issue_vector(Flight(keys(one)))

    def store(waves: Waves) -> None:
        for word in range(count):
            np.copyto(waves.scratch[first + word], waves.vector[number + word], where=waves.on)
        waves.counters.issue_vector(Flight())

    return load if kind == "load" else store
