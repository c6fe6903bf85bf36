"""Scalar instructions that wait, branch, set modes and load (MI300 ISA, "SOPP", "SMEM")."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .assembly_text import SCALAR_KEYS, VCC, Instruction
from .isa_errors import UnknownInstruction
from .operands import scalar
from .waits import Flight
from .waves import U32, U64, Waves

Run = Callable[[Waves], Any]
NOTHING = {
    "nop", "setprio", "sleep", "dcache_inv", "icache_inv", "dcache_wb", "code_end", "sethalt", "clause",
    "set_gpr_idx_off",
}  # fmt: skip
"""What changes no number and no memory."""
_BRANCHES: dict[str, Callable[[Waves], Any]] = {
    "branch": lambda waves: np.ones(waves.count, bool),
    "cbranch_scc0": lambda waves: ~waves.scc, "cbranch_scc1": lambda waves: waves.scc,
    "cbranch_vccz": lambda waves: waves.pair(VCC) == 0, "cbranch_vccnz": lambda waves: waves.pair(VCC) != 0,
    "cbranch_execz": lambda waves: waves.exec == 0, "cbranch_execnz": lambda waves: waves.exec != 0,
}  # fmt: skip


def control(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    """Return what an instruction does that waits, branches, ends or sets modes; None if it is another."""
    if name in NOTHING:
        return lambda waves: None
    if name == "waitcnt":
        counts = {kind: int(count) for kind, count in one.modifiers.items()}
        vector, local = counts.get("vmcnt"), counts.get("lgkmcnt")

        def wait(waves: Waves) -> None:
            waves.counters.wait(vector, local)

        return wait
    if name == "endpgm":
        return lambda waves: "end"
    if name == "barrier":
        return lambda waves: "barrier"
    if name == "setreg_imm32_b32":
        return _mode(one)
    if name in _BRANCHES:
        target, test = labels[one.operands[0].text], _BRANCHES[name]
        return lambda waves: (target, test(waves))
    return None


_INITIAL = {
    ("hwreg(HW_REG_MODE,0,2)", 0), ("hwreg(HW_REG_MODE,2,2)", 0), ("hwreg(HW_REG_MODE,0,4)", 0),
    ("hwreg(HW_REG_MODE,4,2)", 3), ("hwreg(HW_REG_MODE,6,2)", 3), ("hwreg(HW_REG_MODE,4,4)", 15),
}  # fmt: skip
"""To nearest; subnormals are kept."""


def _mode(one: Instruction) -> Run:
    """Of the modes, saturating conversions are modelled; rounding and subnormals stay as they are at the start."""
    where, value = one.operands[0].text.replace(" ", ""), int(one.operands[1].value)
    if where == "hwreg(HW_REG_MODE,23,1)":

        def saturate(waves: Waves) -> None:
            waves.saturates = bool(value)

        return saturate
    if (where, value) in _INITIAL:
        return lambda waves: None
    raise UnknownInstruction(one.text)


def load(one: Instruction, name: str, labels: dict[str, int]) -> Run | None:
    """Return what a scalar load does; None if it is none."""
    match = re.fullmatch(r"load_dword(?:x(\d+))?", name)
    if match is None:
        return None
    count, to, base = int(match[1] or 1), one.operands[0].number, one.operands[1].number
    offset, more = scalar(one.operands[2]), one.number("offset")
    keys = frozenset(range(SCALAR_KEYS + to, SCALAR_KEYS + to + count))

    def run(waves: Waves) -> None:
        address = waves.pair(base) + np.asarray(offset(waves)).astype(U64) + U64(more) & ~U64(3)
        words = waves.memory.load(address, 4 * count, waves).view(U32)
        for word in range(count):
            waves.put(to + word, words[:, word])
        waves.counters.issue_local(Flight(keys, scalar=True))

    return run
