"""Every change, made before or after the first call, used and undone: one row each."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import of_adapters, of_caches, of_code, of_models, of_modules, of_settings
from .calls import Said, call, difference, own_error
from .change import Absent, Change
from .families import FAMILIES, Side, side

BEFORE, AFTER = "before", "after"
"""The first call."""
EQUAL, SAME_ERROR, REFUSED, ABSENT, NO_ERROR = "equal", "same error", "refused", "absent", "no error"
"""`NO_ERROR`: the original raises and the package does not; there are no tokens that could be wrong."""
UNDEFINED = "undefined"
"""The original itself says something else each time: it reads memory that nobody wrote."""
DIFFERENT, RAISES = "SILENT", "RAISES"
WRONG = (DIFFERENT, RAISES)
OWN_ERRORS, LARGEST_OWN_ERROR = 4.0, 1e-3
"""How many times the original's own error a package may be away from it, and the largest that is taken for one."""
PHASES = ("first", "changed", "again", "undone")


class NotUndone(AssertionError):
    """A change outlives its `with` block in the process: what is walked later would be of another transformers."""

    def __init__(self, change: Change, leak: str):
        super().__init__(f"{change} is not undone: {leak}")


@dataclass
class Row:
    """What became of a change of a model of a family."""

    family: str
    kind: str
    name: str
    when: str
    outcomes: dict[str, str] = field(default_factory=dict)
    """By phase: `EQUAL` and so on."""
    details: dict[str, str] = field(default_factory=dict)
    looped: list[str] = field(default_factory=list)
    """Phases in which the decode loop replayed, or a captured forward where a model does not generate."""
    reasons: list[str] = field(default_factory=list)
    effective: bool = False
    """Whether the original's result is another one with the change."""
    seconds: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """The phases that went wrong."""
        return [phase for phase, outcome in self.outcomes.items() if outcome in WRONG]

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """A family, the changes of it by number, and where."""

    family: str
    numbers: tuple[int, ...]
    whens: tuple[str, ...] = (BEFORE, AFTER)
    device: str = "cpu"


def changes_of(original: Side) -> list[Change]:
    """Return every change of a model, in an order that is always the same."""
    rooms = (of_modules, of_code, of_settings, of_models, of_adapters, of_caches)
    return [change for room in rooms for change in room.changes(original)]


def tasks(
    families: Sequence[str], each: int | None, device: str = "cpu", kind: str = "", seed: int = 0, size: int = 100
) -> list[Task]:
    """Return pieces of work: all changes, or so many of each family, spread over the kinds by a seed.

    Args:
        families: names.
        each: how many changes of a family; None for all.
        device: of the models.
        kind: text that the kinds have to contain, and the name.
        seed: of the draw.
        size: changes of one piece.
    """
    found = []
    for family in families:
        by_kind: dict[str, list[int]] = {}
        for number, change in enumerate(changes_of(side(family, False, device))):
            if kind in str(change):
                by_kind.setdefault(change.kind, []).append(number)
        drawn = _drawn(list(by_kind.values()), each, random.Random(f"{seed} {family}"))
        found += [Task(family, tuple(drawn[n : n + size]), device=device) for n in range(0, len(drawn), size)]
    return found


def _drawn(groups: list[list[int]], each: int | None, dice: random.Random) -> list[int]:
    """Return one of each group in turn until there are enough."""
    groups = [dice.sample(group, len(group)) for group in groups]
    dice.shuffle(groups)
    turns = max(map(len, groups), default=0)
    return [group[turn] for turn in range(turns) for group in groups if turn < len(group)][:each]


def run(work: Sequence[Task], jobs: int) -> Iterator[list[Row]]:
    """Yield the rows of each piece as it is done."""
    if jobs == 1:
        yield from map(rows_of, work)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(rows_of, work)


def rows_of(task: Task) -> list[Row]:
    """Return the rows of a piece of work."""
    changes = changes_of(side(task.family, False, task.device))
    usual = call(side(task.family, False, task.device))
    found = []
    for number in task.numbers:
        for when in task.whens:
            found.append(row_of(changes[number], task.family, when, task.device, usual))
    return found


def row_of(change: Change, family: str, when: str, device: str, usual: Said) -> Row:
    """Make a change of both models, call them, and compare."""
    started = time.process_time()
    row = Row(family, change.kind, change.name, when)
    reference = side(family, change.in_text, device)
    if change.in_text and device == "cpu":
        reference.model._step_without_graph = reference.model._forward_without_graph = False
    wanted = _said(change, reference, when)
    assert wanted is not None, "the changes are those of originals"
    got = _said(change, side(family, True, device), when)
    changed = wanted.get("changed")
    row.effective = changed is not None and bool(difference(usual, changed))
    for phase in wanted:
        row.outcomes[phase] = ABSENT
        if got is not None:
            row.outcomes[phase], row.details[phase] = _judged(wanted[phase], got[phase])
    if got is not None and row.wrong:
        _judge_again(row, change, device, wanted, got)
    if row.wrong and changed is not None and difference(changed, wanted["again"]):
        row.outcomes |= dict.fromkeys(("changed", "again"), UNDEFINED)
    row.details = {phase: detail for phase, detail in row.details.items() if detail}
    for phase, said in (got or {}).items():
        if said.replays.get("steps" if FAMILIES[family].generates else "forwards"):
            row.looped.append(phase)
    row.reasons = sorted({reason for said in (got or {}).values() for reason in said.reasons})
    leak = difference(usual, call(side(family, False, device)))
    if leak:
        raise NotUndone(change, leak)
    row.seconds = round(time.process_time() - started, 3)
    return row


def _said(change: Change, model: Side, when: str) -> dict[str, Said] | None:
    """Return what a model says at each phase; None if it has nothing of what is to be changed."""
    said: dict[str, Said] = {}
    if when == AFTER:
        said["first"] = call(model)
    try:
        with change.made(model):
            said["changed"] = call(model)
            said["again"] = call(model)
    except Absent:
        return None
    except Exception as error:  # what cannot be done, or not undone, has to fail in both
        failed = Said(error=type(error).__name__, detail=f"the change itself: {error}"[:200])
        said |= {phase: failed for phase in ("changed", "again") if phase not in said}
        said["undone"] = failed
        return said
    said["undone"] = call(model)
    return said


def _judged(wanted: Said, got: Said) -> tuple[str, str]:
    found = difference(wanted, got)
    if found:
        return (RAISES if got.error else NO_ERROR if wanted.error else DIFFERENT), found
    if wanted.error:
        return SAME_ERROR, ""
    refused = not got.replays.get("steps") and any(reason.startswith("generate: ") for reason in got.reasons)
    return (REFUSED if refused else EQUAL), ""


def _judge_again(row: Row, change: Change, device: str, wanted: dict[str, Said], got: dict[str, Said]) -> None:
    """Excuse what is no further than the original is from itself in fp64: some changes make roundings grow."""
    model = side(row.family, False, device)
    model.model.double()
    exact = _said(change, model, row.when) or {}
    for phase in row.wrong:
        if phase in exact and not exact[phase].error:
            own = own_error(wanted[phase], exact[phase])
            if own < LARGEST_OWN_ERROR and not difference(wanted[phase], got[phase], OWN_ERRORS * own):
                row.outcomes[phase], row.details[phase] = EQUAL, ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what transformers, torch and peft warn of changes like these."""
    import logging
    import warnings

    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)
