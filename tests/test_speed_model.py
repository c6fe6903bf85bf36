"""The speed model on paper: what bounds a launch, predictions beside measurements, what fills a card badly."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rewrite.kernels import planned, speed, speed_tables
from rewrite.kernels.cards import CARDS
from rewrite.kernels.model_sizes import STEPS
from rewrite.kernels.planned import LIBRARY, Planned

ROOT = Path(__file__).parents[1]
PLANS = planned.load(ROOT / "fixtures/kernels/steps.json")
PAGE = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
NEAR = 0.15
"""Part of a measured time by which a prediction may miss it."""
H100 = CARDS["H100"]
LARGE = Planned("down", "linear", 32, 10**8, 1056, 256, 4, 64, 128, False, True)


def predicted(card: str, model: str, rows: int) -> speed.Predicted:
    return speed.predict(CARDS[card], model, rows, PLANS[card, model][rows])


def lines(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the page."""
    part = re.split(r"\n##+ ", PAGE.split(f"\n### {heading}\n")[1])[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    return found[2:]


@pytest.mark.parametrize("cells", lines("Predicted beside measured"), ids=lambda cells: " ".join(cells[:3]))
def test_predictions_are_near_what_was_measured(cells: list[str]) -> None:
    card, model, rows, measured, said, off, _ = cells
    ms = predicted(card, model, int(rows)).ms
    assert CARDS[card].calibrated
    assert said == f"{ms:.3g}", "the page says something else than the model"
    assert off == f"{ms / float(measured) - 1:+.0%}".replace("-", "−")
    assert abs(ms / float(measured) - 1) <= NEAR


@pytest.mark.parametrize("cells", lines("Cards that were never run"), ids=lambda cells: " ".join(cells[:2]))
def test_predictions_of_other_cards_are_the_models(cells: list[str]) -> None:
    card, model, *said = cells
    assert not CARDS[card].calibrated
    known = PLANS[card, model]
    assert said == [f"{predicted(card, model, rows).ms:.3g}" if rows in known else "–" for rows in (1, 8, 32)]


def test_an_mi300x_on_paper() -> None:
    """Beside published times; and every launch that takes more than 1.25 times its bytes, its start left out."""
    table, launches = itertools.tee(lines("An MI300X on paper"))
    for model, ours, _, limit in (cells for cells in table if len(cells) == 4 and cells[0] in STEPS):
        step = predicted("MI300X", model, 1)
        assert [ours, limit] == [f"{step.ms:.3g}", f"{step.limit_ms:.3g}"]
    found = [
        [model, str(rows), one.planned.part, f"{one.over:.1f}", f"{one.us:.3g}", one.bound]
        for (card, model), plans in PLANS.items()
        for rows in plans
        for one in predicted(card, model, rows).launches
        if card == "MI300X" and one.over is not None and one.over > 1.25
    ]
    assert [cells for cells in launches if len(cells) == 6 and cells[0] in STEPS] == found


def test_what_bounds_a_launch_of_amds() -> None:
    """Cycles of the processor with the most programs, and the way of one program with the sum behind it."""
    card, one = CARDS["MI300X"], replace(LARGE, programs=304, moved=10**6)
    bounds = {"vector": 10**5, "multiply": 10**5, "lds": 10**5, "cache": 10**5}
    named = {"multiply": "matrix", "lds": "LDS"}
    for unit, cycles in bounds.items():
        timed = speed.timed(card, replace(one, **{unit: cycles}))
        assert timed.bound == named.get(unit, unit)
        waves = one.threads / 64
        took = cycles * waves / 2100 / (4 if unit in ("vector", "multiply") else 1)
        assert timed.us == pytest.approx(took + 1.3 + 2.0)
    tail = speed.timed(card, replace(one, vector=10**4, tail=10**5))
    assert (tail.bound, tail.us) == ("path", pytest.approx(11 * 10**4 / 2100 + 3.3))
    assert speed.in_flight(card, replace(one, flight=32, resident=2)) == 304 * min(32 * one.threads, 10**6 / 304)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, "memory"),
        ({"moved": 10**6}, "start"),
        ({"programs": 66}, "processor"),  # half of the processors have all of it
        ({"threads": 32, "registers": 8, "resident": 1}, "in flight"),
        ({"kernel": LIBRARY}, "memory"),
        ({"moved": 0}, "start"),
    ],
)
def test_what_bounds_a_launch(change: dict[str, int], bound: str) -> None:
    assert speed.timed(H100, replace(LARGE, **change)).bound == bound


def test_a_launch_takes_its_bytes_and_its_ramp() -> None:
    timed = speed.timed(H100, LARGE)
    assert timed.us == pytest.approx(1e8 / (3.35 * 0.95 * 1e6) + 1.3)
    assert timed.fill == 1.0
    without = speed.timed(CARDS["MI300X"], replace(LARGE, programs=304))
    assert without.us == pytest.approx(1e8 / (5.3 * 0.88 * 1e6) + 1.3 + 2.0)  # none begins early there


def test_who_fills_a_card_badly_is_found() -> None:
    def found(programs: int) -> list[str]:
        step = speed.predict(H100, "8b", 1, [replace(LARGE, programs=programs)])
        return [str(one) for one in speed_tables.unfilled([step])]

    assert found(132) == found(1000) == found(10000) == []
    assert found(140) == [
        "H100 · 8b · 1 row · down · linear: 140 programs fill 53% of 132 processors, at least 85% are wanted"
    ]


def test_steps_fill_the_cards_but_for_exemptions_that_are_needed() -> None:
    steps = [
        speed.predict(CARDS[card], model, rows, launches)
        for (card, model), plans in PLANS.items()
        for rows, launches in plans.items()
    ]
    assert [str(one) for one in speed_tables.unfilled(steps)] == []
    assert speed_tables.unused(steps) == []
    for step in steps:
        table = speed_tables.table(step)
        widths = [max(len(row[i]) for row in (table.headings, *table.rows)) for i in range(len(table.headings))]
        assert sum(widths) + len(widths) - 1 <= 80
        assert "model" in table.title + " ".join(table.notes)
        assert ("calibrated" in speed_tables.summary(step)) == step.card.calibrated


def test_plans_are_read_as_they_were_written(tmp_path: Path) -> None:
    planned.write(tmp_path / "steps.json", PLANS)
    assert planned.load(tmp_path / "steps.json") == PLANS


@pytest.mark.skipif(planned.kernel_run.importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_step_is_planned_as_it_was_recorded() -> None:
    """What is launched, and how it is divided; what the compiler makes of it is `test_ahead_of_time`'s."""
    names = ("part", "kernel", "count", "moved", "programs", "threads", "matrix", "overlaps")
    now, then = planned.plan("MI300X", "8b", [8])[8], PLANS["MI300X", "8b"][8]
    assert [[getattr(one, name) for name in names] for one in now] == [
        [getattr(one, name) for name in names] for one in then
    ]


def test_constants_have_sources() -> None:
    text = (ROOT / "rewrite/kernels/cards.py").read_text(encoding="utf-8")
    after = re.findall(r'^[A-Z_]+ = [\d.]+\n"""(.*?)"""', text, re.M | re.S)
    assert len(after) >= 9
    assert all("docs/" in said or "bench/" in said or "assumed" in said for said in after)
