"""The original of a package: its exact text, its name in a patch, and where it is found again."""

from __future__ import annotations

from pathlib import Path

from rewrite.errors import OriginalChanged, OriginalNotFound
from rewrite.lock import Lock, sha256
from rewrite.source import Source, resolve


def text_of(path: Path) -> str:
    """Return the text of a file exactly, byte order mark and newlines included."""
    return path.read_bytes().decode("utf-8")


def patch_path(source: Source) -> str:
    """Return the name that a patch of the original has: relative to the working folder where it lies in it."""
    here = Path.cwd().resolve()
    resolved = source.path.resolve()
    if source.module is None and resolved.is_relative_to(here):
        return resolved.relative_to(here).as_posix()
    return source.path.name


def find(folder: Path, lock: Lock, given: Path | None = None) -> Source:
    """Return the original that the package in `folder` was made from.

    Args:
        folder: the package.
        lock: its lock.
        given: where the user says that the original is.

    Raises:
        OriginalNotFound: if it is not where the lock says.
        OriginalChanged: if what is there is not what the package was made from.
    """
    origin = lock.source
    if given is not None:
        source = resolve(str(given))
    elif origin.module is not None:
        source = resolve(origin.module)
    else:
        path = folder / origin.target
        if not path.is_file():
            raise OriginalNotFound(folder, origin.path, origin.sha256)
        source = resolve(str(path))
    if sha256(source.path.read_bytes()) != origin.sha256:
        raise OriginalChanged(folder, source.path, origin.transformers, source.transformers_version)
    return source
