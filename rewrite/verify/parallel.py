"""Runs the parts of a gate in processes forked from this one, a few at a time, each from the same state.

What a part finds does not depend on when it ran or beside what: each begins with the models and weights that are there
when the gate begins, and its checks stand where they would if one process ran them all.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from .judging.checks import CheckRun, Done, Progress, one_by_one
from .judging.requested import Record
from .judging.verdict import Check, ConfigField
from .line_coverage import Arcs, Reach
from .models.configs import Variant
from .models.model_pair import Workbench

MOST = 4
"""More processes than this gain little: the longest part is a quarter of all."""
SILENT_S = 3600
"""For how long a process may say nothing, not even that a check ends or does not; a check takes half a minute."""


def usable_workers() -> int:
    """How many processes to run at once: as many as this process has cores, up to `MOST`; one where it cannot fork."""
    return min(MOST, len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1


@dataclass(frozen=True)
class Part:
    """Checks that one process runs one after the other.

    `shares`: their order does not matter, so that so many processes each take every so many-th of them. `early`: it
    is longer than others, and begins before them.
    """

    checks: Callable[[], Iterator[CheckRun]]
    shares: int = 1
    early: bool = False


@dataclass(frozen=True)
class Left:
    """What a process leaves behind beside its checks."""

    record: Record
    fields: list[ConfigField]
    varied: Variant | None
    stepped: tuple[Variant, ...]
    arcs: Arcs


@dataclass
class _Share:
    """Every so many-th check of a part, and the process that runs them."""

    part: int
    number: int
    process: BaseProcess
    pipe: Connection
    running: str = ""
    done: dict[int, Done] = field(default_factory=dict)
    left: Left | None = None
    ended: bool = False
    silent: int = 0
    """Seconds since it said something, as this process saw them pass: those in which the machine stalls are one."""

    @property
    def endless(self) -> bool:
        """Whether a check of it does not end."""
        return self.silent > SILENT_S or any(done.endless for done in self.done.values())


@dataclass
class Pool:
    """Processes for the parts of one gate.

    `counter` makes what counts the lines that a process runs; `reach` receives what they counted. `ended` is told of
    every share that ended.
    """

    bench: Workbench
    workers: int
    progress: Progress
    counter: Callable[[], Reach]
    reach: Reach
    ended: Callable[[], None] = lambda: None
    _running: list[_Share] = field(default_factory=list)

    def run(self, parts: Sequence[Part]) -> Iterator[Done]:
        """Yield the checks of all parts in order; what a part left on the workbench is there before they are yielded.

        Raises:
            RuntimeError: a part raised outside of any check.
        """
        waiting = [(index, number) for index, part in enumerate(parts) for number in range(part.shares)]
        waiting.sort(key=lambda share: not parts[share[0]].early)
        ended: list[_Share] = []
        try:
            for index, part in enumerate(parts):
                while sum(share.part == index for share in ended) < part.shares:
                    while waiting and len(self._running) < self.workers:
                        self._start(parts[waiting[0][0]], *waiting.pop(0))
                    ended += self._listen()
                    if any(share.endless for share in ended):  # so would others
                        self._end()
                        for left in range(index, len(parts)):
                            yield from self._merged([share for share in ended if share.part == left])
                        return
                yield from self._merged([share for share in ended if share.part == index])
        finally:
            self._end()

    def _end(self) -> None:
        """End what still runs."""
        for share in self._running:
            share.process.kill()
            _close(share)
        self._running.clear()

    def _start(self, part: Part, index: int, number: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=self._work, args=(part, number, theirs))
        process.start()
        theirs.close()
        self._running.append(_Share(index, number, process, ours))

    def _work(self, part: Part, number: int, pipe: Connection) -> None:
        """Run a share of a part, in a process of its own."""
        with open(os.devnull, "w") as nowhere:
            sys.stdout = sys.stderr = nowhere  # a thread of the other process may hold the lock of the real ones
            try:
                reach = self.counter()
                with reach.counted():
                    checks = (check for at, check in enumerate(part.checks()) if at % part.shares == number)
                    for at, done in enumerate(one_by_one(checks, pipe.send)):
                        pipe.send((at * part.shares + number, done))
                bench = self.bench
                pipe.send(Left(bench.record, bench.fields, bench.varied, bench.stepped, reach.arcs()))
            except Exception:  # a fault of ours, which the other process raises again
                pipe.send(RuntimeError(traceback.format_exc()))
            pipe.close()

    def _listen(self) -> list[_Share]:
        """Take what the processes have to say. Returns those that ended."""
        talking = wait([share.pipe for share in self._running], timeout=1)
        for share in self._running:
            if share.pipe not in talking:
                share.silent += not talking
                if share.silent > SILENT_S:
                    share.process.kill()
                    share.ended = True
                continue
            try:
                said = share.pipe.recv()
            except EOFError:
                share.ended = True
                continue
            share.silent = 0
            if isinstance(said, RuntimeError):
                raise said
            if isinstance(said, str):
                share.running = said
                self.progress(said)
            elif isinstance(said, Left):
                share.left = said
            else:
                share.done |= dict([said])
        ended = [share for share in self._running if share.ended]
        self._running = [share for share in self._running if not share.ended]
        for share in ended:
            _close(share)
            self.ended()
        return ended

    def _merged(self, shares: list[_Share]) -> Iterator[Done]:
        done: dict[int, Done] = {}
        for share in sorted(shares, key=lambda share: share.number):
            done |= share.done
            if share.left is None:
                done[max(share.done, default=-1) + 1] = _lost(share)
                continue
            self.bench.record.merge(share.left.record)
            self.bench.fields[:] = share.left.fields or self.bench.fields
            self.bench.varied = share.left.varied or self.bench.varied
            self.bench.stepped = share.left.stepped or self.bench.stepped
            self.reach.add(share.left.arcs)
        yield from (done[at] for at in sorted(done))


def _close(share: _Share) -> None:
    share.pipe.close()
    share.process.join()


def _lost(share: _Share) -> Done:
    """The check that a process was running when it ended without a word: the code under test brought it down."""
    if share.silent > SILENT_S:
        why = f"it does not end: its process said nothing for {SILENT_S} s, and could not be asked where it is"
        return Done(Check(share.running, "failed", why, failure="raised"), ends=True, endless=True)
    why = f"its process ended with {share.process.exitcode}"
    return Done(Check(share.running, "failed", why, failure="raised"))
