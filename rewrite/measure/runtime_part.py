"""Files of the runtime that a package runs on: the installed one, or one of its own (`rewrite vendor`)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rewrite.offers import DISTRIBUTION, VENDORED


def runtime_part(package: str, file: str) -> Any:
    """Return the module that the runtime of an imported package has of `core/backend`.

    Raises:
        ModuleNotFoundError: if it has none.
    """
    return importlib.import_module(f"{_root(package)}.{file.replace('/', '.')}")


def has_runtime(module: str) -> bool:
    """Return whether an imported modeling file has anything of a runtime; an original has not."""
    root = f"{_root(module.rpartition('.')[0])}."
    return any(str(getattr(value, "__module__", "")).startswith(root) for value in vars(sys.modules[module]).values())


def _root(package: str) -> str:
    own = f"{package}.{VENDORED}"
    return own if own in sys.modules else DISTRIBUTION
