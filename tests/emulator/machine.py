"""Runs a kernel: its workgroups in batches, the waves of a batch in step for as long as they take the same way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .assembly_text import Instruction, Listing, listing
from .device_memory import DeviceMemory
from .isa_errors import Fault, UnknownInstruction
from .lds_instructions import lds_instruction
from .matrix_units import matrix_instruction
from .memory_instructions import memory_instruction
from .scalar_alu import scalar_instruction
from .shared_memory import Shared
from .small_floats import formats
from .vector_alu import vector_instruction
from .waits import Counters
from .waves import LANE, U32, U64, Waves, joined

Run = Callable[[Waves], Any]
IN_STEP = 64
"""Waves that run together at most: more fill the caches of the machine that emulates."""
MOST = 20_000_000
"""Instructions of a batch: what takes more is a loop without an end."""
ARGUMENTS = "the arguments"


def assemble(one: Instruction, chip: str, labels: dict[str, int]) -> Run:
    """Return what an instruction does to waves.

    Raises:
        UnknownInstruction: nobody has said what it does.
    """
    try:
        if one.name.startswith("s_"):
            return scalar_instruction(one, labels)
        if one.name.startswith("v_mfma_"):
            return matrix_instruction(one, chip, formats(chip))
        if one.name.startswith("v_"):
            return vector_instruction(one, formats(chip))
        if one.name.startswith("ds_"):
            return lds_instruction(one)
        if one.name.startswith(("global_", "buffer_", "scratch_")):
            return memory_instruction(one)
    except UnknownInstruction as error:
        raise UnknownInstruction(f"{one.text}: {error}") from error
    raise UnknownInstruction(one.text)


@dataclass(frozen=True)
class Order:
    """In which order workgroups and waves run; none decides anything in a program that is right."""

    seed: int = 0
    alone: bool = False
    """One wave at a time, to the next barrier: for a weak memory. Of even seeds one workgroup after the other, of odd
    ones several, which others overtake behind an atomic operation too; of every second of those (`overtakes`) each
    halts there until all have come, and the last goes on first."""

    @property
    def overtakes(self) -> bool:
        """Whether workgroups come to their atomic operations in turn, and the last to come goes on before the others.

        Where one has much to store and the others nothing, it comes first in such an order alone.
        """
        return self.alone and self.seed % 4 == 3


class Program:
    """A kernel that can be run.

    Args:
        text: as LLVM prints it.

    Raises:
        UnknownInstruction: of one of its instructions nobody has said what it does.
    """

    def __init__(self, text: str):
        self.listing: Listing = listing(text)
        self.undecided = 0
        """Of the last run: see `Shared.undecided`."""
        self.reached: Counter[int] | None = None
        """By how many waves each instruction was executed, by its number, for whoever sets it."""
        self.code = [assemble(one, self.listing.chip, self.listing.labels) for one in self.listing.instructions]

    def run(
        self,
        grid: tuple[int, int, int],
        threads: int,
        memory: DeviceMemory,
        shared: int,
        order: Order | None = None,
    ) -> int:
        """Run a grid; return how many instructions its waves executed.

        Args:
            grid: workgroups of each axis.
            threads: of a workgroup.
            memory: with the arguments as a tensor `ARGUMENTS`.
            shared: bytes of LDS of a workgroup.
            order: of workgroups and waves.

        Raises:
            Fault: the kernel does what it may not.
        """
        self.undecided = 0
        order = order or Order()
        groups = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        chance = random.Random(order.seed)
        chance.shuffle(groups)
        waves = threads // 64
        size = 1 if order.alone and order.seed % 2 == 0 else max(IN_STEP // waves, 1)
        done = 0
        with np.errstate(all="ignore"):
            for begin in range(0, len(groups), size):
                batch = _Batch(
                    self, groups[begin : begin + size], waves, memory, max(shared, self.listing.shared), begin
                )
                done += batch.run(chance if order.alone else None, order.overtakes)
                self.undecided += batch.lds.undecided
            memory.finish()
        return done


class _Batch:
    """Some workgroups of a grid."""

    def __init__(
        self,
        program: Program,
        groups: Sequence[tuple[int, int, int]],
        waves: int,
        memory: DeviceMemory,
        shared: int,
        die: int,
    ):
        self.program = program
        self.lds = Shared(len(groups), shared)
        listing = program.listing
        group, place = np.tile(np.arange(len(groups)), waves), np.repeat(np.arange(waves), len(groups))
        whole = Waves(listing.vectors, group, place, die, listing.scratch // 4)
        whole.memory, whole.shared, whole.counters = memory, self.lds, Counters()
        address = memory.address(ARGUMENTS)
        whole.put_pair(listing.arguments_at, U64(address))
        number = listing.user_scalars
        for axis, is_on in enumerate(listing.workgroup_axes):
            if is_on:
                whole.put(number, np.array([place[axis] for place in groups], U32)[group])
                number += 1
        whole.vector[0] = (LANE + 64 * place[:, None]).astype(U32)
        self.start, self.alone = whole, False

    def run(self, chance: random.Random | None, overtakes: bool = False) -> int:
        """Run to the end; with `chance` one wave at a time, in a random order or as `Order.overtakes` says."""
        self.alone = chance is not None
        gangs = [self.start]
        if chance is not None:
            gangs = []
            for group, place in zip(self.start.group, self.start.place, strict=True):
                gang = self.start.part((self.start.group == group) & (self.start.place == place))
                gang.die = self.start.die + int(group)
                gangs.append(gang)
            return self._interleaved(gangs, chance, overtakes)
        done = 0
        while gangs:
            gangs, count = self._to_barrier(gangs)
            done += count
            self.lds.barrier(_marks(gangs))
            if done > MOST:
                raise Fault("it does not end")
        return done

    def _interleaved(self, gangs: list[Waves], chance: random.Random, overtakes: bool) -> int:
        """Run waves in a random order, each to its next barrier; some halt behind an atomic operation."""
        ready, halted, done = gangs, [], 0
        alive = Counter(int(gang.group[0]) for gang in gangs)
        arrived: dict[int, list[Waves]] = {group: [] for group in alive}
        while ready or halted:
            first = min((int(one.group[0]) for one in ready), default=0)
            of_turn = [n for n, one in enumerate(ready) if not overtakes or int(one.group[0]) == first]
            gang = ready.pop(chance.choice(of_turn)) if ready else halted.pop()
            group = int(gang.group[0])
            outcome, count = self._step(gang, set())
            done += count
            if outcome == "barrier":
                arrived[group].append(gang)
            elif outcome == "end":
                alive[group] -= 1
            else:
                (halted if overtakes or chance.random() < 0.5 else ready).extend(outcome)
            if arrived[group] and len(arrived[group]) == alive[group]:
                self.lds.barrier(_marks(arrived[group]), group)
                ready += arrived[group]
                arrived[group] = []
            if done > MOST:
                raise Fault("it does not end")
        return done

    def _to_barrier(self, gangs: list[Waves]) -> tuple[list[Waves], int]:
        """Run all waves to their next barrier or the end; return those that are not at the end."""
        ready, arrived, done = list(gangs), [], 0
        while ready:
            ready.sort(key=lambda one: one.pc)  # waves ahead wait for those behind, and meet them
            met = [one for one in ready if one.pc == ready[0].pc]
            ready = ready[len(met) :]
            gang = joined(met) if len(met) > 1 else met[0]
            outcome, count = self._step(gang, {one.pc for one in ready})
            done += count
            if outcome == "barrier":
                arrived.append(gang)
            elif isinstance(outcome, list):
                ready += outcome
        return arrived, done

    def _step(self, gang: Waves, ahead: set[int]) -> tuple[Any, int]:
        """Run a gang until it parts, meets another (`ahead`), is at a barrier or at the end."""
        code, instructions, begun = self.program.code, self.program.listing.instructions, gang.pc
        pc, count, result, reached = gang.pc, 0, None, self.program.reached
        try:
            while True:
                gang.pc = pc + 1
                busy = gang.counters.busy
                if (
                    busy
                    and not busy.isdisjoint(instructions[pc].registers)
                    and gang.counters.misused(instructions[pc])
                ):
                    raise Fault("it uses a register before the load into it is waited for")
                result = code[pc](gang)
                count += 1
                if reached is not None:
                    reached[pc] += gang.count
                pc += 1
                if result is not None:
                    if result == "atomic":
                        if not self.alone:
                            continue
                        gang.pc = pc
                        return [gang], count * gang.count
                    if not isinstance(result, tuple):
                        return result, count * gang.count
                    target, taken = result
                    if taken.all():
                        pc = target
                    elif taken.any():
                        parts = [gang.part(taken), gang.part(~taken)]
                        parts[0].pc, parts[1].pc = target, pc
                        return parts, count * gang.count
                if pc in ahead or count > MOST:
                    gang.pc = pc
                    if count > MOST:
                        raise Fault(f"it does not end, from instruction {begun} on")
                    return [gang], count * gang.count
        except Fault as fault:
            if fault.instruction is None:
                fault.instruction = f"line {instructions[pc].line}, {instructions[pc].text}"
            raise


def _marks(gangs: Sequence[Waves]) -> list[Any]:
    """Return the accesses to LDS that waves at a barrier have not waited for."""
    return [mark for gang in gangs for place in gang.counters.local for flight in place for mark in flight.marks]
