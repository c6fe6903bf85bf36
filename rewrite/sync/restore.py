"""Back to the text as it was generated (`rewrite undo`), and away from this tool (`rewrite eject`)."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rewrite.deliver import precheck
from rewrite.engine.relocate import HEADER_LOCK
from rewrite.errors import NotRestorable, RewriteError
from rewrite.package import kept, original, output, runtime_files, shared, swap
from rewrite.package.assemble import INIT, INIT_LOCK, KEPT, RUNTIME_INIT, VERDICT_NAME, WHOLE, Package
from rewrite.package.lock import Lock, read_lock, sha256
from rewrite.package.runtime_files import FOLDER
from rewrite.sync import rebuild
from rewrite.sync.unguarded import unguarded
from rewrite.upstream.source import LOCK_NAME

UNDONE = ".undone"


def undo(folder: Path) -> list[str]:
    """Put every generated file of a package back to its generated text, and return the names of those that differed.

    Each edited file is kept beside its generated text, its name followed by `.undone`; a kept text is not. Files of a
    runtime that the package shares are put back too.

    Raises:
        NotRestorable: if the generated text of an edited file is nowhere to be had.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    edited = [name for name in lock.files if not lock.as_generated(folder, name)]
    of_shared = _undo_shared(folder, lock)
    if not edited:
        return of_shared
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
    return [*edited, *of_shared]


def _undo_shared(folder: Path, lock: Lock) -> list[str]:
    """Put the edited files of a runtime that a package shares back, and return their names.

    Raises:
        NotRestorable: if this version of the tool makes others.
    """
    place = shared.of(folder, lock)
    there = shared.read(place) if place is not None else None
    if place is None or there is None or not (edited := shared.edited(place, there)):
        return []
    user = shared.user_of(folder, place, there)
    uses = user.uses if user is not None else ()
    options = lock.options
    made = shared.for_package(folder, options.runtime or "", uses, options.target, options.without)
    if dict(made.lock.files) != dict(there.files):
        raise NotRestorable(folder, [f"{FOLDER}{name}" for name in edited])
    for name in (name for name in edited if (place / name).is_file()):
        output.write_beside(place / output.free_name(place, name, UNDONE), (place / name).read_bytes())
    output.put_shared(made)
    return [(Path(lock.options.runtime or "") / name).as_posix() for name in edited]


def eject(folder: Path) -> list[str]:
    """Take from a package what only this tool reads, and the guard, and return the names of what is gone.

    What the texts say about this tool's files goes too; the other files stay as they are, and edits stay. What it
    shares with other packages it gets for itself.

    Raises:
        SourceDoesNotParse: if the `__init__.py`, which imports the guard, is not valid Python.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    names = [name for name in lock.files if not name.startswith(f"{KEPT}/") and (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    changes = {
        INIT: (INIT_LOCK, "This folder is yours."),
        lock.modeling: (HEADER_LOCK, "# This file is yours: review it, edit it, ship it."),
    }
    for name, (old, new) in changes.items():
        if name in files:
            files[name] = files[name].replace(old.encode("utf-8"), new.encode("utf-8"))
    if shared.of(folder, lock) is not None:
        files |= _rooms(folder, lock, files)
    left = unguarded(files, folder)
    _replace(folder, lock, left, keeps_sharing=False)
    return [LOCK_NAME, f"{KEPT}/", *sorted(files.keys() - left.keys())]


def _rooms(folder: Path, lock: Lock, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of the shared runtime that the files of a package import, and a `runtime/__init__.py`.

    Raises:
        SharedRuntimeNotUsable: if they are not there.
    """
    there = shared.rooms(folder, lock)
    found: dict[str, bytes] = {}
    waiting = [data for name, data in files.items() if name.endswith(".py") and name.count("/") < 2]
    waiting.append(runtime_files.init([Path(name).stem for name in there]).encode("utf-8"))
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop())):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                wanted = {f"{FOLDER}{name}.py" for name in names} & there.keys() - found.keys()
                found |= {name: there[name] for name in wanted}
                waiting += [there[name] for name in sorted(wanted)]
    return {**found, RUNTIME_INIT: runtime_files.init([Path(name).stem for name in found]).encode("utf-8")}


def _replace(folder: Path, lock: Lock, files: Mapping[str, bytes], keeps_sharing: bool = True) -> None:
    rooms = shared.rooms(folder, lock) if keeps_sharing else {}
    with swap.alone(folder):
        place = output.prepare(folder, folder.parent / "-", merged=tuple(lock.files), kept=(VERDICT_NAME,))
        place = place if not keeps_sharing else replace(place, previous=None)
        with output.stage(place, Package(files, lock, rooms=rooms)) as staged:
            precheck.check_text(staged.folder, [name for name in (*files, *rooms) if name.endswith(".py")])
            staged.commit()


def _generated(folder: Path, lock: Lock, name: str) -> bytes | None:
    """Return the generated text of a file: the kept one, or this version's own where it is the same."""
    if name == kept.ARCHIVE:
        return _archive(folder, lock)
    whole, inner = f"{WHOLE}/{name}", name.removeprefix(f"{KEPT}/")
    if (text := kept.text(folder, name)) is not None and sha256(text) == lock.files[name]:
        return text
    if lock.as_generated(folder, whole) and lock.files[whole] == lock.files[name]:
        return (folder / whole).read_bytes()
    if inner != name and inner in lock.files and lock.as_generated(folder, inner):
        return (folder / inner).read_bytes()
    own = rebuild.own_runtime(folder, lock).get(name, b"")
    return own if sha256(own) == lock.files[name] else None


def _archive(folder: Path, lock: Lock) -> bytes | None:
    """Return the archive of kept texts, made again where all of it is still to be had."""
    data = kept.text(folder, f"{lock.modeling}{kept.ORIGINAL}")
    if data is None or sha256(data) != lock.source.sha256:
        with contextlib.suppress(RewriteError):
            data = original.find(folder, lock).path.read_bytes()
    return kept.made_again(folder, lock, data)


def _is_users(folder: Path, name: str) -> bool:
    return not name.startswith(f"{KEPT}/") and (folder / name).is_file()
