"""What a wave has on its way, and `s_waitcnt`: a register that is used before its load is waited for is a fault.

vmcnt counts vector memory instructions, which come back in the order of their issue; lgkmcnt counts LDS instructions,
in order among themselves, and scalar loads, in any order (MI300 ISA, "Manually inserted wait states" and S_WAITCNT).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from .assembly_text import Instruction

Mark = tuple[str, Any, Any]
"""`read` or `wrote`, words of LDS, the bits of the waves: see `shared_memory`."""


@dataclass(eq=False)
class Flight:
    """A memory instruction on its way."""

    registers: frozenset[int] = frozenset()
    """What it writes when it lands."""
    land: Callable[[], None] | None = None
    """Called once, when it is waited for."""
    scalar: bool = False
    """Whether it may be overtaken."""
    marks: list[Mark] = field(default_factory=list)
    """Its accesses to LDS."""

    def arrive(self) -> None:
        """Land, once: waves that parted share it."""
        if self.land is not None:
            self.land()
            self.land = None


Queue = list[list[Flight]]
"""The oldest first; gangs that met have several flights at a distance from the newest."""


class Counters:
    """vmcnt and lgkmcnt of a gang."""

    def __init__(self, vector: Queue | None = None, local: Queue | None = None):
        self.vector: Queue = vector or []
        self.local: Queue = local or []
        self.busy: set[int] = set()
        self._count()

    def _count(self) -> None:
        self.busy = {
            key for queue in (self.vector, self.local) for place in queue for f in place for key in f.registers
        }

    def issue_vector(self, flight: Flight) -> None:
        """Count a vector memory instruction."""
        self.vector.append([flight])
        self.busy |= flight.registers

    def issue_local(self, flight: Flight) -> None:
        """Count an LDS instruction or a scalar load."""
        self.local.append([flight])
        self.busy |= flight.registers

    def wait(self, vector: int | None, local: int | None) -> None:
        """Let land what must have come when no more than so many are on their way."""
        if vector is not None and len(self.vector) > vector:
            count = len(self.vector) - vector
            for place in self.vector[:count]:
                for flight in place:
                    flight.arrive()
            del self.vector[:count]
        if local is not None:
            self.local = self._after(local)
        self._count()

    def _after(self, most: int) -> Queue:
        kept: Queue = []
        later = 0
        for place in reversed(self.local):
            stay = [flight for flight in place if (most > 0 if flight.scalar else later < most)]
            later += any(not flight.scalar for flight in place)
            kept.append(stay)
        return [place for place in reversed(kept) if place]

    def misused(self, one: Instruction) -> bool:
        """Return whether an instruction names a register that a load will write, but for loads in order."""
        queues = {"vector": self.vector, "local": [[f for f in place if not f.scalar] for place in self.local]}
        own = queues.pop(one.queue, [])
        queues["scalar"] = [[f for f in place if f.scalar] for place in self.local]
        return not _registers(own).isdisjoint(one.sources) or any(
            not _registers(queue).isdisjoint(one.registers) for queue in queues.values()
        )

    def part(self, chosen: object) -> Counters:
        """Return those of some of the waves."""
        return Counters(list(self.vector), list(self.local))

    def joined(self, others: Sequence[Counters]) -> Counters:
        """Return those of waves that met: each is as far from the newest as it was."""
        vector, local = self.vector, self.local
        for other in others:
            vector, local = _both(vector, other.vector), _both(local, other.local)
        return Counters(vector, local)


def _registers(queue: Queue) -> set[int]:
    return {key for place in queue for flight in place for key in flight.registers}


def _both(one: Queue, other: Queue) -> Queue:
    pairs = zip_longest(reversed(one), reversed(other), fillvalue=[])
    return [list(dict.fromkeys([*first, *second])) for first, second in pairs][::-1]
