"""Reads in AMD's assembly whether the last program to count itself can read what all of them have stored.

Programs that share a sum store their parts and count themselves with an atomic operation; the last one adds up
(`runtime/device/split_k_semaphores.py`). A barrier alone says of another wave only that it has issued its stores. So
on every way from a store to an atomic operation there have to be, in this order (LLVM, "User Guide for AMDGPU
Backend", the memory model of each chip, agent scope):

    s_waitcnt vmcnt(0)    every wave's stores have reached the L2 cache
    s_barrier             and the wave that counts knows it
    buffer_wbl2 sc1       from gfx942 on, which has an L2 cache for each of its dies: to where all of them read
    s_waitcnt vmcnt(0)

and on every way from the atomic operation to a load: its result, the stale lines thrown away, and the barrier that the
other waves wait at. A wave that a branch leads around one of these has not done it. A workgroup of one wave has no
barrier.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Step = re.Pattern[str]
"""An instruction that has to come."""

_WAIT = re.compile(r"s_waitcnt .*\bvmcnt\(0\)")
_BARRIER = re.compile(r"s_barrier\b")
_WRITE_BACK = re.compile(r"buffer_wbl2 .*\bsc1\b")
_INVALIDATE = re.compile(r"buffer_inv .*\bsc1\b|buffer_wbinvl1")
_MEMORY = r"(?:global|buffer|flat|scratch)"
_STORE = re.compile(rf"{_MEMORY}_store_")
_LOAD = re.compile(rf"{_MEMORY}_load_")
_ATOMIC = re.compile(rf"{_MEMORY}_atomic_")
_LABEL = re.compile(r"([.\w$]+):")
_BRANCH = re.compile(r"s_c?branch\w* +([.\w$]+)")


@dataclass(frozen=True)
class Arrivals:
    """The atomic operations by which the programs of a kernel count themselves."""

    count: int
    early: int
    """Of these, those that a wave's store may come after."""
    early_reads: int
    """Loads that may come before the parts of the other programs can be read."""


def of_amd(text: str) -> Arrivals:
    """Read the assembly of one kernel."""
    code = _Code(text)
    atomics = [number for number, line in enumerate(code.lines) if _ATOMIC.match(line)]
    loads = [number for number, line in enumerate(code.lines) if _LOAD.match(line)]
    own = (_WAIT,) if _has_one_cache(text) else (_WRITE_BACK, _WAIT)
    others = (_WAIT, _BARRIER) if _has_one_cache(text) else (_WAIT, _BARRIER, *own)
    stored = code.progress(_STORE, own if code.one_wave else others)
    counted = code.progress(_ATOMIC, (_WAIT, _INVALIDATE) if code.one_wave else (_WAIT, _INVALIDATE, _BARRIER))
    return Arrivals(
        count=len(atomics),
        early=sum(not stored(number) for number in atomics),
        early_reads=sum(not counted(number) for number in loads),
    )


def _has_one_cache(text: str) -> bool:
    return re.search(r'amdgcn_target ".*-gfx90a\b', text) is not None


class _Code:
    """The instructions of a kernel, and which may follow which."""

    def __init__(self, text: str):
        self.lines: list[str] = []
        labels: dict[str, int] = {}
        for line in (line.split(";")[0].strip() for line in text.splitlines()):
            if line.startswith(".section") and self.lines:
                break
            if label := _LABEL.match(line):
                labels[label[1]] = len(self.lines)
            elif line and not line.startswith((".", "//")):
                self.lines.append(" ".join(line.split()))
        self.after = [self._after(number, labels) for number in range(len(self.lines))]
        threads = re.search(r"\.max_flat_workgroup_size:\s+(\d+)", text)
        self.one_wave = threads is not None and int(threads[1]) <= 64

    def _after(self, number: int, labels: dict[str, int]) -> list[int]:
        line = self.lines[number]
        if line.startswith("s_endpgm"):
            return []
        branch = _BRANCH.match(line)
        target = [labels[branch[1]]] if branch else []
        return target if line.startswith("s_branch") else [*target, number + 1]

    def progress(self, start: Step, steps: Sequence[Step]) -> Callable[[int], bool]:
        """Return whether, before an instruction and on every way to it, all steps came since the last `start`."""
        done = [len(steps)] * (len(self.lines) + 1)
        waiting = [0] if self.lines else []
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            seen.add(number)
            line, now = self.lines[number], done[number]
            if start.match(line):
                now = 0
            elif now < len(steps) and steps[now].match(line):
                now += 1
            for follower in self.after[number]:
                if now < done[follower] or follower not in seen:
                    done[follower] = min(now, done[follower])
                    waiting.append(follower)
        return lambda number: done[number] == len(steps)
