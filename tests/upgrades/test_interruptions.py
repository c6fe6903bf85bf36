"""Killed at any moment, disk full, read-only folder, two at once: the folder is the old state or the new one."""

from __future__ import annotations

import errno
import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rewrite

from rewrite.package import output, swap
from rewrite.sync import rebuild

from . import killed
from .conftest import Releases, edit
from .test_releases import DROPOUT

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_kill_leaves_the_old_state_or_the_new() -> None:
    """bench/upgrades.py does 200."""
    counts = killed.kill_at_random(4, random.Random(3))
    assert counts.get("old", 0) + counts.get("new", 0) == 4


def test_a_swap_in_two_steps_is_put_right_by_the_next_run() -> None:
    command = [sys.executable, str(killed.__file__), "2", "8", "--no-exchange"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] == 2


def test_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not swap.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system has no such step")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(FileNotFoundError):
        swap.exchange(tmp_path / "a", tmp_path / "nowhere")


@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_a_disk_that_fills_up_leaves_the_old_state(
    package: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    edit(package / "modeling_tiny.py", "class TinyLlamaMLP", "# mine\nclass TinyLlamaMLP")
    before, written, write = contents(package), [0], Path.write_bytes

    def fills(self: Path, data: bytes) -> int:
        written[0] += 1
        if written[0] >= step:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    tree = releases("6.1.0", DROPOUT)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fills)
        done = rewrite("sync", package, "--transformers", tree)
    assert (done.code, "No space left on device" in done.err) == (1, True)
    assert contents(package) == before
    assert [path.name for path in package.resolve().parent.iterdir()] == ["out"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place(package: Path, releases: Releases) -> None:
    before, parent = contents(package), package.resolve().parent
    parent.chmod(0o555)
    try:
        done = rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT))
    finally:
        parent.chmod(0o755)
    assert (done.code, "cannot write" in done.err) == (1, True)
    assert contents(package) == before


def test_a_place_that_refuses(package: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    before, tree = contents(package), releases("6.1.0", DROPOUT)

    def refuses(*arguments: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("rewrite.package.swap._claimed", refuses)
    done = rewrite("sync", package, "--transformers", tree)
    assert (done.code, "Read-only file system" in done.err) == (1, True)
    assert contents(package) == before


def test_two_at_once(package: Path, releases: Releases) -> None:
    tree = releases("6.1.0", DROPOUT)
    before = contents(package)
    with swap.alone(package):
        busy = rewrite("sync", package, "--transformers", tree)
        assert (busy.code, "is writing out" in busy.err) == (1, True)
        assert contents(package) == before
    assert rewrite("sync", package, "--transformers", tree).code == 0
    assert [path.name for path in package.resolve().parent.iterdir()] == ["out"]


def test_a_claim_that_a_kill_left_is_taken_over(package: Path, releases: Releases) -> None:
    swap.claim(package.resolve()).touch()
    assert "up to date" in rewrite("sync", package, "--transformers", releases("6.0.0")).out
    assert [path.name for path in package.resolve().parent.iterdir()] == ["out"]


def test_the_claim_of_a_run_that_was_killed(package: Path) -> None:
    code = "import sys, time; from pathlib import Path; from rewrite.package import swap\n"
    code += "with swap.alone(Path('out')): print(flush=True); time.sleep(60)"
    run = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=-1)
    assert run.stdout is not None
    run.stdout.readline()
    path = package / "modeling_tiny.py"
    path.write_text(path.read_text() + "# mine\n")
    busy = rewrite("undo", package)
    assert (busy.code, f"another run (process {run.pid}) is writing out" in busy.err) == (1, True)
    run.kill()
    run.communicate()
    assert swap.claim(package.resolve()).is_file()
    assert rewrite("undo", package).code == 0
    assert not swap.claim(package.resolve()).exists()


def test_two_processes_at_once_end_in_the_new_state(package: Path, releases: Releases) -> None:
    tree = releases("6.1.0", DROPOUT)
    command = [sys.executable, "-m", "rewrite.cli", "sync", "out", "--transformers", str(tree), "--diff", "none"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "ab"]
    said = [run.communicate() for run in runs]
    assert 0 in [run.returncode for run in runs], said
    assert "attention_dropout = 0.1" in (package / "modeling_tiny.py").read_text()
    assert rewrite("check", package, "--transformers", tree).code == 0
    assert [path.name for path in package.resolve().parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "when", ["rewrite.delivery.precheck.check_text", "rewrite.sync.edits.with_edits", "rewrite.sync.edits.problems"]
)
def test_a_file_that_the_user_saves_meanwhile_is_not_replaced(
    package: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    path = package / "modeling_tiny.py"
    module, name = when.rsplit(".", 1)
    original = getattr(importlib.import_module(module), name)

    def saves(*arguments: object, **options: object) -> object:
        result = original(*arguments, **options)
        path.write_text("# saved meanwhile\n")
        return result

    monkeypatch.setattr(when, saves)
    done = rewrite("sync", package, "--transformers", releases("6.1.0", DROPOUT))
    assert (done.code, "changed while the package was being made anew" in done.err) == (1, True)
    assert path.read_text() == "# saved meanwhile\n"


def test_a_backup_is_whole_before_anything_is_replaced(package: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    output._copy_aside(package.resolve(), backup)
    assert contents(backup) == contents(package)


def test_another_run_that_was_faster_is_no_edit(
    package: Path, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = str(releases("6.1.0", DROPOUT))
    renewed, faster = rebuild.renewed, ["sync", str(package), "--transformers", tree]

    def overtaken(*given: object) -> rebuild.Renewal:
        made = renewed(*given)  # type: ignore[arg-type]
        if faster:
            arguments, faster[:] = list(faster), []
            assert rewrite(*arguments).code == 0
        return made

    monkeypatch.setattr(rebuild, "renewed", overtaken)
    stopped = rewrite("sync", package, "--transformers", tree)
    assert stopped.code == 1
    assert "rewrite.lock changed while the package was being made anew" in stopped.err
    assert rewrite("check", package, "--transformers", tree).code == 0
