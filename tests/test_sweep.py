"""The sweep: a crash is a row, a row survives a restart, and what got worse is found."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from rewrite.errors import UsageError
from rewrite.source.installed import find_transformers
from rewrite.sweep import pool, sweep_plan
from rewrite.sweep.against import previous, regressions
from rewrite.sweep.examine import examine
from rewrite.sweep.sweep_row import ClassRow, Row
from rewrite.sweep.table import Report

CRASHES = """
import os
from torch import nn

os._exit(7)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.q_proj(x) @ self.k_proj(x).mT
"""


@pytest.fixture
def row():
    return Row(
        "tiny/modeling_tiny.py", "a", "b", round_trip=True, deterministic=True, stable=True, imported=True,
        sites={"fuse_qkv": ["Attention.forward: q, k"]}, skipped={"fuse_rope": [("rotate", "name_taken", "")]},
        classes=[ClassRow("TinyForCausalLM", "pass", causal=True), ClassRow("TinyModel", "not run", "no PIL")],
        gates={"parity": "pass"}, decode_loops={"TinyForCausalLM": "yes"},
    )  # fmt: skip


def test_a_table_is_read_back(row, tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text(Report("5.0", (row,)).json_text())
    assert previous(path) == {row.file: row}
    assert regressions(previous(path), [row]) == []


def worse(change):
    def changed(row):
        new = copy.deepcopy(row)
        change(new)
        return new

    return changed


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda row: row.sites.clear(), "fuse_qkv rewrites Attention.forward: q, k no more"),
        (lambda row: row.decode_loops.update(TinyForCausalLM="no: why"), "TinyForCausalLM has no decode loop any"),
        (lambda row: setattr(row, "stable", False), "stable no more"),
        (lambda row: setattr(row, "error", "its process ended with -11"), "its process ended with -11"),
        (lambda row: setattr(row.classes[0], "outcome", "fail"), "TinyForCausalLM was 'pass' and is fail"),
        (lambda row: setattr(row.classes[0], "outcome", "not run"), "TinyForCausalLM was 'pass' and is not run"),
        (lambda row: row.classes.pop(0), "TinyForCausalLM was 'pass' and is gone"),
        (lambda row: setattr(row, "rewritten_sha256", ""), "another text"),
    ],
)
def test_what_got_worse_is_named(row, change, text):
    new = worse(change)(row)
    found = regressions({row.file: row}, [new])
    if text == "another text":  # a change of the rules may change a text; that is no regression
        assert found == []
    else:
        assert len(found) == 1
        assert text in found[0]


def test_what_got_better_is_no_regression(row):
    old = worse(lambda row: (row.sites.clear(), setattr(row.classes[1], "outcome", "fail")))(row)
    assert regressions({row.file: old}, [row]) == []


def test_a_file_that_imports_now_has_lost_nothing(row):
    old = Row(row.file, "a", "b", classes=[ClassRow("(the file)", "not run", "no soundfile")])
    assert regressions({row.file: old}, [row]) == []


def test_a_process_that_dies_is_a_row_and_is_not_tried_again(tmp_path):
    file = tmp_path / "modeling_crashes.py"
    file.write_text(CRASHES)
    task = pool.Task(file, "crashes/modeling_crashes.py", tmp_path / "rows" / "crashes.json", "verified")
    [row] = pool.run([task], 1)
    assert row.error == "its process ended with 7"
    assert row.outcome == "fail"
    written = task.result.stat().st_mtime_ns
    assert list(pool.run([task], 1)) == [row]
    assert task.result.stat().st_mtime_ns == written


def test_a_file_that_does_not_parse_is_a_row(tmp_path):
    file = tmp_path / "modeling_broken.py"
    file.write_text("def (")
    assert "ParserSyntaxError" in examine(file, "broken", "rewritten").error


@pytest.mark.slow
def test_a_file_of_the_library_is_examined_whole(tmp_path):
    [(name, file)] = sweep_plan.files(find_transformers(), ["vit"])
    [row] = pool.run([pool.Task(file, name, tmp_path / "vit.json", "verified")], 1)
    assert row.outcome == "pass", row
    assert {found.name: found.outcome for found in row.classes} == {
        "ViTModel": "pass", "ViTForMaskedImageModeling": "pass", "ViTForImageClassification": "pass",
    }  # fmt: skip
    assert row.sites["fuse_qkv"] == ["ViTAttention.forward: q_proj, k_proj, v_proj"]


def test_auto_is_no_model_and_folders_limit():
    files = sweep_plan.files(find_transformers(), [])
    assert len(files) > 300
    assert not any(name.startswith("auto/") for name, _ in files)
    assert [name for name, _ in sweep_plan.files(find_transformers(), ["llama"])] == ["llama/modeling_llama.py"]


def test_a_folder_without_transformers_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no transformers package"):
        sweep_plan.library(tmp_path)


def test_a_sample_is_spread_evenly(tmp_path):
    tasks = [pool.Task(Path("f"), f"{i:02}/modeling.py", tmp_path / f"{i}.json", "verified") for i in range(20)]
    names = {f"{number:02}/modeling.py" for number in (0, 5, 10, 15)}
    assert sweep_plan.sampled(tasks, 4) == names
    assert sweep_plan.sampled(tasks, 0) == set()


def test_what_changed_is_known_by_its_text(tmp_path, monkeypatch):
    tasks = [pool.Task(Path("f"), f"{i:02}/modeling.py", tmp_path / f"{i}.json", "verified") for i in range(20)]
    before = {task.name: Row(task.name, rewritten_sha256="same") for task in tasks[1:]}
    changed = {"07/modeling.py"}
    monkeypatch.setattr(
        pool,
        "run",
        lambda given, jobs: [Row(t.name, rewritten_sha256="new" if t.name in changed else "same") for t in given],
    )
    assert sweep_plan.changed(tasks, before, 1) == {"00/modeling.py", "07/modeling.py"}


def test_a_folder_that_is_none_is_an_error():
    installed = find_transformers()
    assert [name for name, _ in sweep_plan.files(installed, ["llama"])] == ["llama/modeling_llama.py"]
    with pytest.raises(UsageError, match="did you mean llama"):
        sweep_plan.files(installed, ["llama", "lama"])
    with pytest.raises(UsageError, match="did you mean blip"):
        sweep_plan.files(installed, ["blip/modeling_blip.py"])
