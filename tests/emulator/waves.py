"""Waves that run in step: their registers, and which lanes are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .assembly_text import EXEC, SCALARS

Words = NDArray[np.uint32]
Longs = NDArray[np.uint64]
Lanes = NDArray[np.bool_]
U32, U64 = np.uint32, np.uint64
LANE = np.arange(64)
HIGH = U64(32)
POISON = 0x7FBADBAD
"""What a register holds before it is written: not a number, as a float of 32 or 16 bits, and no address."""


def bits(mask: Lanes) -> Longs:
    """Return lanes `[N, 64]` as the bits of one number for each wave, `[N]`."""
    return np.packbits(mask, axis=1, bitorder="little").view(U64)[:, 0]


def lanes(mask: Any, count: int) -> Lanes:
    """Return the bits of `[N]` (or of one number for all) as lanes `[N, 64]`."""
    whole = np.ascontiguousarray(np.broadcast_to(np.asarray(mask, U64), (count,)))
    return np.unpackbits(whole.view(np.uint8).reshape(count, 8), axis=1, bitorder="little").view(bool)


class Waves:
    """A gang: N waves that are at the same instruction.

    Args:
        group: `[N]`, the workgroup of each wave, as LDS counts them.
        place: `[N]`, which wave of its workgroup each is.
        die: of all of them, for a memory that has a cache for each.
        scratch: words of each lane's own memory.
    """

    def __init__(
        self, registers: int, group: NDArray[np.int64], place: NDArray[np.int64], die: int = 0, scratch: int = 0
    ):
        count = len(group)
        self.count = count
        self.vector: Words = np.full((registers, count, 64), POISON, U32)
        self.scalar: Words = np.full((SCALARS, count), 0xDEADBEEF, U32)
        self.scratch: Words = np.full((scratch, count, 64), POISON, U32)
        self.scc: Lanes = np.zeros(count, bool)
        self.group, self.place, self.die = group, place, die
        self.pc = 0
        self.counters: Any = None
        self.memory: Any = None
        self.shared: Any = None
        self.saturates = False
        """Whether conversions to fewer bits end at the largest number (MODE.FP16_OVFL)."""
        self.waits_at_barrier = False
        self.set_exec(np.full(count, ~U64(0), U64))

    def set_exec(self, mask: Any) -> None:
        """Turn lanes on and off by the bits of `[N]`."""
        self.on = lanes(mask, self.count)
        self.all_on = bool(self.on.all())
        self.scalar[EXEC] = mask & U64(0xFFFFFFFF)
        self.scalar[EXEC + 1] = np.asarray(mask, U64) >> HIGH

    @property
    def exec(self) -> Longs:
        """The lanes that are on, `[N]`."""
        return self.pair(EXEC)

    def pair(self, number: int) -> Longs:
        """Return two scalar registers as one number, `[N]`."""
        return self.scalar[number] | self.scalar[number + 1].astype(U64) << HIGH

    def put(self, number: int, value: Any) -> None:
        """Write a scalar register."""
        self.scalar[number] = value
        if number in (EXEC, EXEC + 1):
            self.set_exec(self.pair(EXEC))

    def put_pair(self, number: int, value: Any) -> None:
        """Write two scalar registers."""
        if number == EXEC:
            self.set_exec(np.broadcast_to(np.asarray(value, U64), (self.count,)))
            return
        value = np.asarray(value, U64)
        self.scalar[number] = value & U64(0xFFFFFFFF)
        self.scalar[number + 1] = value >> HIGH

    def write(self, number: int, value: Any) -> None:
        """Write a vector register in the lanes that are on."""
        if self.all_on:
            self.vector[number] = value
        else:
            np.copyto(self.vector[number], value, where=self.on, casting="unsafe")

    def write_pair(self, number: int, value: Any) -> None:
        """Write two vector registers with numbers of 64 bits."""
        value = np.asarray(value, U64)
        self.write(number, (value & U64(0xFFFFFFFF)).astype(U32))
        self.write(number + 1, (value >> HIGH).astype(U32))

    def part(self, chosen: Lanes) -> Waves:
        """Return the waves `[N]` that are chosen, as a gang of their own."""
        found: Waves = object.__new__(Waves)
        found.__dict__.update(self.__dict__)
        found.count = int(chosen.sum())
        for name in ("vector", "scalar", "scratch"):
            setattr(found, name, getattr(self, name)[:, chosen])
        found.scc, found.group, found.place = self.scc[chosen], self.group[chosen], self.place[chosen]
        found.on = self.on[chosen]
        found.all_on = bool(found.on.all())
        found.counters = self.counters.part(chosen)
        return found


def joined(gangs: Sequence[Waves]) -> Waves:
    """Return gangs that are at the same instruction as one."""
    first = gangs[0]
    found: Waves = object.__new__(Waves)
    found.__dict__.update(first.__dict__)
    found.count = sum(gang.count for gang in gangs)
    for name, axis in (
        ("vector", 1),
        ("scalar", 1),
        ("scratch", 1),
        ("scc", 0),
        ("group", 0),
        ("place", 0),
        ("on", 0),
    ):
        setattr(found, name, np.concatenate([getattr(gang, name) for gang in gangs], axis))
    found.all_on = all(gang.all_on for gang in gangs)
    found.counters = first.counters.joined([gang.counters for gang in gangs[1:]])
    return found
