"""The accounting: which site of a respelled file is which, what is lost, what a table says, and that a run goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from . import matrix
from .matrix import Row, Task, rows_of, turned
from .rewritings import all_rewritings
from .sites import LOST, REWRITTEN, Fate, Site, fates
from .table import markdown, summary

TINY = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"


def site(label: str, outcome: str = REWRITTEN, where: str = "A.forward") -> Site:
    return Site("fuse_qkv", where, label, outcome)


def test_a_site_keeps_its_identity_when_its_label_is_renamed() -> None:
    found = fates([site("q, k"), site("gate, up")], [site("gate, up"), site("q_kept, k_kept")])
    assert [(fate.site.label, fate.after) for fate in found] == [("gate, up", REWRITTEN), ("q, k", REWRITTEN)]


def test_a_missing_site_is_lost_and_a_refused_one_has_its_reason() -> None:
    found = fates([site("a"), site("b"), site("c", "not_linear")], [site("b", "called_twice")])
    assert {fate.site.label: fate.after for fate in found} == {"a": LOST, "b": "called_twice", "c": LOST}


def test_a_site_elsewhere_is_another_one() -> None:
    assert [fate.after for fate in fates([site("a")], [site("a", where="B.forward")])] == [LOST]


def test_the_verdict_counts_each_rewriting_by_itself() -> None:
    kept = Row("a.py", "one", 1, [Fate(site(str(n)), REWRITTEN) for n in range(99)])
    skipped = Row("a.py", "two", 1, [Fate(site(str(n)), REWRITTEN) for n in range(97)])
    skipped.fates += [Fate(site(str(n)), "other_use") for n in range(3)]
    assert summary([kept]).holds
    assert not summary([kept, skipped]).holds
    assert not summary([Row("a.py", "one", 1, [*kept.fates, Fate(site("x"), LOST)])]).holds
    assert not summary([Row("a.py", "one", 1, [*kept.fates, Fate(site("x", "not_linear"), LOST)])]).holds
    assert not summary([kept, Row("b.py", "one", error="ValueError")]).holds
    text = markdown([kept, skipped])
    assert "| two | 1 | 1 | 100 | 97.0% | 3 | 0 | 0 |" in text
    assert "| two | fuse_qkv | other_use | 3 |" in text


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(TINY, "tiny/modeling_tiny_llama.py", ("rename_locals", "early_return"), tmp_path)
    first = rows_of(task)
    assert [row.error for row in first] == ["", ""]
    assert first[0].places > 0
    assert any(fate.site.transform == "fuse_qkv" for fate in first[0].fates)
    assert (first[1].places, first[1].fates) == (0, []), "nothing is run where nothing was changed"
    monkeypatch.setattr(matrix, "sites_of", None)
    assert rows_of(task) == first


def test_a_sample_covers_every_file_and_spreads_the_rewritings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(all_rewritings())
    first = Counter(
        turned(names, f"model_{number}/modeling_model_{number}.py")[0] for number in range(40 * len(names))
    )
    assert set(first) == set(names)
    assert max(first.values()) < 2 * 40
    assert sorted(turned(names, "llama/modeling_llama.py")) == sorted(names)
    monkeypatch.setattr(matrix, "_row", lambda task, name: Row(task.name, name, places=name != "early_return"))
    task = Task(TINY, "tiny", ("early_return", "rename_locals", "early_return", *names), tmp_path, enough=2)
    assert [row.rewriting for row in rows_of(task)] == ["early_return", "rename_locals", "early_return", names[0]]


def test_a_rule_that_looks_at_names_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no longer sees a method once its local has another name."""
    real = matrix.sites_of

    def by_name(source, text):  # type: ignore[no-untyped-def]
        found = real(source, text)
        return found if "variance = " in text else [s for s in found if s.transform != "fuse_rms_norm"]

    monkeypatch.setattr(matrix, "sites_of", by_name)
    rows = rows_of(Task(TINY, "tiny/modeling_tiny_llama.py", ("rename_locals",), tmp_path))
    assert {fate.site.transform for fate in rows[0].fates if fate.after == LOST} == {"fuse_rms_norm"}
    assert not summary(rows).holds
