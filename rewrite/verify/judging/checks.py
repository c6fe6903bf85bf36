"""Runs checks one after another and turns whatever happens into a result."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rewrite.errors import NothingToBuild, RewriteError, SourceDoesNotImport

from .compare import DoesNotRun, Mismatch, NotRun
from .verdict import Check, Failure, Figure, Gate, Status
from .watchdog import Hung, watched

Progress = Callable[[str], None]
LIBRARIES = frozenset({"torch", "transformers"})
"""Folders whose code raises what another's made it raise."""


@dataclass(frozen=True)
class CheckRun:
    """A check to run: `run` returns its figures, raises `Mismatch` to fail or `NotRun` where it does not apply.

    `essential` checks must run for a verdict to pass; `stops` ends the gate when the check fails.
    """

    name: str
    run: Callable[[], Mapping[str, Figure]]
    essential: bool = False
    stops: bool = False


def left_out(name: str, reason: object) -> CheckRun:
    """A check that does not apply here."""

    def run() -> Mapping[str, Figure]:
        raise NotRun(str(reason))

    return CheckRun(name, run)


@dataclass(frozen=True)
class Done:
    """A check that ran; `missing`: it is essential and did not run; `ends`: no other check of the gate follows it.

    `endless`: it did not end by itself, and neither would others: nothing at all follows it.
    """

    check: Check
    missing: bool = False
    ends: bool = False
    endless: bool = False


def one_by_one(checks: Iterable[CheckRun], progress: Progress) -> Iterator[Done]:
    """Run checks one after the other, up to one that does not end."""
    for check in checks:
        progress(check.name)
        started = time.perf_counter()
        try:
            with watched():
                result = run_check(check)
        except Hung as why:
            spent = time.perf_counter() - started
            yield Done(Check(check.name, "failed", str(why), seconds=spent, failure="raised"), ends=True, endless=True)
            return
        missing = check.essential and result.status == "not run"
        yield Done(result, missing, check.stops and result.status == "failed")


def run_gate(number: int, name: str, results: Iterable[Done], fail_fast: bool = False) -> tuple[Gate, bool]:
    """Take the checks of a gate as they run. Returns the gate, and whether every essential check ran."""
    started = time.perf_counter()
    done: list[Check] = []
    complete = True
    for result in results:
        done.append(result.check)
        complete &= not result.missing
        if result.ends or (fail_fast and result.check.status == "failed"):
            break
    return Gate(number, name, tuple(done), time.perf_counter() - started), complete


def run_check(check: CheckRun) -> Check:
    """Run one check; any exception out of the code under test is a failure of that code."""
    started = time.perf_counter()
    status: Status = "passed"
    failure: Failure = ""
    detail, figures = "", {}
    try:
        figures = dict(check.run())
    except NotRun as reason:
        status, detail = "not run", str(reason)
    except Mismatch as mismatch:
        status, detail, figures = "failed", str(mismatch), mismatch.figures
        failure = "differs" if figures else "wrong"
    except (NothingToBuild, SourceDoesNotImport):  # no fault of the rewritten file
        raise
    except (DoesNotRun, RewriteError) as error:
        status, failure, detail = "failed", "raised", str(error)
    except Exception as error:  # the rewritten file may raise anything; silence would be a pass
        status, failure, detail = "failed", "raised", describe(error)
    return Check(check.name, status, detail, figures, time.perf_counter() - started, failure)


def describe(error: BaseException) -> str:
    """An exception with the place it came from: the last one that is not in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not LIBRARIES & {*Path(frame.filename).parts}] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}{place}"
