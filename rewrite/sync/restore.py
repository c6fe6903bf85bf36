"""Back to the text as it was generated (`rewrite undo`), and away from this tool (`rewrite eject`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rewrite.deliver import precheck
from rewrite.engine.relocate import HEADER_LOCK
from rewrite.errors import NotRestorable
from rewrite.package import output, swap
from rewrite.package.assemble import INIT, INIT_LOCK, KEPT, VERDICT_NAME, Package
from rewrite.package.lock import Lock, read_lock, sha256
from rewrite.sync import rebuild
from rewrite.sync.unguarded import unguarded
from rewrite.upstream.source import LOCK_NAME

UNDONE = ".undone"


def undo(folder: Path) -> list[str]:
    """Put every generated file of a package back to its generated text, and return the names of those that differed.

    Each edited file is kept beside its generated text, its name followed by `.undone`; a kept text is not.

    Raises:
        NotRestorable: if the generated text of an edited file is nowhere to be had.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    edited = [name for name in lock.files if not lock.as_generated(folder, name)]
    if not edited:
        return []
    texts = {name: _generated(folder, lock, name) for name in edited}
    if lost := [name for name, text in texts.items() if text is None]:
        raise NotRestorable(folder, lost)
    files = {name: (folder / name).read_bytes() for name in lock.files if name not in edited}
    files |= {name: text for name, text in texts.items() if text is not None}
    files |= {
        output.free_name(folder, name, UNDONE): (folder / name).read_bytes()
        for name in edited
        if _is_users(folder, name)
    }
    files[LOCK_NAME] = (folder / LOCK_NAME).read_bytes()
    _replace(folder, lock, files)
    return edited


def eject(folder: Path) -> list[str]:
    """Take from a package what only this tool reads, and the guard, and return the names of what is gone.

    What the texts say about this tool's files goes too; the other files stay as they are, and edits stay.

    Raises:
        SourceDoesNotParse: if the `__init__.py`, which imports the guard, is not valid Python.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    kept = [name for name in lock.files if not name.startswith(f"{KEPT}/") and (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in kept}
    changes = {
        INIT: (INIT_LOCK, "This folder is yours."),
        lock.modeling: (HEADER_LOCK, "# This file is yours: review it, edit it, ship it."),
    }
    for name, (old, new) in changes.items():
        if name in files:
            files[name] = files[name].replace(old.encode("utf-8"), new.encode("utf-8"))
    left = unguarded(files, folder)
    _replace(folder, lock, left)
    return [LOCK_NAME, f"{KEPT}/", *sorted(files.keys() - left.keys())]


def _replace(folder: Path, lock: Lock, files: Mapping[str, bytes]) -> None:
    with swap.alone(folder):
        place = output.prepare(folder, folder.parent / "-", merged=tuple(lock.files), kept=(VERDICT_NAME,))
        with output.stage(place, Package(files, lock)) as staged:
            precheck.check_text(staged.folder, [name for name in files if name.endswith(".py")])
            staged.commit()


def _generated(folder: Path, lock: Lock, name: str) -> bytes | None:
    """Return the generated text of a file: the kept one, or this version's own where it is the same."""
    kept, inner = f"{KEPT}/{name}", name.removeprefix(f"{KEPT}/")
    if kept in lock.files and lock.as_generated(folder, kept):
        return (folder / kept).read_bytes()
    if inner != name and inner in lock.files and lock.as_generated(folder, inner):
        return (folder / inner).read_bytes()
    own = rebuild.own_runtime(folder, lock).get(name, b"")
    return own if sha256(own) == lock.files[name] else None


def _is_users(folder: Path, name: str) -> bool:
    return not name.startswith(f"{KEPT}/") and (folder / name).is_file()
