"""Puts a package in place of an output folder such that the old folder survives until the new one is complete.

The new package is written to `.<name>.rewrite-new-*/<name>` beside the folder, under its final name so that it can be
imported and checked there, and then changes places with the old one in one step of the file system. Where that cannot
do it (`swap`), in two renames: a run that is killed between them leaves the old folder as
`.<name>.rewrite-old`, and the next run puts it back.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rewrite.errors import (
    ChangedMeanwhile,
    NotAPackage,
    OutputBusy,
    OutputNotOurs,
    OutputNotWritable,
    RewriteError,
    UsageError,
)
from rewrite.package import allowed, swap
from rewrite.package.assemble import VERDICT_NAME, Package
from rewrite.package.lock import Lock, read_lock, sha256
from rewrite.source.resolve import LOCK_NAME, Source
from rewrite.typed import typed


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
    seen: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the files that were read to make the new package: they must still be the same when it is put in."""


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
            OutputNotWritable: if the disk refuses; the old folder is in place then.
            ChangedMeanwhile: if somebody changed the old folder since it was read.
        """
        target = self.output.folder
        with _reported(self.output.shown):
            self._check_unchanged()
            if self.output.backup is not None:
                _copy_aside(target, self.output.backup)
            _exchange(self.folder, target)

    def _check_unchanged(self) -> None:
        for name, digest in self.output.seen.items():
            path = self.output.folder / name
            if not path.is_file() or sha256(path.read_bytes()) != digest:
                raise ChangedMeanwhile(self.output.shown, name)

    def reject(self) -> Path:
        """Keep the package beside the output folder, for a look at what failed; returns where."""
        place = self.output.folder.with_name(f"{self.output.folder.name}.rejected")
        with _reported(self.output.shown):
            if place.exists():
                shutil.rmtree(place)
            self.folder.rename(place)
        return self.output.shown.with_name(place.name)


def prepare(
    shown: Path, source: Path, force: bool = False, merged: Sequence[str] = (), kept: Sequence[str] = ()
) -> Output:
    """Check that the folder `shown` may be written, and put back what an interrupted run left.

    Edits in the files `merged` are in the new package, so they do not stand in its way; the files `kept` are carried
    over although they are ours.

    Raises:
        OutputNotOurs: if it holds something that this tool did not write, or can never be an output (a file, the
            working folder, the user's home, the source's own); without `force` also if files of ours were edited
            since, or if the lock cannot be read.
    """
    folder = _recovered(swap.resolved(shown))
    allowed.check_place(shown, folder, source)
    if not folder.is_dir() or not any(folder.iterdir()):
        return Output(shown, folder, backup=None)
    try:
        lock = read_lock(folder)
    except NotAPackage as error:
        allowed.check_without_lock(shown, folder)
        if not force:
            raise OutputNotOurs(shown, "is a package without a lock that can be read") from error
        return Output(shown, folder, backup=_free_backup(folder))
    edited = [name for name in edited_files(folder, lock) if name not in merged]
    if edited and not force:
        raise OutputNotOurs(shown, f"has your edits in {', '.join(edited)} (`{typed('diff', shown, '--generated')}`)")
    check_links(folder, lock)
    carried = (*_own_files(folder, lock), *(name for name in kept if (folder / name).is_file()))
    return Output(shown, folder, _free_backup(folder) if edited else None, carried, lock, snapshot(folder, lock))


def for_model(output: Output, source: Source, force: bool) -> Output:
    """Return `output` if the package that is there now was made from the original `source`, or from none.

    With `force` one of another model is replaced, and kept whole as a backup: nothing of it goes into the new package.

    Raises:
        OutputNotOurs: if it was made from another, and `force` is not given.
    """
    if output.previous is None:
        return output
    made_from = output.previous.source
    here = (source.module, source.path.name)
    if made_from.sha256 == source.sha256 or (made_from.module, Path(made_from.path).name) == here:
        return output
    if not force:
        there, asked = made_from.module or made_from.path, source.module or source.path.name
        why = f"holds a package made from {there}, and this would put one of {asked} in its place"
        raise OutputNotOurs(output.shown, why)
    return Output(output.shown, output.folder, output.backup or _free_backup(output.folder))


def snapshot(folder: Path, lock: Lock) -> dict[str, str]:
    """Return the sha256 of the generated files of a package and of its lock, as they are."""
    present = [name for name in (*lock.files, LOCK_NAME) if (folder / name).is_file()]
    return {name: sha256((folder / name).read_bytes()) for name in present}


def free_name(folder: Path, name: str, ending: str) -> str:
    """Return `name` with an ending that no file in the folder has yet: `.edited`, `.edited2`."""
    number = 1
    while (folder / (found := f"{name}{ending}{number if number > 1 else ''}")).exists():
        number += 1
    return found


def clean(shown: Path) -> None:
    """Put back or remove what a killed run left beside a folder, unless another run is at work there."""
    folder = swap.resolved(shown)
    left = [_old(folder), swap.claim(folder), *folder.parent.glob(f"{glob.escape(_new_prefix(folder))}*")]
    if any(path.exists() for path in left):
        with contextlib.suppress(OutputBusy, OutputNotWritable), swap.alone(shown):
            _recovered(folder)


def check_sites(output: Output, lock: Lock) -> None:
    """Check that no transform rewrites fewer places than in the package that is there now; one left out counts not.

    Raises:
        RewriteError: if one does.
    """
    before = {report.name: len(report.rewritten) for report in output.previous.transforms} if output.previous else {}
    now = {report.name: len(report.rewritten) for report in lock.transforms}
    if lost := {name: (before[name], now[name]) for name in now if now[name] < before.get(name, 0)}:
        counts = ", ".join(f"{name} {before} → {now}" for name, (before, now) in sorted(lost.items()))
        raise RewriteError(
            f"fewer places are rewritten than in {output.shown} now ({counts}): the folder was left as it is. "
            "--force replaces it all the same."
        )


def edited_files(folder: Path, lock: Lock) -> list[str]:
    """Return the generated files of a package that no longer say what was generated; their layout is no edit."""
    return [name for name in sorted(lock.files) if (folder / name).is_file() and not lock.as_generated(folder, name)]


@contextlib.contextmanager
def stage(output: Output, package: Package) -> Iterator[Staged]:
    """Write `package` to the temporary folder beside `output`; what is neither committed nor rejected is removed.

    Raises:
        OutputNotWritable: if the disk refuses; nothing is left behind.
    """
    target = output.folder
    temporary: Path | None = None
    try:
        with _reported(output.shown):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=_new_prefix(target), dir=target.parent))
            staged = temporary / target.name
            staged.mkdir()
            if target.is_dir():
                shutil.copymode(target, staged)
            for name, data in package.files.items():
                _write(staged / name, data)
                if (target / name).is_file():
                    shutil.copymode(target / name, staged / name)
            for name in output.carried:
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(output.folder / name, staged / name, follow_symlinks=False)
        yield Staged(output, package, staged)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_beside(path: Path, data: bytes) -> None:
    """Write a file such that it is never seen half written, and a link in its place is not followed.

    Raises:
        OutputNotWritable: if the disk refuses.
    """
    with _reported(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def check_links(folder: Path, lock: Lock) -> None:
    """Check that every generated file of a package is a file in its folder.

    Raises:
        UsageError: if one, or a folder on the way to it, is a link.
    """
    places = {name for file in lock.files for name in (file, *(str(p) for p in Path(file).parents if p.name))}
    for name in sorted({*places, LOCK_NAME, VERDICT_NAME}):
        if (folder / name).is_symlink():
            raise UsageError(
                f"{folder}/{name} is a link, and a package is replaced as a whole: put the file itself there."
            )


def _exchange(staged: Path, target: Path) -> None:
    """Put a folder in the place of another, or of none."""
    if not target.exists():
        staged.rename(target)
    elif not swap.exchange(staged, target):
        aside = _old(target)
        target.rename(aside)
        try:
            staged.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        shutil.rmtree(aside, ignore_errors=True)


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


def _new_prefix(folder: Path) -> str:
    return f".{folder.name}.rewrite-new-"


def _copy_aside(folder: Path, backup: Path) -> None:
    """Copy the present content to its backup, which appears as a whole or not at all."""
    part = folder.with_name(f"{_new_prefix(folder)}backup")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(folder, part, symlinks=True)
        part.rename(backup)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _recovered(folder: Path) -> Path:
    """Return `folder` after undoing what a killed run left beside it."""
    old = _old(folder)
    with _reported(folder):
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        elif old.is_dir():
            shutil.rmtree(old)
        if folder.parent.is_dir():
            for left in folder.parent.glob(f"{glob.escape(_new_prefix(folder))}*"):
                shutil.rmtree(left, ignore_errors=True)
    return folder


def _free_backup(folder: Path) -> Path:
    number = 1
    while (place := folder.with_name(f"{folder.name}.backup{number}")).exists():
        number += 1
    return place


def _own_files(folder: Path, lock: Lock) -> tuple[str, ...]:
    """Return the files in a package that the tool did not generate, `__pycache__` apart."""
    ours = {*lock.files, LOCK_NAME, VERDICT_NAME, *(f"{name}.conflict" for name in lock.files)}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(folder) for path in found if "__pycache__" not in path.parts)
    return tuple(sorted(name.as_posix() for name in names if name.as_posix() not in ours))
