"""Commits of a package in which a reviewer sees what changed: first the original, then what became of it.

Both are made beside the index and the work tree, and the branch moves to the second at once: a failure leaves the
repository as it was. What is staged stays staged. Hooks do not run; commits are signed where git is told to sign.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewrite.errors import NotCommittable

_FILE = "100644"
"""Mode of a file that is not executed."""


@dataclass(frozen=True)
class Repository:
    """The git repository that a folder lies in."""

    root: Path
    folder: Path

    @property
    def inside(self) -> str:
        """The folder by its path in the repository."""
        return self.folder.relative_to(self.root).as_posix()

    def git(self, *arguments: str, index: str | None = None, given: bytes | None = None) -> str:
        """Run git and return what it prints.

        Raises:
            NotCommittable: if it fails.
        """
        environment = os.environ if index is None else {**os.environ, "GIT_INDEX_FILE": index}
        command = ["git", "-C", str(self.root), *arguments]
        done = subprocess.run(command, input=given, capture_output=True, env=environment)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit {done.returncode}"]
            raise NotCommittable(self.folder, f"git {arguments[0]}: {said[-1]}")
        return done.stdout.decode("utf-8", "replace").strip()


def repository_of(shown: Path) -> Repository:
    """Return the repository of a folder that is to be committed, and need not be there yet.

    Raises:
        NotCommittable: if it lies in none, is ignored there, or has changes that are not committed.
    """
    folder = shown.resolve()
    above = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        found = subprocess.run(
            ["git", "-C", str(above), "rev-parse", "--show-toplevel"], capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise NotCommittable(shown, "git is not installed") from error
    if found.returncode:
        raise NotCommittable(shown, "it lies in no git repository")
    repository = Repository(Path(found.stdout.strip()).resolve(), folder)
    if folder == repository.root:
        raise NotCommittable(shown, "it is a repository itself")
    ignored = subprocess.run(
        ["git", "-C", str(repository.root), "check-ignore", "-q", f"{repository.inside}/rewrite.lock"],
        capture_output=True,
    )
    if ignored.returncode == 0:
        raise NotCommittable(shown, "git is told to ignore it")
    if folder.is_dir() and repository.git("status", "--porcelain", "--", repository.inside):
        raise NotCommittable(shown, "it has changes that are not committed: commit or stash them first")
    return repository


def commit(repository: Repository, name: str, first: str | None, messages: Sequence[str]) -> list[str]:
    """Commit a folder as it is, after a commit in which its file `name` has the text `first`; return their ids.

    Args:
        repository: the folder's.
        name: of the modeling file.
        first: what it has in the first commit; None for one commit alone.
        messages: of the first and of the second.

    Raises:
        NotCommittable: if git refuses; the branch is as it was.
    """
    head = subprocess.run(
        ["git", "-C", str(repository.root), "rev-parse", "-q", "--verify", "HEAD"], capture_output=True, text=True
    )
    parent = head.stdout.strip()
    before, made = parent, list[str]()
    with tempfile.TemporaryDirectory(prefix="rewrite-") as place:
        index = str(Path(place) / "index")
        repository.git(*(("read-tree", parent) if parent else ("read-tree", "--empty")), index=index)
        if first is not None:
            blob = repository.git("hash-object", "-w", "--stdin", given=first.encode("utf-8"))
            entry = f"{_FILE},{blob},{repository.inside}/{name}"
            repository.git("update-index", "--add", "--cacheinfo", entry, index=index)
            made.append(parent := _committed(repository, index, parent, messages[0]))
        repository.git("add", "--all", "--", repository.inside, index=index)
        made.append(_committed(repository, index, parent, messages[-1]))
    repository.git("update-ref", "-m", messages[-1], "HEAD", made[-1], *([before] if before else []))
    repository.git("reset", "-q", "--", repository.inside)
    return made


def _committed(repository: Repository, index: str, parent: str, message: str) -> str:
    tree = repository.git("write-tree", index=index)
    signs = subprocess.run(
        ["git", "-C", str(repository.root), "config", "--type=bool", "commit.gpgsign"], capture_output=True, text=True
    )
    options = ["-S"] if signs.stdout.strip() == "true" else []
    parents = ["-p", parent] if parent else []
    return repository.git("commit-tree", tree, *parents, *options, "-m", message)
