"""Files of the runtime that a package runs on: the installed one, or one of its own (`rewrite vendor`)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from rewrite.offers import DISTRIBUTION, VENDORED


def runtime_part(package: str, file: str) -> Any:
    """Return the module that a package's runtime has of `core/backend`.

    Raises:
        ModuleNotFoundError: if it has none.
    """
    own = f"{package}.{VENDORED}"
    root = own if package and importlib.util.find_spec(own) is not None else DISTRIBUTION
    return importlib.import_module(f"{root}.{file.replace('/', '.')}")
