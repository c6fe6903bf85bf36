"""One libcst transform a file; this folder is the registry. Users bring others (`rewrite/plugins.py`)."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from rewrite.errors import OutsideTransformNotLoadable, UnknownTransform
from rewrite.plugins import outside_transforms
from rewrite.transform import Transform, order


def all_transforms() -> list[Transform]:
    """Return one instance of every transform in this folder, in the order in which the engine runs them."""
    found = []
    names = (info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.") if not info.ispkg)
    for name in sorted(names, key=lambda dotted: dotted.rpartition(".")[2]):
        module = importlib.import_module(name)
        classes = (value for value in vars(module).values() if isinstance(value, type))
        found += [cls() for cls in classes if issubclass(cls, Transform) and cls.__module__ == module.__name__]
    return order(found)


def available(place: Path | None = None) -> list[Transform]:
    """Return every transform of this folder, and those that the user brings for the project around `place`.

    Args:
        place: an output folder, or any other; where it is None, the working folder.

    Raises:
        OutsideTransformNotLoadable: if one that the user brings cannot be imported, or has a name that is taken.
    """
    found = all_transforms()
    for transform in outside_transforms(place or Path.cwd()):
        if any(other.name == transform.name for other in found):
            where = type(transform).__module__
            raise OutsideTransformNotLoadable(where, f"there is a transform '{transform.name}' already")
        found.append(transform)
    return order(found)


def is_own(transform: Transform) -> bool:
    """Whether a transform came with this tool."""
    return type(transform).__module__.startswith(f"{__name__}.")


def select(
    only: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    place: Path | None = None,
) -> list[Transform]:
    """Return the transforms to run: `only` (default: all but the ones on request) and `also`, less `skip`.

    Args:
        only: names.
        skip: names.
        also: names.
        place: where the user's own are looked for.

    Raises:
        UnknownTransform: if a name belongs to no transform.
        OutsideTransformNotLoadable: as `available`.
    """
    there = {transform.name: transform for transform in available(place)}
    for name in (*only, *skip, *also):
        if name not in there:
            raise UnknownTransform(name, [*there])
    chosen = only or tuple(name for name, transform in there.items() if not transform.on_request)
    return [there[name] for name in there if name in (*chosen, *also) and name not in skip]
