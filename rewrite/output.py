"""Puts a package in place of an output folder such that the old folder survives until the new one is complete.

The new package is written to `.<name>.rewrite-new/<name>` beside the folder, under its final name so that it can be
imported and checked there, and then changes places with the old one in two renames. A run that is killed between the
two leaves the old folder as `.<name>.rewrite-old`; the next run puts it back.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewrite.errors import NotAPackage, OutputNotOurs, OutputNotWritable, SitesLost
from rewrite.lock import Lock, read_lock, sha256
from rewrite.package import VERDICT_NAME, Package
from rewrite.source import LOCK_NAME


@dataclass(frozen=True)
class Output:
    """An output folder that may be written."""

    shown: Path
    """As the user named it."""
    folder: Path
    """With links resolved: what is replaced."""
    backup: Path | None
    """Where the present content goes to, because it is not only ours; None where nothing needs keeping."""
    carried: tuple[str, ...] = ()
    """The user's own files beside ours, which are copied into the new package."""
    previous: Lock | None = None
    """The lock of the package that is there now."""


class Staged:
    """A package in its temporary folder, not yet in place."""

    def __init__(self, output: Output, package: Package, folder: Path):
        self.output = output
        self.package = package
        self.folder = folder

    def add(self, name: str, text: str) -> None:
        """Write one more file into the package.

        Raises:
            OutputNotWritable: if the disk refuses.
        """
        with _reported(self.output.shown):
            (self.folder / name).write_text(text, encoding="utf-8", newline="")

    def commit(self) -> None:
        """Put the package in place of the output folder.

        Raises:
            OutputNotWritable: if the disk refuses; the old folder is back in place then.
        """
        target = self.output.folder
        aside = self.output.backup or _old(target)
        with _reported(self.output.shown):
            if target.exists():
                target.rename(aside)
            try:
                self.folder.rename(target)
            except BaseException:
                if aside.exists():
                    aside.rename(target)
                raise
            if self.output.backup is None:
                shutil.rmtree(aside, ignore_errors=True)

    def reject(self) -> Path:
        """Keep the package beside the output folder, for a look at what failed; returns where."""
        place = self.output.folder.with_name(f"{self.output.folder.name}.rejected")
        with _reported(self.output.shown):
            if place.exists():
                shutil.rmtree(place)
            self.folder.rename(place)
        return self.output.shown.with_name(place.name)


def prepare(shown: Path, source: Path, force: bool = False, merged: Sequence[str] = ()) -> Output:
    """Check that the folder `shown` may be written, and put back what an interrupted run left.

    Edits in the files `merged` are in the new package, so they do not stand in its way.

    Raises:
        OutputNotOurs: if it holds something that this tool did not write, or files of ours that were edited since,
            and `force` is not given; or if it can never be an output (a file, the working folder, the source's own).
    """
    folder = _recovered(shown.expanduser().resolve())
    if folder.exists() and not folder.is_dir():
        raise OutputNotOurs(shown, "is a file", forcible=False)
    if Path.cwd().resolve().is_relative_to(folder):
        raise OutputNotOurs(shown, "is, or contains, the folder you are in", forcible=False)
    if source.resolve().is_relative_to(folder):
        raise OutputNotOurs(shown, f"contains the source {source.name}", forcible=False)
    if not folder.is_dir() or not any(folder.iterdir()):
        return Output(shown, folder, backup=None)
    try:
        lock = read_lock(folder)
    except NotAPackage as error:
        if not force:
            raise OutputNotOurs(shown, "is not empty and not an output of this tool") from error
        return Output(shown, folder, backup=_free_backup(folder))
    edited = [name for name in edited_files(folder, lock) if name not in merged]
    if edited and not force:
        raise OutputNotOurs(shown, f"has your edits in {', '.join(edited)} (`rewrite diff {shown} --generated`)")
    return Output(shown, folder, _free_backup(folder) if edited else None, _own_files(folder, lock), lock)


def check_sites(output: Output, lock: Lock) -> None:
    """Check that no transform rewrites fewer places than in the package that is there now; one left out counts not.

    Raises:
        SitesLost: if one does.
    """
    before = {report.name: len(report.rewritten) for report in output.previous.transforms} if output.previous else {}
    now = {report.name: len(report.rewritten) for report in lock.transforms}
    if lost := {name: (before[name], now[name]) for name in now if now[name] < before.get(name, 0)}:
        raise SitesLost(output.shown, lost)


def edited_files(folder: Path, lock: Lock) -> list[str]:
    """Return the generated files of a package that are no longer as they were generated."""
    return [
        name
        for name, expected in sorted(lock.files.items())
        if (folder / name).is_file() and sha256((folder / name).read_bytes()) != expected
    ]


@contextlib.contextmanager
def stage(output: Output, package: Package) -> Iterator[Staged]:
    """Write `package` to the temporary folder beside `output`; what is neither committed nor rejected is removed.

    Raises:
        OutputNotWritable: if the disk refuses; nothing is left behind.
    """
    temporary = output.folder.with_name(f".{output.folder.name}.rewrite-new")
    staged = temporary / output.folder.name
    try:
        with _reported(output.shown):
            shutil.rmtree(temporary, ignore_errors=True)
            staged.mkdir(parents=True)
            for name, data in package.files.items():
                _write(staged / name, data)
            for name in output.carried:
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(output.folder / name, staged / name, follow_symlinks=False)
        yield Staged(output, package, staged)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@contextlib.contextmanager
def _reported(shown: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputNotWritable(shown, error.strerror or str(error)) from error


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.rewrite-old")


def _recovered(folder: Path) -> Path:
    """Return `folder` after undoing what a killed run left beside it."""
    old = _old(folder)
    with _reported(folder):
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        elif old.is_dir():
            shutil.rmtree(old)
    return folder


def _free_backup(folder: Path) -> Path:
    number = 1
    while (place := folder.with_name(f"{folder.name}.backup{number}")).exists():
        number += 1
    return place


def _own_files(folder: Path, lock: Lock) -> tuple[str, ...]:
    """Return the files in a package that the tool did not generate, `__pycache__` apart."""
    ours = {*lock.files, LOCK_NAME, VERDICT_NAME, f"{lock.modeling}.conflict"}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder) for path in found if "__pycache__" not in path.parts)
    return tuple(sorted(name.as_posix() for name in names if name.as_posix() not in ours))
