"""`--commit`: the original, then what became of it, so that a review shows the lines that changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import rewrite

ARGUMENTS = ("modeling_tiny.py", "--no-verify", "--only", "fuse_qkv", "--out", "out", "--commit")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def repository(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    git("init", "-q")
    git("add", "modeling_tiny.py")
    git("commit", "-qm", "original")
    return here


def test_a_review_sees_the_lines_that_changed(repository: Path) -> None:
    (repository / "staged.txt").write_text("mine")
    git("add", "staged.txt")
    done = rewrite(*ARGUMENTS)
    assert done.code == 0, done.err
    assert "committed  " in done.out
    subjects = git("log", "--format=%s").splitlines()
    assert subjects == ["Rewrite modeling_tiny by hf-rewrite", "Copy modeling_tiny of modeling_tiny.py", "original"]
    assert git("show", "HEAD~1:out/modeling_tiny.py") == (repository / "modeling_tiny.py").read_text()
    added, removed, _ = git("diff", "--numstat", "HEAD~1", "HEAD", "--", "out/modeling_tiny.py").split()
    assert int(added) < 30
    assert int(removed) < 20
    assert git("status", "--porcelain") == "A  staged.txt\n"  # as it was


def test_a_sync_commits_upstreams_change_and_then_ours(repository: Path) -> None:
    assert rewrite(*ARGUMENTS).code == 0
    path = repository / "modeling_tiny.py"
    path.write_text(path.read_text().replace("attention_dropout = 0.0", "attention_dropout = 0.1"))
    git("commit", "-qam", "upstream")
    assert rewrite("sync", "out", "--commit").code == 0
    assert len(git("log", "--format=%s").splitlines()) == 6
    upstream = git("diff", "HEAD~2", "HEAD~1", "--", "out/modeling_tiny.py")
    assert "+        self.attention_dropout = 0.1" in upstream
    ours = git("diff", "--numstat", "HEAD~1", "HEAD", "--", "out/modeling_tiny.py")
    assert ours.split()[:2] == ["1", "1"]  # the header, which has the original's digest
    assert git("status", "--porcelain") == ""


def test_in_a_repository_without_a_commit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@example.org")
    git("init", "-q")
    assert rewrite(*ARGUMENTS).code == 0
    assert len(git("log", "--format=%s").splitlines()) == 2


def test_what_cannot_be_committed_is_said_before_anything_is_made(here: Path) -> None:
    done = rewrite(*ARGUMENTS)
    assert (done.code, "it lies in no git repository" in done.err) == (2, True)
    git("init", "-q")
    (here / ".gitignore").write_text("out/\n")
    done = rewrite(*ARGUMENTS)
    assert (done.code, "git is told to ignore it" in done.err) == (2, True)
    (here / ".gitignore").unlink()
    (here / "out").mkdir()
    assert rewrite(*ARGUMENTS[:-1]).code == 0
    done = rewrite(*ARGUMENTS)
    assert (done.code, "changes that are not committed" in done.err) == (2, True)
    assert rewrite(*ARGUMENTS, "--dry-run").code == 2
