"""A rewritten side against itself: its decode loop and its captured forward against its own plain forward.

An edit that is meant may compute anything, but all ways of running it have to compute the same. So the package's own
class takes the original's part, on a CPU, where nothing but a switch makes it take its loop or capture its forward,
and where operators run in torch: what is left between the two sides is sums in another order, in fp64. All weights are
random, also those of parameters that the original does not have.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from ..calls.captured_replays import captured_checks
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.verdict import ITSELF, Figure
from ..models.model_pair import Workbench, on_original
from ..models.subjects import Subject
from .cache_name import lost_cache
from .loop_checks import SWITCH, Package, loop_checks, needless, stepwise
from .loop_scenarios import SCENARIOS, Session, say
from .prompts import Ask
from .step_divergence import watched

ASK, STEP = Ask("step", 2, 9), 2
"""A prompt, and the tokens to generate behind it so that one step is made."""


def itself_checks(bench: Workbench) -> Iterator[CheckRun]:
    """The checks of the captured forward and of a step of the decode loop, of every package that has them."""
    own = _own(bench)
    for check in captured_checks(own):
        yield replace(check, name=f"{ITSELF}{check.name}")
    if hasattr(own.subject.rewritten, SWITCH):
        yield CheckRun(f"{ITSELF}decode step", partial(_step, bench, own))


def itself_loop_checks(bench: Workbench) -> Iterator[CheckRun]:
    """The checks of the decode loop around its steps, of a class that writes."""
    own = _own(bench)
    for check in loop_checks(own, own.variants) if own.goes_on else ():
        yield replace(check, name=f"{ITSELF}{check.name}")


def _own(bench: Workbench) -> Workbench:
    return _on_cpu(bench, replace(bench.subject, original=bench.subject.rewritten))


def _on_cpu(bench: Workbench, subject: Subject) -> Workbench:
    return Workbench(subject, bench.variants[:1], replace(bench.options, device="cpu", weights=None, quick=True))


def _step(bench: Workbench, own: Workbench) -> Mapping[str, Figure]:
    """Steps by hand of rows of text, or a few tokens behind other prompts, against the plain forward.

    A step that the package leaves aside, since it found out that it is another than the forward, is no better: on a
    GPU, in 16 bits, it may not find out.

    Raises:
        Mismatch: they differ; the message says where.
        NotRun: there is no such step, or that of the original is left aside too.
    """
    if own.goes_on and (lost := lost_cache(bench)):
        raise NotRun(lost)
    try:
        if own.goes_on:
            padded, alone = (stepwise(own, own.base, rows) for rows in (3, 1))  # NaN of padding may leave fp32 alone
            return {**padded, **{f"one row, {name}": value for name, value in alone.items()}}
        return Session(own, own.base).about(SCENARIOS["rows with padding, one ends"])
    except NotRun as reason:
        if "step_differs" in str(reason) and not _left_aside_too(bench, reason):
            raise Mismatch(_place(own)) from reason
        raise
    except Mismatch as mismatch:
        raise Mismatch(_place(own) + (f": {mismatch}" if mismatch.figures else ""), mismatch.figures) from mismatch


def _left_aside_too(bench: Workbench, reason: NotRun) -> bool:
    """Whether this version's loop leaves the step of the original aside as well."""
    session = Session(_on_cpu(bench, bench.subject), bench.base)
    arguments = session.ask(ASK)
    try:
        needless(session.bench, session.pair.original, lambda model: say(model, arguments, STEP), reason)
    except Mismatch:
        return False
    return True


def _place(own: Workbench) -> str:
    """Where the step parts from the forward, in words."""
    session = Session(own, own.base)
    with contextlib.suppress(NotRun):
        arguments = session.ask(ASK)
        call = Package.of(own.subject.rewritten).call.StepCall
        with watched(call, inspect.getfile(own.subject.rewritten)) as steps:
            on_original(say, session.pair.rewritten, arguments, STEP)
        if said := steps.parted():
            return said
    return "a step computes something else than the forward"
