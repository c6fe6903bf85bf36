"""Executes a few instructions on one wave, for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from .assembly_text import VCC, instruction
from .device_memory import DeviceMemory
from .machine import assemble
from .shared_memory import Shared
from .waits import Counters
from .waves import POISON, U32, U64, Waves

REGISTERS = 300
"""Of which those from 256 on are accumulators."""
ALL = (1 << 64) - 1
SPECIAL = (0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 0x7FFFFFFF)
WORDS = sorted({value & 0xFFFFFFFF for number in SPECIAL for value in (number, -number, ~number + 2)} | {0x12345678})
"""Where integers go wrong."""
POISON_NAMES = {"v": POISON, "s": 0xDEADBEEF}
"""What a register of each kind holds before it is written."""


def words(seed: int, count: int = 64) -> list[int]:
    """Return integers of 32 bits: special ones in some order, then random ones."""
    chance = np.random.default_rng(seed)
    given = [*chance.permutation(WORDS), *chance.integers(0, 1 << 32, max(count - len(WORDS), 0) + count // 2)]
    return [int(value) for value in chance.permutation(given)[:count]]


def longs(seed: int) -> list[int]:
    """Return integers of 64 bits."""
    return [low | high << 32 for low, high in zip(words(seed), words(seed + 1), strict=True)]


def wave(
    vectors: Mapping[int, Sequence[int]] | None = None,
    scalars: Mapping[int, int] | None = None,
    *,
    on: int = ALL,
    scc: bool = False,
    vcc: int = 0,
    lds: int = 4096,
    memory: DeviceMemory | None = None,
) -> Waves:
    """Return a wave with these registers; all others hold what an uninitialised one does."""
    found = Waves(REGISTERS, np.zeros(1, np.int64), np.zeros(1, np.int64))
    found.counters, found.shared, found.memory = Counters(), Shared(1, lds), memory
    for number, values in (vectors or {}).items():
        found.vector[number, 0] = np.array(values, U64).astype(U32)
    for number, value in (scalars or {}).items():
        found.scalar[number, 0] = value & 0xFFFFFFFF
    found.put_pair(VCC, np.array([vcc], U64))
    found.scc = np.array([scc])
    found.set_exec(np.array([on], U64))
    return found


def execute(waves: Waves, *lines: str, chip: str = "gfx942") -> Waves:
    """Execute instructions on a wave, and return it."""
    with np.errstate(all="ignore"):
        for line in lines:
            assemble(instruction(line), chip, {})(waves)
    return waves


def vector(waves: Waves, number: int) -> list[int]:
    """Return a vector register."""
    return [int(value) for value in waves.vector[number, 0]]


def pair(waves: Waves, number: int) -> list[int]:
    """Return two vector registers as numbers of 64 bits."""
    return [low | high << 32 for low, high in zip(vector(waves, number), vector(waves, number + 1), strict=True)]


def split(values: Sequence[int], number: int) -> dict[int, list[int]]:
    """Return numbers of 64 bits as two registers."""
    return {number: [value & 0xFFFFFFFF for value in values], number + 1: [value >> 32 for value in values]}


def scalar(waves: Waves, number: int) -> int:
    """Return a scalar register."""
    return int(waves.scalar[number, 0])


def signed(value: int, width: int = 32) -> int:
    """Return bits as a signed number."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def bits(value: float, kind: str = "f") -> int:
    """Return the bits of a float: `e` of 16, `f` of 32, `d` of 64."""
    whole = {"e": "H", "f": "I", "d": "Q"}[kind]
    return int(struct.unpack(f"<{whole}", struct.pack(f"<{kind}", value))[0])


def number(value: int, kind: str = "f") -> float:
    """Return the float of bits."""
    whole = {"e": "H", "f": "I", "d": "Q"}[kind]
    return float(struct.unpack(f"<{kind}", struct.pack(f"<{whole}", value))[0])
