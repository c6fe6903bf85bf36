"""Transforms that users bring: by an entry point of an installed distribution, or by a path in their pyproject.

Both are code of the user's own environment or repository, as a plugin of any tool is; nothing is downloaded, and a
modeling file or a package can name none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rewrite.errors import OutsideTransformNotLoadable, PathNotUsable
from rewrite.transform import Transform

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GROUP = "hf_rewrite.transforms"
"""Entry point group; an entry point names a transform's class, or a module that has some."""
TABLE = "tool.rewrite"
"""Table of pyproject.toml; `transforms` in it lists paths of Python files, or of folders of them, relative to it."""


def outside_transforms(place: Path) -> list[Transform]:
    """Return one instance of every transform that installed distributions and the project around `place` bring.

    Raises:
        OutsideTransformNotLoadable: if one cannot be imported, or is no transform.
    """
    return [*_installed(), *_of_project(place)]


def project_file(place: Path) -> Path | None:
    """Return the nearest `pyproject.toml` at or above `place` that has our table, up to the repository's root.

    Raises:
        PathNotUsable: if the links of `place` go round in a circle.
    """
    try:
        here = place.resolve()
    except RuntimeError as error:  # what Python before 3.13 makes of a circle
        raise PathNotUsable(place, "its links go round in a circle") from error
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and _table(path):
            return path
        if (folder / ".git").exists():
            return None
    return None


def _installed() -> Iterator[Transform]:
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        where = f"entry point {entry.name} = {entry.value}"
        try:
            loaded = entry.load()
        except Exception as error:  # a stranger's module may raise anything; nothing goes on without it
            raise OutsideTransformNotLoadable(where, f"{type(error).__name__}: {error}") from error
        yield from _made(loaded, where)


def _of_project(place: Path) -> Iterator[Transform]:
    path = project_file(place)
    if path is None:
        return
    listed = _table(path).get("transforms", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise OutsideTransformNotLoadable(str(path), f"[{TABLE}] transforms should be a list of paths")
    for name in listed:
        target = path.parent / name
        files = sorted(target.glob("[!_]*.py")) if target.is_dir() else [target]
        if not files or not all(file.is_file() for file in files):
            raise OutsideTransformNotLoadable(
                str(path), f"[{TABLE}] names {name}, and there is no such file or folder"
            )
        for file in files:
            yield from _made(_module(file), str(file))


def _made(loaded: Any, where: str) -> list[Transform]:
    if isinstance(loaded, ModuleType):
        classes = [
            value
            for value in vars(loaded).values()
            if isinstance(value, type) and issubclass(value, Transform) and value.__module__ == loaded.__name__
        ]
    else:
        classes = [loaded] if isinstance(loaded, type) and issubclass(loaded, Transform) else []
    if not classes:
        raise OutsideTransformNotLoadable(where, "it has no class that derives from rewrite.transform.Transform")
    for cls in classes:
        missing = [name for name in ("name", "summary", "numerics", "reasons") if not hasattr(cls, name)]
        missing += sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            raise OutsideTransformNotLoadable(where, f"{cls.__name__} has no {', '.join(missing)}")
    return [cls() for cls in classes]


def _module(file: Path) -> ModuleType:
    """Import a file by its path, under a name that no other file has."""
    name = f"rewrite_outside_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise OutsideTransformNotLoadable(str(file), "it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as for an entry point
        del sys.modules[name]
        raise OutsideTransformNotLoadable(str(file), f"{type(error).__name__}: {error}") from error
    return module


def _table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("rewrite", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        raise OutsideTransformNotLoadable(str(path), f"it cannot be read: {error}") from error
    return table if isinstance(table, dict) else {}
