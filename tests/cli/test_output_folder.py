"""The folder that is written: what is refused, what is kept, and what an interruption leaves."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import rewrite

from rewrite.errors import OutputNotOurs
from rewrite.package import swap

ARGUMENTS = ("modeling_tiny.py", "--no-verify", "--only", "fuse_qkv", "--diff", "none")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_parents_are_created(here: Path) -> None:
    assert rewrite(*ARGUMENTS, "--out", "a/b/out").code == 0
    assert (here / "a" / "b" / "out" / "rewrite.lock").is_file()
    assert hidden(here / "a" / "b") == []


def test_a_folder_of_ours_is_made_anew_and_own_files_stay(package: Path) -> None:
    (package / "notes").mkdir()
    (package / "notes" / "mine.txt").write_text("mine")
    (package / "verify.json").write_text("{}")
    assert rewrite(*ARGUMENTS, "--out", package).code == 0
    assert (package / "notes" / "mine.txt").read_text() == "mine"
    assert not (package / "verify.json").exists()
    assert hidden(package.parent) == []


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_folder_that_is_no_package_is_refused(here: Path, force: tuple[str, ...]) -> None:
    (here / "out").mkdir()
    (here / "out" / "thesis.txt").write_text("mine")
    refused = rewrite(*ARGUMENTS, "--out", "out", *force)
    assert (refused.code, "not an output of this tool" in refused.err) == (2, True)
    assert [path.name for path in (here / "out").iterdir()] == ["thesis.txt"]


def test_a_package_without_its_lock_is_replaced_with_force_alone(package: Path) -> None:
    assert rewrite("eject", package).code == 0
    refused = rewrite(*ARGUMENTS, "--out", package)
    assert (refused.code, "without a lock that can be read" in refused.err) == (2, True)
    assert rewrite(*ARGUMENTS, "--out", package, "--force").code == 0
    assert (package.with_name("out.backup1") / "modeling_tiny.py").is_file()
    (package / "rewrite.lock").unlink()
    (package / ".git").mkdir()
    refused = rewrite(*ARGUMENTS, "--out", package, "--force")
    assert (refused.code, "no part of a package, .git" in refused.err) == (2, True)


def test_a_package_of_another_model_is_replaced_with_force_alone(here: Path, package: Path) -> None:
    other = here / "modeling_other.py"
    other.write_text((here / "modeling_tiny.py").read_text() + "\nOTHER = 1\n")
    (package / "mine.txt").write_text("mine")
    before = (package / "rewrite.lock").read_bytes()
    refused = rewrite("modeling_other.py", *ARGUMENTS[1:], "--out", package)
    assert (refused.code, "made from modeling_tiny.py" in refused.err, "--force" in refused.err) == (2, True, True)
    assert (package / "rewrite.lock").read_bytes() == before
    assert rewrite("modeling_other.py", *ARGUMENTS[1:], "--out", package, "--force").code == 0
    assert not (package / "mine.txt").exists()
    assert (package.with_name("out.backup1") / "mine.txt").read_text() == "mine"


def test_an_interrupted_backup_leaves_nothing_behind(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "modeling_tiny.py").write_text("# mine\n")

    def interrupted(folder: Path, part: Path, symlinks: bool) -> None:
        part.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copytree", interrupted)
    assert rewrite(*ARGUMENTS, "--out", package, "--force").code == 130
    assert hidden(package.parent) == []


def test_the_home_and_the_root_can_never_be_an_output(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "users" / "me").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(here / "users" / "me"))
    for out in ("users/me", "users"):
        refused = rewrite(*ARGUMENTS, "--out", out, "--force")
        assert (refused.code, "home folder" in refused.err) == (2, True)
    with pytest.raises(OutputNotOurs, match="the root of the file system"):
        swap.resolved(Path("/"))


def test_a_count_that_falls_is_a_failure(here: Path, package: Path) -> None:
    path = here / "modeling_tiny.py"
    path.write_text(path.read_text().replace("= self.k_proj(hidden_states)", "= self.k_proj(hidden_states * 1)"))
    before = (package / "rewrite.lock").read_bytes()
    arguments = ("modeling_tiny.py", "--no-verify", "--only", "fuse_qkv", "--only", "fuse_gate_up", "--out", package)
    (package / "rewrite.lock").write_bytes(before.replace(b'q_proj, k_proj, v_proj"', b'a", "b"'))
    lost = rewrite(*arguments)
    assert lost.code == 1
    assert "fuse_qkv 2 → 1" in lost.err
    assert rewrite(*arguments, "--force").code == 0


@pytest.mark.parametrize("name", ["modeling_tiny.py", "__init__.py"])
def test_edits_are_refused_and_with_force_kept_as_a_backup(package: Path, name: str) -> None:
    (package / name).write_text("# mine\n")
    refused = rewrite(*ARGUMENTS, "--out", package)
    assert refused.code == 2
    assert f"has your edits in {name}" in refused.err
    assert (package / name).read_text() == "# mine\n"
    assert rewrite(*ARGUMENTS, "--out", package, "--force").code == 0
    assert (package.with_name("out.backup1") / name).read_text() == "# mine\n"
    assert (package / name).read_text() != "# mine\n"


def test_a_linked_folder_stays_a_link(here: Path) -> None:
    (here / "real").mkdir()
    (here / "link").symlink_to(here / "real")
    for _ in range(2):
        assert rewrite(*ARGUMENTS, "--out", "link").code == 0
    assert (here / "link").is_symlink()
    assert (here / "real" / "rewrite.lock").is_file()


@pytest.mark.parametrize("name", ["with space", "ünï-código", "9lives", "class"])
def test_a_name_that_cannot_be_imported_gets_one_hint(here: Path, name: str) -> None:
    done = rewrite(*ARGUMENTS, "--out", name)
    assert done.code == 0
    assert done.err.count("cannot stand in an import statement") == 1
    assert (here / name / "__init__.py").is_file()


@pytest.mark.parametrize("name", ["torch", "queue"])
def test_a_name_that_hides_a_library_gets_one_hint(here: Path, name: str) -> None:
    done = rewrite(*ARGUMENTS, "--out", name)
    assert done.code == 0
    assert done.err.count(f"hides the library of that name from programs beside it; --out optimized_{name}") == 1


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_places_that_can_never_be_an_output(here: Path, force: tuple[str, ...]) -> None:
    (here / "file").write_text("x")
    (here / "inner").mkdir()
    (here / "inner" / "modeling_in.py").write_bytes((here / "modeling_tiny.py").read_bytes())
    for out, message in (("file", "is a file"), (".", "the folder you are in"), ("..", "the folder you are in")):
        refused = rewrite(*ARGUMENTS, "--out", out, *force)
        assert (refused.code, message in refused.err) == (2, True)
    refused = rewrite("inner/modeling_in.py", "--no-verify", "--out", "inner", *force)
    assert (refused.code, "contains the source" in refused.err) == (2, True)
    assert (here / "inner" / "modeling_in.py").is_file()


def test_a_place_that_cannot_be_written(here: Path) -> None:
    (here / "file").write_text("x")
    for out in ("file/out", "/proc/out"):
        failed = rewrite(*ARGUMENTS, "--out", out)
        assert failed.code in (1, 2)
        assert failed.said[0].startswith("error: ")
        assert len(failed.said) <= 2


def test_a_full_disk_leaves_the_old_folder(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (package / "rewrite.lock").read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    failed = rewrite(*ARGUMENTS, "--out", package)
    assert failed.code == 1
    assert "No space left on device. What was there before is unchanged." in failed.err
    assert (package / "rewrite.lock").read_bytes() == before
    assert hidden(package.parent) == []


@pytest.mark.parametrize("place", ["rewrite.codemod.build.tried", "rewrite.delivery.precheck.check_text"])
def test_an_interruption_leaves_the_old_folder(package: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    before = (package / "rewrite.lock").read_bytes()

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    stopped = rewrite(*ARGUMENTS, "--out", package)
    assert stopped.code == 130
    said = stopped.err.strip().splitlines()  # progress before it, if it is slow
    assert said[-1] == "interrupted: no package is half written"
    assert (package / "rewrite.lock").read_bytes() == before
    assert hidden(package.parent) == []


def test_an_interruption_between_the_renames_puts_the_old_folder_back(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "mine.txt").write_text("mine")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.parent.name.startswith(".out.rewrite-new-"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr("rewrite.package.swap.exchange", lambda one, other: False)  # a file system that cannot
    monkeypatch.setattr(Path, "rename", interrupted)
    assert rewrite(*ARGUMENTS, "--out", package).code == 130
    assert (package / "mine.txt").read_text() == "mine"
    assert hidden(package.parent) == []


def test_what_a_killed_run_left_is_put_back(package: Path) -> None:
    (package / "mine.txt").write_text("mine")
    package.rename(package.with_name(".out.rewrite-old"))
    (package.with_name(".out.rewrite-new-1a2b") / "out").mkdir(parents=True)
    package.with_name(".out.rewrite-busy").touch()
    assert rewrite(*ARGUMENTS, "--out", package).code == 0
    assert (package / "mine.txt").read_text() == "mine"
    assert hidden(package.parent) == []


def test_what_was_asked_for_beside_the_usual_stays_through_a_sync(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rewrite.transforms.fuse_gate_up import FuseGateUp

    monkeypatch.setattr(FuseGateUp, "on_request", True)
    arguments = ("modeling_tiny.py", "--no-verify", "--diff", "none", "--skip", "fuse_rope", "--out")

    def ran(folder: str) -> dict[str, Any]:
        rules: dict[str, Any] = json.loads((here / folder / "rewrite.lock").read_text())["rules"]
        return rules

    assert rewrite(*arguments, "usual").code == 0
    assert "fuse_gate_up" not in ran("usual")
    assert rewrite(*arguments, "more", "--with", "fuse_gate_up").code == 0
    assert set(ran("more")) == set(ran("usual")) | {"fuse_gate_up"}
    path = here / "modeling_tiny.py"
    path.write_text(path.read_text() + "\nADDED = 1\n")
    assert rewrite("check", "more").code == 1
    assert rewrite("sync", "more", "--no-verify").code == 0
    assert "fuse_gate_up" in ran("more")
    assert rewrite("check", "more").code == 0
