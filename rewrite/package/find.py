"""Finds the packages below a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rewrite.errors import NotAPackage
from rewrite.source.resolve import LOCK_NAME

_PASSED_OVER = {"node_modules", "__pycache__", "site-packages", "venv", "env", "build", "dist"}
_LEFT_BEHIND = re.compile(r".*\.(rejected|backup\d+)")


def packages(top: Path) -> list[Path]:
    """Return every folder below `top` that has a lock, sorted; hidden folders and links are not entered.

    Raises:
        NotAPackage: if there is none.
    """
    found = []
    for here, folders, files in os.walk(top):
        if LOCK_NAME in files:
            found.append(Path(here))
        folders[:] = [name for name in folders if is_entered(name)]
    if not found:
        raise NotAPackage(top.resolve().name, f"no folder in it has a {LOCK_NAME}")
    return sorted(found)


def is_entered(name: str) -> bool:
    """Return whether a folder of this name may be, or hold, a package in use."""
    return not name.startswith(".") and name not in _PASSED_OVER and not _LEFT_BEHIND.fullmatch(name)
