"""The texts that a package keeps for later: as it was generated, which a merge starts from, and its original.

They lie in one zip file, in which nothing is compressed: the same bytes on every machine, which git packs and reviews
do not show.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from rewrite.package import lock_text
from rewrite.package.lock import Lock, sha256

FOLDER = ".rewrite"
ARCHIVE = f"{FOLDER}/texts.zip"
ORIGINAL = ".original"
"""Ends the name of the original."""
_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o100644 << 16


def archive(texts: Mapping[str, bytes]) -> bytes:
    """Return the bytes of the archive that holds `texts`, by their names in the package."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as made:
        for name, text in sorted(texts.items()):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.create_system, entry.external_attr = 3, _MODE
            made.writestr(entry, text)
    return data.getvalue()


def of_archive(data: bytes, name: str) -> bytes | None:
    """Return a text of an archive, None if it has none of that name or cannot be read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            if found.getinfo(name).file_size > lock_text.MOST_BYTES:
                return None
            return found.read(name)
    except (KeyError, OSError, ValueError, NotImplementedError, RuntimeError, EOFError, zipfile.BadZipFile):
        return None


def text(folder: Path, name: str) -> bytes | None:
    """Return what the package in `folder` keeps of a file, as it lies there; None if it keeps nothing."""
    path = folder / ARCHIVE
    return of_archive(path.read_bytes(), name) if path.is_file() else None


def made_again(folder: Path, lock: Lock, original: bytes | None) -> bytes | None:
    """Return the archive of a package from its files and its original, None if they are no longer those it had."""
    texts = {
        name: (folder / name).read_bytes() for name in (lock.modeling, "__init__.py") if (folder / name).is_file()
    }
    if original is not None:
        texts[f"{lock.modeling}{ORIGINAL}"] = original
    data = archive(texts)
    return data if sha256(data) == lock.files.get(ARCHIVE) else None
