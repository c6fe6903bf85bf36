"""Which transform makes a verification fail: found by making the package with fewer of them and verifying again.

A package is made with the first half of the transforms that rewrote something, then with more or fewer, until it is
known which one brings the failure; then without that one alone. Only what failed is verified again.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewrite.benchmark.rungs import write
from rewrite.codemod.build import build
from rewrite.console.progress import duration
from rewrite.console.progress_steps import Step
from rewrite.delivery.verification import Request
from rewrite.delivery.worker import Judge
from rewrite.errors import NothingToRewrite
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import Source
from rewrite.transform import Transform

if TYPE_CHECKING:
    from rewrite.verify import Verdict

MOST_SECONDS = 600.0
MOST_FOUND = 3
"""Where more transforms than this are at fault together, something else is."""
SHARP = 3
"""How many of the failed checks tell a package that fails: one of each kind, the quickest."""
Progress = Callable[[str], None]


class _Spent(Exception):
    """The time is up."""


@dataclass(frozen=True)
class Bisection:
    """What was found."""

    at_fault: tuple[str, ...]
    """Transforms, all of which have to be left out."""
    passes: bool
    """Whether what failed passes without them."""
    failed: int
    """How many checks failed."""
    runs: int
    seconds: float
    note: str = ""
    """Why nothing was found, or not all."""

    def __str__(self) -> str:
        """What was found, and how, in words."""
        how = f"{self.runs} {'run' if self.runs == 1 else 'runs'}, {duration(self.seconds)}"
        checks = "the check that failed passes" if self.failed == 1 else f"the {self.failed} checks that failed pass"
        if not self.passes:
            return f"{self.note} ({how})"
        if len(self.at_fault) == 1:
            return f"{self.at_fault[0]}: without it {checks} ({how})"
        return f"no single transform: without {' and '.join(self.at_fault)} together {checks} ({how})"

    @property
    def skips(self) -> str:
        """The options that leave them out."""
        return " ".join(f"--skip {name}" for name in self.at_fault)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


def bisect(
    source: Source,
    transforms: Sequence[Transform],
    verdict: Verdict,
    request: Request,
    judge: Judge,
    progress: Progress = lambda message: None,
    clock: Callable[[], float] = time.monotonic,
) -> Bisection:
    """Look for the transforms at fault for a failed `verdict` on the package that `transforms` make of `source`."""
    search = _Search(source, tuple(transforms), verdict, request, judge, progress, clock)
    return search.result()


class _Search:
    def __init__(
        self,
        source: Source,
        transforms: tuple[Transform, ...],
        verdict: Verdict,
        request: Request,
        judge: Judge,
        progress: Progress,
        clock: Callable[[], float],
    ):
        from rewrite.verify import failure_groups

        self.source = source
        self.transforms = transforms
        self.request = replace(request, gates=_gates(verdict), keep_going=True)
        self.judge = judge
        self.progress = progress
        self.clock = clock
        self.started = clock()
        self.runs = 0
        self.first_seconds = 0.0
        found = failure_groups.of_verdict(verdict)
        self.failed = failure_groups.names(found)
        self.sharp = tuple(cause.cheapest.name for cause in found[:SHARP])
        self.left = tuple(_at_work(source, transforms))
        self.expected = 2 + math.ceil(math.log2(max(len(self.left), 1)))
        self.at_fault: list[str] = []

    def result(self) -> Bisection:
        try:
            return self._result()
        except _Spent:
            return self._end(False, f"not found in {duration(MOST_SECONDS)}")

    def _result(self) -> Bisection:
        if not self.left:
            return self._end(False, "no transform changed anything")
        if not self._fails(self.left, self.sharp):
            self.sharp = ()  # it may need what ran before it
            if not self._fails(self.left, ()):
                return self._end(False, "no transform: what they generate passes")
        while True:
            self.at_fault.append(self._last_of_shortest())
            self.left = tuple(name for name in self.left if name != self.at_fault[-1])
            if not self.left:
                return self._end(False, f"{' and '.join(self.at_fault)}, and no other transform rewrites anything")
            if not (still := self._fails(self.left, self.failed)):
                return self._end(True)
            if len(self.at_fault) == MOST_FOUND:
                names = ", ".join(self.at_fault)
                return self._end(False, f"no single transform: it fails without {names} too")
            self.sharp = still[:SHARP]
            self.expected = self.runs + 1 + math.ceil(math.log2(max(len(self.left), 1)))

    def _last_of_shortest(self) -> str:
        """Return the last transform of the shortest beginning that fails: with it the failure comes."""
        passes, fails = 0, len(self.left)
        while fails - passes > 1:
            middle = (passes + fails) // 2
            if self._fails(self.left[:middle], self.sharp):
                fails = middle
            else:
                passes = middle
        return self.left[fails - 1]

    def _fails(self, names: Sequence[str], checks: tuple[str, ...]) -> tuple[str, ...]:
        """Return which of `checks` fail in a package that these transforms make."""
        if self.clock() - self.started > MOST_SECONDS:
            raise _Spent
        self.runs += 1
        self.progress(Step(self._about(names), self.runs - 1, max(self.expected, self.runs)))
        chosen = [transform for transform in self.transforms if transform.name in names]
        try:
            built = build(self.source, chosen)
        except NothingToRewrite:
            return ()
        with tempfile.TemporaryDirectory(prefix="rewrite-") as place:
            folder = Path(place) / "package"
            options = Options(only=tuple(names))
            write(assemble(built, chosen, options, folder), folder)
            verdict = self.judge(self.source.path, folder, replace(self.request, checks=checks), lambda message: None)
        return tuple(dict.fromkeys(check.name for gate in verdict.gates for check in gate.failures))

    def _about(self, names: Sequence[str]) -> str:
        if self.at_fault and len(names) == len(self.left):
            return f"without {', '.join(self.at_fault)}"
        return f"with {len(names)} of {len(self.left) + len(self.at_fault)} transforms"

    def _end(self, passes: bool, note: str = "") -> Bisection:
        seconds = self.clock() - self.started
        return Bisection(tuple(self.at_fault), passes, len(self.failed), self.runs, seconds, note)


def _gates(verdict: Verdict) -> tuple[str, ...]:
    """Return the gates that failed; structure, which always runs, where it alone did."""
    return tuple(gate.name for gate in verdict.gates if gate.status == "failed")


def _at_work(source: Source, transforms: Sequence[Transform]) -> Iterator[str]:
    """Yield the names of the transforms that rewrite something, in the order in which they run."""
    reports = {report.name: report for report in build(source, transforms).rewritten.transforms}
    for transform in transforms:
        if reports[transform.name].rewritten:
            yield transform.name
