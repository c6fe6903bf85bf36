"""Moves between lanes: DPP, LDS permutations, swizzles, swaps of rows (MI300 ISA, "DPP" and "LDS"; CDNA4 ISA)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .assembly_text import Instruction
from .isa_errors import UnknownInstruction
from .waves import LANE, U32, Waves

ROW, IN_ROW = LANE // 16, LANE % 16
_MOVES: dict[str, Callable[[int], NDArray[np.int64]]] = {
    "row_shr": lambda n: np.where(n <= IN_ROW, LANE - n, -1),
    "row_shl": lambda n: np.where(IN_ROW + n < 16, LANE + n, -1),
    "row_ror": lambda n: ROW * 16 + (IN_ROW - n) % 16,
    "row_newbcast": lambda n: ROW * 16 + n,
    "row_mirror": lambda n: ROW * 16 + 15 - IN_ROW,
    "row_half_mirror": lambda n: LANE // 8 * 8 + 7 - LANE % 8,
    "wave_shr": lambda n: LANE - n,
    "wave_shl": lambda n: np.where(LANE + n < 64, LANE + n, -1),
    "wave_ror": lambda n: (LANE - n) % 64,
    "wave_rol": lambda n: (LANE + n) % 64,
}


def dpp_sources(one: Instruction) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the lane that each lane reads (-1 for none), and which lanes are written at all."""
    given = one.modifiers
    on = (int(given.get("row_mask", "0xf"), 0) >> ROW & 1) & (int(given.get("bank_mask", "0xf"), 0) >> IN_ROW // 4 & 1)
    if "quad_perm" in given:
        order = np.array([int(lane) for lane in given["quad_perm"].strip("[]").split(",")])
        return LANE // 4 * 4 + order[LANE % 4], on.astype(bool)
    if "row_bcast" in given:
        last = int(given["row_bcast"])
        if last not in (15, 31):
            raise UnknownInstruction(one.text)
        before = ROW * 16 - 1 if last == 15 else np.where(LANE >= 32, 31, -1)
        return before, on.astype(bool)
    for name, move in _MOVES.items():
        if name in given:
            return move(int(given[name])), on.astype(bool)
    raise UnknownInstruction(one.text)


def writes_without_source(one: Instruction) -> bool:
    """Return whether lanes that have none are written with 0, rather than left as they are."""
    return "bound_ctrl" in one.modifiers


def permute(one: Instruction) -> Callable[[Waves], None]:
    """`ds_bpermute_b32` reads the lane that is named, `ds_permute_b32` writes to it; both without memory."""
    to, address, data = (operand.number for operand in one.operands)
    backwards, offset = one.name == "ds_bpermute_b32", one.number("offset")

    def run(waves: Waves) -> None:
        lanes = (waves.vector[address].astype(np.int64) + offset >> 2) & 63
        values = waves.vector[data]
        if backwards:
            there = np.take_along_axis(waves.on, lanes, 1)
            waves.write(to, np.where(there, np.take_along_axis(values, lanes, 1), U32(0)))
            return
        found = np.zeros_like(values)
        for lane in range(64):  # of two lanes that write to one, the higher
            rows = np.nonzero(waves.on[:, lane])[0]
            found[rows, lanes[rows, lane]] = values[rows, lane]
        waves.write(to, found)

    return run


def swizzle(one: Instruction) -> Callable[[Waves], None]:
    """`ds_swizzle_b32`: four lanes in an order, or 32 lanes by and, or and exclusive or of their numbers."""
    to, data = one.operands[0].number, one.operands[1].number
    pattern = _pattern(one)
    if pattern & 0x8000:
        order = np.array([pattern >> 2 * lane & 3 for lane in range(4)])
        lanes = LANE // 4 * 4 + order[LANE % 4]
    else:
        within = (LANE % 32 & (pattern & 31) | pattern >> 5 & 31) ^ pattern >> 10 & 31
        lanes = LANE // 32 * 32 + within

    def run(waves: Waves) -> None:
        waves.write(to, np.where(waves.on[:, lanes], waves.vector[data][:, lanes], U32(0)))

    return run


def _pattern(one: Instruction) -> int:
    given = one.modifiers["offset"]
    if not given.startswith("swizzle"):
        if int(given, 0) >= 0xC000:
            raise UnknownInstruction(one.text)
        return int(given, 0)
    kind, *values = re.findall(r"[\w\"]+", given[len("swizzle(") :])
    numbers = [int(value, 0) for value in values if value[0].isdigit()]
    if kind == "QUAD_PERM":
        return 0x8000 | sum(number << 2 * lane for lane, number in enumerate(numbers))
    if kind == "SWAP":
        return 0x1F | numbers[0] << 10
    if kind == "REVERSE":
        return 0x1F | numbers[0] - 1 << 10
    if kind == "BROADCAST":
        return 0x1F & ~(numbers[0] - 1) | numbers[1] << 5
    raise UnknownInstruction(one.text)


def swap(one: Instruction) -> Callable[[Waves], None]:
    """`v_permlane32_swap_b32` and `v_permlane16_swap_b32`: upper lanes of one against lower of the other."""
    first, second = one.operands[0].number, one.operands[1].number
    lower = LANE[LANE % 64 < 32] if "permlane32" in one.name else LANE[LANE % 32 < 16]
    upper = lower + (32 if "permlane32" in one.name else 16)

    def run(waves: Waves) -> None:
        a, b = waves.vector[first].copy(), waves.vector[second].copy()
        new_a, new_b = a.copy(), b.copy()
        new_a[:, upper], new_b[:, lower] = b[:, lower], a[:, upper]
        waves.write(first, new_a)
        waves.write(second, new_b)

    return run


def read_lane(one: Instruction, lane: Callable[[Waves], Any] | None) -> Callable[[Waves], None]:
    """`v_readlane_b32` and, without `lane`, `v_readfirstlane_b32`: the first lane that is on, or lane 0."""
    to, data = one.operands[0].number, one.operands[1].number

    def run(waves: Waves) -> None:
        chosen = waves.on.argmax(1) if lane is None else np.asarray(lane(waves)).astype(np.int64) & 63
        waves.put(to, waves.vector[data][np.arange(waves.count), chosen])

    return run


def write_lane(
    one: Instruction, value: Callable[[Waves], Any], lane: Callable[[Waves], Any]
) -> Callable[[Waves], None]:
    """`v_writelane_b32`: one lane, whether it is on or not."""
    to = one.operands[0].number

    def run(waves: Waves) -> None:
        waves.vector[to][np.arange(waves.count), np.asarray(lane(waves)).astype(np.int64) & 63] = value(waves)

    return run
