"""A rewritten side against itself: its decode loop and its captured forward against its own plain forward.

An edit that is meant may compute anything, but all ways of running it have to compute the same. So the package's own
class takes the original's part, on a CPU, where nothing but a switch makes it take its loop or capture its forward.
All weights are random, also those of parameters that the original does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ..calls.captured_replays import captured_checks
from ..judging.checks import CheckRun
from ..judging.compare import NotRun
from ..judging.verdict import Figure
from ..models.model_inputs import TEXT
from ..models.model_pair import Workbench
from .loop_checks import StepDiffers, loop_checks

ITSELF = "itself: "
"""What the names of these checks begin with."""
LEFT = "generate() takes transformers' loop"
"""What the reason begins with where a step is another than the forward: slower, and right."""


def itself_checks(bench: Workbench) -> Iterator[CheckRun]:
    """The checks of the captured forward and, of a class that writes, of the decode loop."""
    subject = replace(bench.subject, original=bench.subject.rewritten)
    options = replace(bench.options, device="cpu", weights=None, quick=True)
    own = Workbench(subject, bench.variants[:1], options)
    loop = bench.subject.writes and bench.base.inputs == TEXT
    for check in (*captured_checks(own), *(loop_checks(own, own.variants) if loop else ())):
        yield replace(check, name=f"{ITSELF}{check.name}", run=partial(_own, check.run))


def _own(run: Callable[[], Mapping[str, Figure]]) -> Mapping[str, Figure]:
    """Run a check; a step that the package leaves aside, since it is another than its forward, is none to compare."""
    try:
        return run()
    except StepDiffers as error:
        raise NotRun(f"{LEFT}: {error}") from error
