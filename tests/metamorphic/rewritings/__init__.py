"""The rewritings; this folder is the registry."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from ..rewriting import Rewriting


def all_rewritings() -> dict[str, type[Rewriting]]:
    """Return every rewriting of this folder by its name, sorted."""
    found: dict[str, type[Rewriting]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            own = isinstance(value, type) and issubclass(value, Rewriting) and value.__module__ == module.__name__
            if own and not inspect.isabstract(value) and not value.__name__.startswith("_"):
                found[value.name] = value
    return dict(sorted(found.items()))
