"""A modelled step as a table that fits into 80 columns, as JSON, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .kernel_tables import Table
from .speed import LEAST_FILL, Predicted, Timed

HEADINGS = ("", "runs", "programs", "fill", "in flight", "us", "bound by")
LEGEND = (
    "a model, not a measurement: constants and their sources in rewrite/kernels/cards.py",
    "fill: programs of a processor, average over most · us: of one launch",
    "in flight: bytes on their way, of those that the memory wants to be busy",
)


@dataclass(frozen=True)
class Exemption:
    """A launch that fills the processors badly, and why it stays so."""

    part: str
    reason: str
    model: str | None = None
    """None for every model; likewise the next two."""
    cards: tuple[str, ...] | None = None
    rows: tuple[int, ...] | None = None


FEW = (8, 32)
HOPPER = ("H100", "H200")
SECOND = "more programs than processors took a second turn: 192 took 22.6 us, 96 took 19.4 (6144x4096, 8 rows, H100)"
TOGETHER = "tiles of 64 rows that are all resident; of 128 rows it is 85% too and no faster (docs/gemm.md, 8B)"
WHOLE = "256 programs: every tile in as many parts as its neighbours, and 304 is no multiple of the tiles; never run"
EXEMPTIONS = (
    Exemption("qkv", SECOND, cards=HOPPER, rows=FEW),
    Exemption("gate-up", TOGETHER, rows=FEW),
    Exemption("o", WHOLE, cards=("MI300X",)),
    Exemption("down", WHOLE, cards=("MI300X",)),
    Exemption("attention", WHOLE, cards=("MI300X",), rows=FEW),
    Exemption(
        "qkv",
        "1536 programs of one row: 5 for each of 304 processors, and 16 more; never run",
        None,
        ("MI300X",),
        (1,),
    ),
    Exemption(
        "qkv", "96 tiles, and 2 parts of each are more than the processors; never run", cards=("B200",), rows=FEW
    ),
    Exemption(
        "qkv", "as many parts as let the busiest processor read the fewest tiles; never run", None, ("MI300X",), FEW
    ),
    Exemption("experts", "five programs a processor, and a few more; never run", "30b-a3b", ("MI300X",)),
)


@dataclass(frozen=True)
class Unfilled:
    """A launch below the least fill."""

    step: Predicted
    launch: Timed

    def __str__(self) -> str:
        one = self.launch.planned
        text = f"{one.programs} programs fill {self.launch.fill:.0%} of {self.step.card.processors} processors"
        return f"{title(self.step)} · {one.part} · {one.kernel}: {text}, at least {LEAST_FILL:.0%} are wanted"


def title(step: Predicted) -> str:
    """Return the name of a step: card, model, rows."""
    return f"{step.card.name} · {step.model} · {step.rows} row{'s' if step.rows > 1 else ''}"


def table(step: Predicted) -> Table:
    """Return the launches of a step, one a line."""
    lines = [_line(one) for one in step.launches]
    return Table(f"{title(step)} · {step.card.arch} · modelled", HEADINGS, tuple(lines), LEGEND)


def _line(one: Timed) -> tuple[str, ...]:
    planned = one.planned
    name = f" {planned.part}: {planned.kernel}"
    programs = str(planned.programs) if planned.programs else "–"
    fill = "–" if one.fill is None else f"{one.fill:.0%}"
    flight = "–" if one.flight is None else f"{one.flight:.1f}x"
    return (name, str(planned.count), programs, fill, flight, f"{one.us:.2f}", one.bound)


def summary(step: Predicted) -> str:
    """Say how long a step takes and what it is of the limit."""
    share = step.limit_ms / step.ms
    known = "calibrated on this card" if step.card.calibrated else "never held against this card"
    return f"{title(step)}: {step.ms:.3g} ms a token, {share:.0%} of the memory limit ({known})"


def unfilled(steps: Iterable[Predicted]) -> Iterator[Unfilled]:
    """Yield the launches below the least fill that no exemption covers, but for those whose start takes longest."""
    for step in steps:
        for one in step.launches:
            if _is_low(one) and not any(_covers(exemption, step, one) for exemption in EXEMPTIONS):
                yield Unfilled(step, one)


def unused(steps: Sequence[Predicted]) -> list[Exemption]:
    """Return the exemptions that no launch of these steps needs."""
    low = [(step, one) for step in steps for one in step.launches if _is_low(one)]
    return [e for e in EXEMPTIONS if not any(_covers(e, step, one) for step, one in low)]


def _is_low(one: Timed) -> bool:
    return one.fill is not None and one.fill < LEAST_FILL and one.bound != "start"


def _covers(exemption: Exemption, step: Predicted, one: Timed) -> bool:
    return (
        exemption.part == one.planned.part
        and exemption.model in (None, step.model)
        and (exemption.cards is None or step.card.name in exemption.cards)
        and (exemption.rows is None or step.rows in exemption.rows)
    )


def record(steps: Sequence[Predicted], low: Sequence[Unfilled]) -> dict[str, Any]:
    """Everything as plain JSON values, marked as modelled."""
    found = [
        {
            "card": step.card.name,
            "model": step.model,
            "rows": step.rows,
            "ms": step.ms,
            "limit_ms": step.limit_ms,
            "launches": [one.to_json() for one in step.launches],
        }
        for step in steps
    ]
    return {"modelled": True, "calibrated": all(s.card.calibrated for s in steps), "steps": found,
            "unfilled": [str(one) for one in low]}  # fmt: skip
