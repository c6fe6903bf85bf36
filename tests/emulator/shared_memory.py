"""LDS of the workgroups of a batch: what leaves it, and what two waves do to a byte between barriers, are faults.

For every byte two numbers say which waves of its workgroup have written and read it since the last barrier. A wave may
read what it has written itself, and write what is there already (a value that several waves hold). What a load is
about to put there ("buffer_load … lds") may not be touched before it is waited for.

Two waves that write different values are counted and no fault: of a sum that lanes of both hold, each may have rounded
another product (a fused product and sum, where the lanes' order differs), and which stays is undecided on a chip.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .isa_errors import Fault
from .waits import Flight, Mark
from .waves import Waves

FILL = 0xCD
"""Every byte before it is written: -4.3e8 in float32 and bfloat16, -23.2 in float16."""
Index = NDArray[np.int64]


class Shared:
    """LDS of several workgroups, one behind the other."""

    def __init__(self, groups: int, size: int):
        self.size = size
        self._room = -(-max(size, 8) // 8) * 8
        self.bytes = np.full(groups * self._room, FILL, np.uint8)
        self.wrote = np.zeros(groups * self._room, np.uint16)
        self.read = np.zeros(groups * self._room, np.uint16)
        self.coming = np.zeros(groups * self._room, bool)
        self.undecided = 0
        """Stores of another value to where another wave has stored since the last barrier: either may stay."""
        self._flights = 0
        self._touched = False

    def _within(self, waves: Waves, address: Index, size: int, on: Any) -> Index:
        """Return where each lane that is on begins."""
        outside = on & ((address < 0) | (address + size > self.size))
        if outside.any():
            wave, lane = np.argwhere(outside)[0]
            raise Fault(
                f"LDS {int(address[wave, lane])} to +{size} in lane {lane}: the workgroup has {self.size} bytes"
            )
        if self._room >= 1 << 32:
            raise Fault("no such LDS")
        return (address + (waves.group * self._room)[:, None]).astype(np.int64)

    def load(self, waves: Waves, address: Index, size: int, on: Any, flight: Flight | None) -> NDArray[np.uint8]:
        """Return bytes `[N, 64, size]`, zeros in lanes that are off."""
        begin = self._within(waves, address, size, on)
        found = np.zeros((waves.count, 64, size), np.uint8)
        for place, rows in _places(waves):
            lanes = on[rows]
            at = begin[rows][lanes][:, None] + np.arange(size)
            own = np.uint16(1 << place)
            self._settled(at)
            foreign = self.wrote[at]
            if (foreign & ~own).any() and ((foreign != 0) & ((foreign & own) == 0)).any():
                raise Fault(f"wave {place} reads LDS that another wave wrote, with no barrier between")
            self.read[at] |= own
            if flight is not None:
                flight.marks.append(("read", at, own))
            part = found[rows]
            part[lanes] = self.bytes[at]
            found[rows] = part
        self._touched = True
        return found

    def store(self, waves: Waves, address: Index, data: NDArray[np.uint8], on: Any, flight: Flight | None) -> None:
        """Write bytes `[N, 64, size]` of the lanes that are on."""
        size = data.shape[2]
        begin = self._within(waves, address, size, on)
        for place, rows in _places(waves):
            lanes = on[rows]
            at = begin[rows][lanes][:, None] + np.arange(size)
            self._settled(at)
            self._write(place, at, data[rows][lanes], flight)

    def _write(self, place: int, at: Index, data: NDArray[np.uint8], flight: Flight | None) -> None:
        own = np.uint16(1 << place)
        foreign = (self.wrote[at] | self.read[at]) & ~own
        if foreign.any():
            changed = self.bytes[at] != data
            if (changed & (self.read[at] & ~own != 0)).any():
                raise Fault(f"wave {place} writes LDS that another wave read, with no barrier between")
            self.undecided += int((changed & (self.wrote[at] & ~own != 0)).any(1).sum())
        self.bytes[at] = data
        self.wrote[at] |= own
        self._touched = True
        if flight is not None:
            flight.marks.append(("wrote", at, own))

    def expect(self, waves: Waves, address: Index, data: NDArray[np.uint8], on: Any) -> Flight:
        """Return the flight of a load into LDS, whose bytes come when it is waited for."""
        size = data.shape[2]
        begin = self._within(waves, address, size, on)
        parts = [(place, begin[rows][on[rows]][:, None] + np.arange(size), data[rows][on[rows]])
                 for place, rows in _places(waves)]  # fmt: skip
        for place, at, _ in parts:
            if ((self.wrote[at] | self.read[at]) & ~np.uint16(1 << place)).any():
                raise Fault(f"a load of wave {place} goes to LDS that another wave used, with no barrier between")
            self.coming[at] = True
        self._flights += 1

        def land() -> None:
            self._flights -= 1
            for place, at, bytes_ in parts:
                self.coming[at] = False
                self.bytes[at] = bytes_
                self.wrote[at] |= np.uint16(1 << place)
            self._touched = True

        return Flight(land=land)

    def _settled(self, at: Index) -> None:
        if self._flights and self.coming[at].any():
            raise Fault("LDS into which a load is on its way")

    def barrier(self, marks: list[Mark], group: int | None = None) -> None:
        """Let every wave (of a workgroup) see what all have done, but for `marks`: accesses that nobody waited for."""
        if self._touched:
            where = slice(None) if group is None else slice(group * self._room, (group + 1) * self._room)
            self.wrote[where] = 0
            self.read[where] = 0
            self._touched = group is not None
        for kind, at, own in marks:
            getattr(self, kind)[at] |= own
            self._touched = True


def _places(waves: Waves) -> list[tuple[int, Any]]:
    """Return which rows of a gang are the same wave of their workgroups."""
    first = int(waves.place[0])
    if (waves.place == first).all():
        return [(first, slice(None))]
    return [(int(place), waves.place == place) for place in np.unique(waves.place)]
