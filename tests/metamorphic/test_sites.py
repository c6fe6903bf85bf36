"""A sample of the matrix: every rewriting on a modeling file of the installed transformers; no site may be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewrite.sweep.sweep_plan import files, library

from .matrix import Row, Task, rows_of
from .rewriting import respell
from .rewritings import all_rewritings
from .sites import LOST
from .table import KEPT_AT_LEAST, tally

SAMPLE = (
    "cohere2", "gemma2", "gpt_neox", "granite", "llama", "mixtral", "mpt", "nemotron", "olmo2", "persimmon", "qwen3",
    "vit",
)  # fmt: skip
EACH = 1
"""On how many files of the sample a rewriting is tried; `python -m tests.metamorphic` tries it on all."""


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def tried(name: str, folder: Path) -> list[Row]:
    """Rows of the first files, counted from another place for each rewriting, in which it changes something."""
    found = files(library(None), SAMPLE)
    start = list(all_rewritings()).index(name) % len(found)
    rows: list[Row] = []
    for label, path in (*found[start:], *found[:start]):
        if respell(path.read_text("utf-8"), all_rewritings()[name]).places:
            rows += rows_of(Task(path, label, (name,), folder))
        if len(rows) == EACH:
            break
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", list(all_rewritings()))
def test_no_site_is_lost(name: str, rows_folder: Path) -> None:
    rows = tried(name, rows_folder)
    assert rows, "no file of the sample has a place for this rewriting"
    assert [row.error for row in rows if row.error] == []
    found = [fate for row in rows for fate in row.fates]
    assert found, "the files have no site to lose"
    told = [f"{fate.site.transform} · {fate.site.where}: {fate.site.label} → {fate.after}" for fate in found]
    assert [line for line, fate in zip(told, found, strict=True) if fate.after == LOST] == []
    assert tally(found).share >= KEPT_AT_LEAST, "\n".join(told)
