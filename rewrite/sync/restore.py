"""Back to the text as it was generated (`rewrite undo`), and away from this tool (`rewrite eject`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rewrite.codemod.relocate import HEADER_LOCK
from rewrite.delivery import precheck
from rewrite.errors import RewriteError, SourceDoesNotParse
from rewrite.package import original, output, snapshots, swap, syntax, vendored_files
from rewrite.package.assemble import INIT, INIT_LOCK, KEPT, VERDICT_NAME, WHOLE, Package
from rewrite.package.lock import Lock, read_lock, sha256
from rewrite.source.resolve import LOCK_NAME
from rewrite.sync import edits, rebuild
from rewrite.sync.eject_package import unguarded
from rewrite.typed import typed

UNDONE = ".undone"


def undo(folder: Path) -> list[str]:
    """Put every generated file of a package back to its generated text, and return the names of those that differed.

    Each edited file is kept beside its generated text, its name followed by `.undone`; a kept text is not.

    Raises:
        RewriteError: if the generated text of an edited file is nowhere to be had.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    edited = [name for name in lock.files if not lock.as_generated(folder, name)]
    if not edited:
        return []
    texts = {name: _generated(folder, lock, name) for name in edited}
    if lost := [name for name, text in texts.items() if text is None]:
        replaced = typed("sync", folder, *(word for name in lost for word in ("--replace", name)))
        raise RewriteError(
            f"the generated text of {', '.join(lost)} in {folder} is nowhere to be had: this version of hf-rewrite "
            f"has another. Take it from version control, or drop the edits: {replaced}. Nothing was "
            "changed."
        )
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

    What the texts say about this tool's files goes too; the other files stay as they are, and edits stay. Files of
    the runtime that it needs come along.

    Raises:
        EditsBroken: if an edit keeps the package from being imported.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    edits.check_importable(folder, lock)
    names = [name for name in lock.files if not name.startswith(f"{KEPT}/") and (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    changes = {
        INIT: (INIT_LOCK, "This folder is yours."),
        lock.modeling: (HEADER_LOCK, "# This file is yours: review it, edit it, ship it."),
    }
    for name, (old, new) in changes.items():
        if name in files:
            files[name] = files[name].replace(old.encode("utf-8"), new.encode("utf-8"))
    files |= vendored(folder, lock, files)
    left = unguarded(files, folder)
    _replace(folder, lock, left, keeps_lock=False)
    return [LOCK_NAME, f"{KEPT}/", *sorted(files.keys() - left.keys())]


def vendor_runtime(folder: Path) -> list[str]:
    """Give a package a runtime of its own, and return the names of its files; edits of the package stay.

    Raises:
        EditsBroken: if an edit keeps the package from being imported.
    """
    lock = read_lock(folder)
    output.check_links(folder, lock)
    edits.check_importable(folder, lock)
    names = [name for name in lock.files if (folder / name).is_file()]
    files = {name: (folder / name).read_bytes() for name in names}
    added = vendored(folder, lock, files)
    archive = {
        name: snapshots.text(folder, name) for name in (INIT, lock.modeling, f"{lock.modeling}{snapshots.ORIGINAL}")
    }
    texts = {name: data for name, data in archive.items() if data is not None}
    generated = {name: _relative(texts[name]) for name in (INIT, lock.modeling) if name in texts}
    files |= {**added, snapshots.ARCHIVE: snapshots.archive({**texts, **generated})}
    made = {**generated, **{name: files[name] for name in (*added, snapshots.ARCHIVE) if name not in generated}}
    now = replace(
        lock,
        options=replace(lock.options, vendored=True),
        files={**lock.files, **{name: sha256(data) for name, data in made.items()}},
        syntax={**lock.syntax, **syntax.digests(made)},
    )
    files[LOCK_NAME] = now.to_json().encode("utf-8")
    _replace(folder, lock, files)
    return sorted(added.keys() - {INIT, lock.modeling})


def vendored(folder: Path, lock: Lock, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a package that import the runtime, relatively now, and those of the runtime that they need.

    Raises:
        SourceDoesNotParse: if one is not valid Python.
    """
    own = {name: data for name, data in files.items() if name.endswith(".py") and "/" not in name}
    changed = {name: text for name, data in own.items() if (text := _relative(data)) != data}
    try:
        return {**changed, **vendored_files.files([data.decode("utf-8-sig") for data in {**own, **changed}.values()])}
    except SyntaxError as error:
        raise SourceDoesNotParse(folder / lock.modeling, error.lineno or 1, error.msg) from error


def _relative(data: bytes) -> bytes:
    return vendored_files.relative(data.decode("utf-8")).encode("utf-8")


def _replace(folder: Path, lock: Lock, files: Mapping[str, bytes], keeps_lock: bool = True) -> None:
    with swap.alone(folder):
        place = output.prepare(folder, folder.parent / "-", merged=tuple(lock.files), kept=(VERDICT_NAME,))
        place = place if keeps_lock else replace(place, previous=None)
        with output.stage(place, Package(files, lock)) as staged:
            precheck.check_text(staged.folder, [name for name in files if name.endswith(".py")])
            staged.commit()


def _generated(folder: Path, lock: Lock, name: str) -> bytes | None:
    """Return the generated text of a file: the kept one, or this version's own where it is the same."""
    if name == snapshots.ARCHIVE:
        return _archive(folder, lock)
    whole, inner = f"{WHOLE}/{name}", name.removeprefix(f"{KEPT}/")
    if (text := snapshots.text(folder, name)) is not None and sha256(text) == lock.files[name]:
        return text
    if lock.as_generated(folder, whole) and lock.files[whole] == lock.files[name]:
        return (folder / whole).read_bytes()
    if inner != name and inner in lock.files and lock.as_generated(folder, inner):
        return (folder / inner).read_bytes()
    own = rebuild.own_runtime(lock).get(name, b"")
    return own if sha256(own) == lock.files[name] else None


def _archive(folder: Path, lock: Lock) -> bytes | None:
    """Return the archive of kept texts, made again where all of it is still to be had."""
    data = snapshots.text(folder, f"{lock.modeling}{snapshots.ORIGINAL}")
    if data is None or sha256(data) != lock.source.sha256:
        with contextlib.suppress(RewriteError):
            data = original.find(folder, lock).path.read_bytes()
    return snapshots.made_again(folder, lock, data)


def _is_users(folder: Path, name: str) -> bool:
    return not name.startswith(f"{KEPT}/") and (folder / name).is_file()
