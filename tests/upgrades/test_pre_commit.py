"""The hooks, with the real pre-commit in real git repositories; nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "fixtures" / "models" / "modeling_tiny_llama.py"
HOOKS = ROOT / ".pre-commit-hooks.yaml"
yaml = pytest.importorskip("yaml")
pytest.importorskip("pre_commit")


class Repository:
    """A git repository with a package and the hooks, as `repo: local` of the language `system`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PRE_COMMIT"))},
            "PATH": f"{self._programs()}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / ".links"))),
            "PRE_COMMIT_HOME": str(folder.parent / "cache"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "OMP_NUM_THREADS": "1",
        }
        folder.mkdir()
        self.git("init", "-q")
        self.git("config", "user.email", "someone@example.com")
        self.git("config", "user.name", "someone")
        (folder / "modeling_tiny.py").write_bytes(FIXTURE.read_bytes())
        (folder / "requirements.txt").write_text("transformers>=5\n")
        self.rewrite("modeling_tiny.py", "--out", "out", "--no-verify", "--diff", "none", "--only", "fuse_qkv")
        hooks = [{**hook, "language": "system"} for hook in yaml.safe_load(HOOKS.read_text())]
        config = {"repos": [{"repo": "local", "hooks": hooks}]}
        (folder / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
        self.git("add", "-A")
        self.git("commit", "-qm", "start")

    def _programs(self) -> Path:
        """A folder with the command `rewrite` of this working tree."""
        programs = self.folder.parent / "programs"
        programs.mkdir()
        program = programs / "rewrite"
        program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m rewrite.cli \"$@\"\n")
        program.chmod(0o755)
        return programs

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)

    def git(self, *arguments: str) -> str:
        done = self.run("git", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rewrite(self, *arguments: str) -> None:
        done = self.run("rewrite", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    def hooks(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "pre_commit", "run", *arguments)

    def upstream_fix(self) -> None:
        path = self.folder / "modeling_tiny.py"
        path.write_text(path.read_text().replace("attention_dropout = 0.0", "attention_dropout = 0.1"))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repo")


def states(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return how each hook ended: Passed, Failed, Skipped."""
    return dict(re.findall(r"^(rewrite \w+)\.+.*?(Passed|Failed|Skipped)$", done.stdout, re.MULTILINE))


def test_the_hooks_follow_the_conventions() -> None:
    hooks: list[dict[str, Any]] = yaml.safe_load(HOOKS.read_text())
    assert [hook["id"] for hook in hooks] == ["rewrite-sync", "rewrite-check"]
    for hook in hooks:
        assert (hook["language"], hook["pass_filenames"], hook["require_serial"]) == ("python", False, True)
    pattern = re.compile(hooks[0]["files"])
    for name in (
        "pyproject.toml",
        "a/requirements-dev.txt",
        "uv.lock",
        "o/rewrite.lock",
        "o/.rewrite/texts.zip",
        "o/_runtime/core/backend.py",
    ):
        assert pattern.search(name), name
    for name in ("README.md", "a/model.py", "requirements.md", "my_modeling.txt"):
        assert not pattern.search(name), name


def test_nothing_moved_passes_and_writes_nothing(repository: Repository) -> None:
    done = repository.hooks("--all-files")
    assert states(done) == {"rewrite sync": "Passed", "rewrite check": "Passed"}, done.stdout + done.stderr
    assert repository.git("status", "--porcelain") == ""


def test_a_moved_original_is_synced_fails_once_and_is_left_to_be_added(repository: Repository) -> None:
    repository.upstream_fix()
    repository.git("add", "modeling_tiny.py")
    failed = repository.hooks()
    assert states(failed) == {"rewrite sync": "Failed", "rewrite check": "Passed"}, failed.stdout + failed.stderr
    changed = repository.git("status", "--porcelain").splitlines()
    assert "M  modeling_tiny.py" in changed  # what was in the index is there as it was
    assert " M out/modeling_tiny.py" in changed  # what the hook wrote is not
    repository.git("add", "-A")
    tree = repository.git("write-tree")
    again = repository.hooks()
    assert states(again) == {"rewrite sync": "Passed", "rewrite check": "Passed"}
    assert repository.git("write-tree") == tree
    assert repository.git("diff") == ""


def test_a_changed_pin_starts_the_hooks(repository: Repository) -> None:
    (repository.folder / "notes.md").write_text("x")
    repository.git("add", "notes.md")
    assert states(repository.hooks()) == {"rewrite sync": "Skipped", "rewrite check": "Skipped"}
    (repository.folder / "requirements.txt").write_text("transformers==5.0.0\n")
    repository.git("add", "requirements.txt")
    assert states(repository.hooks()) == {"rewrite sync": "Passed", "rewrite check": "Passed"}


def test_a_conflict_fails_and_keeps_the_file(repository: Repository) -> None:
    path = repository.folder / "out" / "modeling_tiny.py"
    path.write_text(path.read_text().replace("attention_dropout = 0.0", "attention_dropout = 0.5"))
    mine = path.read_text()
    repository.upstream_fix()
    repository.git("add", "-A")
    failed = repository.hooks()
    assert states(failed) == {"rewrite sync": "Failed", "rewrite check": "Failed"}
    assert path.read_text() == mine
    assert "--resolved" in failed.stdout


def test_check_fails_on_an_edited_runtime(repository: Repository) -> None:
    from rewrite.cli import run

    assert run(["vendor", str(repository.folder / "out")]) == 0
    with (repository.folder / "out" / "_runtime" / "linear" / "packing.py").open("a") as file:
        file.write("# mine\n")
    repository.git("add", "-A")
    failed = repository.hooks("rewrite-check")
    assert states(failed) == {"rewrite check": "Failed"}
    assert "_runtime/linear/packing.py was edited" in failed.stdout


@pytest.mark.slow
def test_the_shipped_file_installs_and_runs(repository: Repository, tmp_path: Path) -> None:
    """From a clone of this working tree, in an environment that pre-commit makes; libraries are those of this one."""
    source = tmp_path / "source"
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if names.returncode:
        pytest.skip("this is no git repository")
    for name in filter(None, names.stdout.decode().split("\0")):
        place, path = source / name, ROOT / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            place.symlink_to(path.readlink())
        elif path.is_file():
            place.write_bytes(path.read_bytes())
    for arguments in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"),
    ):
        done = repository.run("git", "-C", str(source), *arguments)
        assert done.returncode == 0, done.stderr
    pytest.importorskip("setuptools", "77")
    libraries = {"PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "1"}
    repository.environment |= libraries
    done = repository.run(sys.executable, "-m", "pre_commit", "try-repo", str(source), "--all-files", "-v")
    assert states(done) == {"rewrite sync": "Passed", "rewrite check": "Passed"}, done.stdout + done.stderr
