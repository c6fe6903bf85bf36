"""Whoever edits a line of a generated file changes every way of running it, and where that is not so, it is seen."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from . import ways
from .edited_package import FAMILIES
from .grid import LEGEND, WIDTH, failures, table
from .text_edits import EDITS, Edit
from .ways import LEFT, STEP_TOLERANCE, WAYS, Answer, Row, Said, answer, difference, reference, row_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLE = {
    ("llama", "scaling", "steps"),
    ("llama", "renamed class", "forward"),
    ("qwen3", "branch", "prompts"),
    ("gemma2", "residual scaled", "batch"),
    ("mixtral", "new argument", "steps"),
    ("gpt2", "extra norm", "steps"),
    ("gpt2", "dropout in eval", "steps"),
    ("olmo2", "query per head", "plain loop"),
}
CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case).replace(" ", "_"))
    for case in product(FAMILIES, EDITS, WAYS)
]


@pytest.mark.parametrize(("family", "edit", "way"), CASES)
def test_the_way_says_what_the_file_says(family: str, edit: str, way: str) -> None:
    row = row_of(family, edit, way, DEVICE)
    assert not row.wrong


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_see_an_edit_is_seen(way: str) -> None:
    """The package without the edit, held to the file with it."""
    tolerance = WAYS[way].tolerance
    unedited = answer("gpt2", None, way, DEVICE)
    assert not difference(reference("gpt2", None, way, DEVICE), unedited, tolerance)
    for name in [edit.name for edit in EDITS.values() if edit.acts == "always"]:
        assert difference(reference("gpt2", name, way, DEVICE), unedited, tolerance), name


def test_an_edit_that_acts_with_one_cache_alone_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    grows = "type(cache) is DynamicCache"
    one_way = lambda text: text.replace("scaling=self.scaling,", f"scaling=self.scaling * (0.8 if {grows} else 1.0),")
    monkeypatch.setitem(EDITS, "one way", Edit("one way", one_way))
    assert not row_of("gpt2", "one way", "plain loop", DEVICE).wrong
    row = row_of("gpt2", "one way", "batch", DEVICE)
    assert row.mark in "x<"
    assert row.wrong


def test_an_edit_that_does_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = lambda text: text.replace("scaling=self.scaling,", "scaling=self.scaling * 1.0,")
    monkeypatch.setitem(EDITS, "idle", Edit("idle", idle))
    row = row_of("gpt2", "idle", "plain loop", DEVICE)
    assert row.acts is False
    assert row.wrong


def test_a_way_that_is_left_without_need_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = EDITS["dropout in eval"]
    assert row_of("gpt2", drawn.name, "forward", DEVICE).mark == "~"
    monkeypatch.setitem(EDITS, drawn.name, replace(drawn, leaves=False))
    row = row_of("gpt2", drawn.name, "forward", DEVICE)
    assert row.mark == "<"
    assert row.wrong == f"{LEFT}random"


def test_a_way_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda text: text.replace("residual + feed_forward", "1 // 0 + feed_forward")
    monkeypatch.setattr(ways, "reference", lambda *given: reference("gpt2", "scaling", *given[2:]))
    monkeypatch.setitem(EDITS, "raising", Edit("raising", wrong, acts="with a mask"))
    row = row_of("gpt2", "raising", "plain loop", DEVICE)
    assert row.mark == "!"
    assert row.wrong.startswith("ZeroDivisionError")


def said(*best: float, token: int = 0) -> Answer:
    logits = torch.zeros(1, len(best), 4)
    logits[0, :, 1] = 1.0
    logits[0, :, 0] = torch.tensor(best)
    return Answer([Said(logits, torch.full((1, len(best)), token))])


def test_a_tie_may_go_on_with_another_text() -> None:
    tied, other = said(1.0 + STEP_TOLERANCE / 4, 2.0, token=0), said(1.0 - STEP_TOLERANCE / 4, -2.0, token=1)
    assert not difference(tied, other, STEP_TOLERANCE)
    assert "another token" in difference(said(2.0, token=0), said(2.0, token=1), STEP_TOLERANCE)
    assert "token 1: logits differ" in difference(said(2.0, 2.0), said(2.0, 2.1), STEP_TOLERANCE)
    assert "logits differ" in difference(said(2.0), said(float("nan")), STEP_TOLERANCE)


def test_the_table_is_no_wider_than_a_terminal() -> None:
    rows = [Row(*case, DEVICE, wrong="the way says something else " * 9) for case in product(FAMILIES, EDITS, WAYS)]
    rows[0].wrong, rows[1].wrong, rows[1].instead = "", "", "cache_kind"
    text = table(rows)
    assert max(map(len, f"{text}\n{failures(rows)}".splitlines())) <= WIDTH
    assert all(meaning in text for mark, meaning in LEGEND.items() if mark in "=~x")
