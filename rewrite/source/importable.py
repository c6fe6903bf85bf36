"""Files of packages that are installed: by which dotted name one is imported, found without importing anything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path


def name_of(path: Path) -> str | None:
    """Return the dotted name of a file inside an installed package, None for a file that lies in none.

    A folder without an `__init__.py` is a package only inside another one. Packages that are found because they lie in
    the working folder are not installed: whoever imports what is made from them may be somewhere else.
    """
    resolved = path.resolve()
    if resolved.suffix != ".py" or resolved.stem == "__init__" or not resolved.is_file():
        return None
    return next((name for name in _names(resolved) if file_of(name, _places()) == resolved), None)


def file_of(name: str, places: Sequence[str]) -> Path | None:
    """Return the file of a dotted module, found from `places` on; None if there is none, or it is a package."""
    first, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(first, places) or importlib.util.find_spec(first)
    if spec is None:
        return None
    if not rest:
        found = [Path(spec.origin)] if spec.origin and spec.submodule_search_locations is None else []
    else:
        folders = [Path(place).joinpath(*rest[:-1]) for place in spec.submodule_search_locations or ()]
        packages = any((folder / rest[-1] / "__init__.py").is_file() for folder in folders)
        found = [] if packages else [folder / f"{rest[-1]}.py" for folder in folders]
    return next((path.resolve() for path in found if path.suffix == ".py" and path.is_file()), None)


def _names(path: Path) -> Iterator[str]:
    """Yield the names that a file in a package may have: from each place of the path, and its outermost package."""
    tops = [Path(place).resolve() for place in _places()]
    outermost = path.parent
    while (outermost / "__init__.py").is_file():
        outermost = outermost.parent
    for top in (*tops, outermost):
        if path.is_relative_to(top):
            parts = path.relative_to(top).with_suffix("").parts
            named = len(parts) > 1 and all(part.isidentifier() for part in parts)
            if named and (top / parts[0] / "__init__.py").is_file():
                yield ".".join(parts)


def _places() -> list[str]:
    """Return where Python looks for modules, without the working folder that it starts in."""
    first = sys.path[:1]
    started = bool(first) and os.path.realpath(first[0] or os.curdir) == os.path.realpath(os.curdir)
    return [place for place in sys.path[started:] if place]
