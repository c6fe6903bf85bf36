"""One libcst transform a file; this folder is the registry."""

from __future__ import annotations

import importlib
import pkgutil

from rewrite.errors import UnknownTransform
from rewrite.transform import Transform, order


def all_transforms() -> list[Transform]:
    """Return one instance of every transform in this folder, in the order in which the engine runs them."""
    found = []
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        classes = (value for value in vars(module).values() if isinstance(value, type))
        found += [cls() for cls in classes if issubclass(cls, Transform) and cls.__module__ == module.__name__]
    return order(found)


def select(only: tuple[str, ...] = (), skip: tuple[str, ...] = (), also: tuple[str, ...] = ()) -> list[Transform]:
    """Return the transforms to run: `only` (default: all but the ones on request) and `also`, less `skip`.

    Raises:
        UnknownTransform: if a name belongs to no transform.
    """
    available = {transform.name: transform for transform in all_transforms()}
    for name in (*only, *skip, *also):
        if name not in available:
            raise UnknownTransform(name, list(available))
    chosen = only or tuple(name for name, transform in available.items() if not transform.on_request)
    return [available[name] for name in available if name in (*chosen, *also) and name not in skip]
