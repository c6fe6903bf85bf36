"""The original of a package: its exact text, its name in a patch, and where it is found again."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from rewrite.errors import MissingTransformers, OriginalNotFound, RewriteError, SourceNotReadable
from rewrite.package.assemble import WHOLE
from rewrite.package.lock import Lock
from rewrite.package.lock_text import is_module_name
from rewrite.source import hub_model, importable
from rewrite.source.installed import Installed, find_transformers
from rewrite.source.resolve import Source, of_library, resolve


def text_of(path: Path) -> str:
    """Return the text of a file exactly, byte order mark and newlines included.

    Raises:
        SourceNotReadable: if it cannot be read as UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SourceNotReadable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise SourceNotReadable(path, f"byte {error.start} is not UTF-8") from error


def patch_path(source: Source) -> str:
    """Return the name that a patch of the original has: relative to the working folder where it lies in it."""
    here = Path.cwd().resolve()
    resolved = source.path.resolve()
    if source.module is None and source.origin is None and resolved.is_relative_to(here):
        return resolved.relative_to(here).as_posix()
    return source.path.name


def find(folder: Path, lock: Lock, given: Path | None = None) -> Source:
    """Return the original that the package in `folder` was made from, unchanged since.

    Args:
        folder: the package.
        lock: its lock.
        given: where the user says that the original is.

    Raises:
        OriginalNotFound: if it is not where the lock says.
        RewriteError: if what is there is not what the package was made from.
    """
    source = find_present(folder, lock, given)
    origin = lock.source
    if source.sha256 != origin.sha256:
        made_from, found = origin.transformers, source.transformers_version
        versions = f" (made from transformers {made_from}, found {found})" if made_from and found else ""
        raise RewriteError(
            f"{folder} was made from another content of {source.path} than is there now{versions}: rewrite it anew, "
            "or name the original with --original FILE."
        )
    return source


def find_present(folder: Path, lock: Lock, given: Path | None = None, library: Installed | None = None) -> Source:
    """Return what is now in the place of the original of the package in `folder`, changed or not.

    Args:
        folder: the package.
        lock: its lock.
        given: where the user says that the original is.
        library: the transformers to look in; None is the installed one.

    Raises:
        OriginalNotFound: if there is nothing.
        RewriteError: if that transformers does not have the file.
        MissingTransformers: if no transformers is installed to look in.
    """
    origin = lock.source
    if given is not None:
        source = resolve(str(given))
    elif origin.module is not None:
        library = library or find_transformers()
        if library is None:
            raise MissingTransformers(f"the original of {folder}")
        found = of_library(origin.path, library)
        if found is None:
            raise RewriteError(
                f"the original of {folder}, {origin.module}, is not in transformers {library.version}: "
                "name it with --original FILE, or keep the package as plain files (`rewrite eject`)."
            )
        source = replace(found, target=origin.module)
    else:
        kept = origin.target.startswith(hub_model.SCHEME)
        path: Path | None = folder.resolve() / (f"{WHOLE}/{origin.path}" if kept else origin.target)
        if is_module_name(origin.target):
            path = importable.file_of(origin.target, sys.path)
        if path is None or not path.is_file():
            raise OriginalNotFound(folder, origin.path, origin.sha256)
        source = resolve(os.path.normpath(path))
        if kept:  # a commit of the Hub does not change, and the package has it
            source = replace(source, remote_code=True, origin=origin.target)
    return source
