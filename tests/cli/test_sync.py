"""`rewrite check` and `rewrite sync`: what is out of date, and that edits survive."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from command_line import rewrite
from kept_verdicts import keep

from rewrite.sync.merge import three_way
from rewrite.verify import Check

UPSTREAM = "modeling_tiny.py"


def upstream_fix(here: Path, old: str = "attention_dropout = 0.0", new: str = "attention_dropout = 0.1") -> None:
    path = here / UPSTREAM
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def edit(package: Path, old: str, new: str) -> None:
    path = package / UPSTREAM
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_a_fresh_package_is_up_to_date(package: Path) -> None:
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    assert rewrite("check", package).code == 0
    assert rewrite("check").code == 0
    synced = rewrite("sync", package, "--no-verify")
    assert (synced.code, "up to date" in synced.out) == (0, True)
    assert {path: path.read_bytes() for path in package.rglob("*") if path.is_file()} == before


def test_a_changed_original_is_out_of_date_until_synced(here: Path, package: Path) -> None:
    upstream_fix(here)
    stale = rewrite("check", "--json", "report.json")
    assert stale.code == 1
    assert "upstream modeling_tiny.py: changed" in stale.out
    (finding,) = json.loads((here / "report.json").read_text())["packages"]["out"]
    assert (finding["kind"], "upstream" in finding["message"]) == ("transformers-moved", True)
    assert rewrite("sync", package, "--no-verify").code == 0
    assert "attention_dropout = 0.1" in (package / UPSTREAM).read_text()
    assert rewrite("check", package).code == 0


def test_a_sync_from_another_folder_changes_nothing(
    here: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = (package / "rewrite.lock").read_bytes()
    upstream_fix(here)
    upstream_fix(here, "attention_dropout = 0.1", "attention_dropout = 0.0")
    monkeypatch.chdir(package)
    assert rewrite("check", ".").code == 0
    monkeypatch.chdir("/")
    assert rewrite("check", package).code == 0
    assert rewrite("sync", package, "--no-verify").code == 0
    assert (package / "rewrite.lock").read_bytes() == lock


def test_edits_and_upstream_changes_are_merged(here: Path, package: Path) -> None:
    edit(package, "class TinyLlamaMLP(nn.Module):", "# mine\nclass TinyLlamaMLP(nn.Module):")
    (package / "notes.txt").write_text("mine")
    upstream_fix(here)
    done = rewrite("sync", package, "--no-verify")
    assert done.code == 0, done.err
    text = (package / UPSTREAM).read_text()
    assert "# mine\n" in text
    assert "attention_dropout = 0.1" in text
    assert b"# mine" not in zipfile.ZipFile(package / ".rewrite" / "texts.zip").read(UPSTREAM)
    assert (package / "notes.txt").read_text() == "mine"
    assert rewrite("check", package).code == 0
    assert not list(here.glob("out.*"))


def test_a_conflict_is_shown_in_a_copy(here: Path, package: Path) -> None:
    edit(package, "attention_dropout = 0.0", "attention_dropout = 0.5")
    upstream_fix(here)
    before = (package / UPSTREAM).read_bytes()
    lock = (package / "rewrite.lock").read_bytes()
    conflict = rewrite("sync", package, "--no-verify")
    assert conflict.code == 1
    assert ((package / UPSTREAM).read_bytes(), (package / "rewrite.lock").read_bytes()) == (before, lock)
    copy = package / f"{UPSTREAM}.conflict"
    text = copy.read_text()
    for part in ("<<<<<<< yours", "attention_dropout = 0.5", "attention_dropout = 0.1", ">>>>>>> generated now"):
        assert part in text
    assert rewrite("sync", package, "--no-verify", "--resolved", copy).code == 2
    copy.write_text((package / UPSTREAM).read_text().replace("dropout = 0.5", "dropout = 0.6"))
    assert rewrite("sync", package, "--no-verify", "--resolved", copy).code == 0
    assert "attention_dropout = 0.6" in (package / UPSTREAM).read_text()
    assert not copy.exists()


def test_edits_of_the_runtime_are_dropped_by_name_only(here: Path, package: Path) -> None:
    assert rewrite("vendor", package).code == 0
    (package / "_runtime" / "linear" / "packing.py").write_text("# mine\n")
    upstream_fix(here)
    refused = rewrite("sync", package)
    assert refused.code == 1
    assert "has your edits in _runtime/linear/packing.py" in refused.err
    assert (package / "_runtime" / "linear" / "packing.py").read_text() == "# mine\n"
    assert rewrite("sync", package, "--replace", "_runtime/linear/packing.py").code == 0
    assert (package / "_runtime" / "linear" / "packing.py.edited").read_text() == "# mine\n"
    (package / "_runtime" / "linear" / "packing.py").write_text("# more\n")
    upstream_fix(here, "attention_dropout = 0.1", "attention_dropout = 0.2")
    assert rewrite("sync", package, "--replace", "_runtime/linear/packing.py").code == 0
    assert (package / "_runtime" / "linear" / "packing.py.edited").read_text() == "# mine\n"
    assert (package / "_runtime" / "linear" / "packing.py.edited2").read_text() == "# more\n"
    assert rewrite("check", package).code == 0


def test_a_file_changed_since_it_was_verified_is_out_of_date(package: Path) -> None:
    keep(package)
    assert rewrite("check", package).code == 0
    edit(package, "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    assert "modeling_tiny.py has changed since it was verified" in rewrite("check", package).out
    keep(package, Check("logits", "failed", "planted", failure="differs"))
    assert "says that the verification failed" in rewrite("check", package).out
    keep(package, Check("logits", "failed", "no such name", failure="raised"))
    assert "a check could not run, which cannot be accepted: parity: logits: no such" in rewrite("check", package).out


def test_a_file_that_does_not_parse_is_never_up_to_date(package: Path) -> None:
    path = package / "modeling_tiny.py"
    before = path.read_text()
    path.write_text(before + "def broken(:\n")
    line = before.count("\n") + 1
    checked = rewrite("check", package)
    assert checked.code == 1
    assert (
        f"modeling_tiny.py:{line} does not parse (invalid syntax): mend it, or rewrite undo {package}" in checked.out
    )
    assert "anew with your edits" not in checked.out  # which mends nothing here
    synced = rewrite("sync", package)
    assert (synced.code, f"line {line} does not parse" in synced.err) == (1, True)
    assert path.read_text() == before + "def broken(:\n"


def test_a_missing_original_is_out_of_date(here: Path, package: Path) -> None:
    (here / UPSTREAM).rename(here / "elsewhere.py")
    assert rewrite("check", package).code == 1
    assert rewrite("sync", package, "--no-verify").code == 1
    assert rewrite("sync", package, "--no-verify", "--original", "elsewhere.py").code == 0
    assert (package / UPSTREAM).is_file()
    assert rewrite("check", package).code == 0


@pytest.mark.parametrize(
    ("yours", "generated", "expected"),
    [
        ("a\nb\nc\n", "a\nb\nd\n", "a\nb\nd\n"),
        ("x\nb\nc\n", "a\nb\nc\n", "x\nb\nc\n"),
        ("x\nb\nc\n", "x\nb\nc\n", "x\nb\nc\n"),
        ("x\r\nb\nc\n", "a\nb\nc\n\x0c", "x\r\nb\nc\n\x0c"),
    ],
)
def test_merges_without_conflict(yours: str, generated: str, expected: str) -> None:
    merged = three_way("a\nb\nc\n", yours, generated)
    assert (merged.text, merged.conflicts) == (expected, 0)
