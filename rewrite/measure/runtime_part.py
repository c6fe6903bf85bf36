"""Parts of a package's runtime by the file of this repository that they come from, whichever way the package has them.

In a package a room is one file, in which some names have that of their file in front (`rewrite/package/parts.py`); in
older ones a room is a folder.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


def runtime_part(package: str, file: str) -> Any:
    """Return what a package's runtime has of `core/backend`, whose names can be read and set as in that file.

    Raises:
        ModuleNotFoundError: if it has nothing of it.
    """
    room, _, stem = file.partition("/")
    try:
        return importlib.import_module(f"{package}.runtime.{room}.{stem}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.runtime.{room}.{stem}":
            raise
    return _Part(importlib.import_module(f"{package}.runtime.{room}"), stem)


class _Part:
    """The names of one file in a room."""

    __slots__ = ("_room", "_stem")
    _room: ModuleType
    _stem: str

    def __init__(self, room: ModuleType, stem: str):
        object.__setattr__(self, "_room", room)
        object.__setattr__(self, "_stem", stem)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._room, self._name_of(name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._room, self._name_of(name), value)

    def _name_of(self, name: str) -> str:
        bare, under = name.lstrip("_"), "_" * (len(name) - len(name.lstrip("_")))
        stem, title = self._stem, "".join(word.title() for word in self._stem.split("_"))
        room = self._room.__name__.rpartition(".")[2]
        front = (f"{stem}_", f"{room}_{stem}_", f"{stem.upper()}_", title)
        found = [f"{under}{before}{bare}" for before in front if hasattr(self._room, f"{under}{before}{bare}")]
        return found[0] if found else name
