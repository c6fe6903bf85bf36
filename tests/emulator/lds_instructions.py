"""LDS instructions (MI300 ISA, "LDS instructions"; CDNA4 ISA for the loads that transpose)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import cross_lane
from .assembly_text import Instruction
from .isa_errors import UnknownInstruction
from .waits import Flight
from .waves import U32, Waves

Run = Callable[[Waves], Any]
_ACCESS = re.compile(r"ds_(read|write)(2?)(st64)?_([bui])(\d+)(_d16)?(_hi)?")
_TRANSPOSED = re.compile(r"ds_read_b64_tr_b(16|8)")


def lds_instruction(one: Instruction) -> Run:
    """Return what an instruction `ds_…` does.

    Raises:
        UnknownInstruction: nobody has said what it does.
    """
    if one.name in ("ds_bpermute_b32", "ds_permute_b32"):
        return _counted(one, cross_lane.permute(one))
    if one.name == "ds_swizzle_b32":
        return _counted(one, cross_lane.swizzle(one))
    if match := _TRANSPOSED.fullmatch(one.name):
        return _transposed(one, int(match[1]) // 8)
    match = _ACCESS.fullmatch(one.name)
    if match is None or "gds" in one.modifiers:
        raise UnknownInstruction(one.text)
    size = int(match[5]) // 8
    step = size * (64 if match[3] else 1)
    offsets = [one.number("offset0") * step, one.number("offset1") * step] if match[2] else [one.number("offset")]
    if match[1] == "read":
        return _reads(one, size, offsets, match)
    return _writes(one, size, offsets, bool(match[7]))


def keys(one: Instruction) -> frozenset[int]:
    """Return the registers of an instruction's first operand, which come when it is waited for."""
    to = one.operands[0]
    return frozenset(range(to.number, to.number + to.count))


def _counted(one: Instruction, run: Run) -> Run:
    to = keys(one)

    def counted(waves: Waves) -> None:
        run(waves)
        waves.counters.issue_local(Flight(to))

    return counted


def _address(waves: Waves, register: int, offset: int) -> NDArray[np.int64]:
    return waves.vector[register].astype(np.int64) + offset


def words(data: NDArray[np.uint8], is_signed: bool = False) -> NDArray[np.uint32]:
    """Return bytes `[N, 64, size]` as registers `[N, 64, registers]`; one or two bytes fill a register."""
    size = data.shape[2]
    if size >= 4:
        return np.ascontiguousarray(data).view(U32)
    kind: Any = {(1, 0): np.uint8, (2, 0): np.uint16, (1, 1): np.int8, (2, 1): np.int16}[size, is_signed]
    return np.ascontiguousarray(data).view(kind).astype(np.int64).astype(U32)


def write_half(waves: Waves, to: int, value: Any, upper: bool) -> None:
    """Write 16 bits of a register, and leave the others."""
    old = waves.vector[to]
    waves.write(to, old & U32(0xFFFF) | value << U32(16) if upper else old & U32(0xFFFF0000) | value & U32(0xFFFF))


def _reads(one: Instruction, size: int, offsets: list[int], match: re.Match[str]) -> Run:
    to, address = one.operands[0].number, one.operands[1].number
    registers, held = max(size // 4, 1), keys(one)

    def run(waves: Waves) -> None:
        flight = Flight(held)
        found = [
            waves.shared.load(waves, _address(waves, address, offset), size, waves.on, flight) for offset in offsets
        ]
        for number, data in enumerate(found):
            values = words(data, match[4] == "i")
            if match[6]:
                write_half(waves, to, values[:, :, 0], bool(match[7]))
                continue
            for register in range(registers):
                waves.write(to + number * registers + register, values[:, :, register])
        waves.counters.issue_local(flight)

    return run


def _writes(one: Instruction, size: int, offsets: list[int], upper: bool) -> Run:
    address, sources = one.operands[0].number, [operand.number for operand in one.operands[1:]]
    registers = max(size // 4, 1)

    def run(waves: Waves) -> None:
        flight = Flight()
        for offset, source in zip(offsets, sources, strict=True):
            data = lane_bytes(waves, source, registers, size, upper)
            waves.shared.store(waves, _address(waves, address, offset), data, waves.on, flight)
        waves.counters.issue_local(flight)

    return run


def lane_bytes(waves: Waves, source: int, registers: int, size: int, upper: bool = False) -> NDArray[np.uint8]:
    """Return the bytes `[N, 64, size]` that lanes hold in registers; with `upper` those of the upper half."""
    values = waves.vector[source : source + registers].transpose(1, 2, 0)
    values = np.ascontiguousarray(values >> U32(16) if upper else values)
    return values.view(np.uint8)[:, :, :size]


def _transposed(one: Instruction, size: int) -> Run:
    """Of every 16 lanes: each reads 64 bits; lane l gets element l % E of the lanes l // E, l // E + 16 / E, …

    With E elements in 64 bits. Sixteen rows of E numbers that lanes read become columns of them.
    """
    to, address, offset, held = one.operands[0].number, one.operands[1].number, one.number("offset"), keys(one)
    kind: Any = np.uint16 if size == 2 else np.uint8
    count = 8 // size
    lane, number = np.arange(16)[:, None], np.arange(count)[None, :]
    from_lane = number * (16 // count) + lane // count

    def run(waves: Waves) -> None:
        flight = Flight(held)
        data = waves.shared.load(waves, _address(waves, address, offset), 8, waves.on, flight)
        rows = data.view(kind).reshape(waves.count, 4, 16, count)
        turned = np.ascontiguousarray(rows[:, :, from_lane, np.broadcast_to(lane % count, from_lane.shape)])
        values = turned.reshape(waves.count, 64, count).view(U32)
        waves.write(to, values[:, :, 0])
        waves.write(to + 1, values[:, :, 1])
        waves.counters.issue_local(flight)

    return run
