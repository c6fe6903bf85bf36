"""Where this runtime lies: in a package, or flat beside the modeling file as `package/flat.py` writes it."""

from __future__ import annotations

import re
from pathlib import Path

_NESTED = ".runtime.core.place"

PACKAGE = __name__.removesuffix(_NESTED) if __name__.endswith(_NESTED) else __name__.rpartition(".")[0]
"""Dotted name of the package that the modeling file is in."""
MODULES = f"{PACKAGE}.runtime." if __name__.endswith(_NESTED) else f"{PACKAGE}.rewrite_runtime_"
"""How the dotted name of every file of this runtime begins."""
FOLDER = Path(__file__).parents[2] if __name__.endswith(_NESTED) else Path(__file__).parent
"""The folder that the modeling file is in, with the tables that were measured."""
NAMESPACE = re.sub(r"\W", "_", PACKAGE)
"""What its operators are registered under: each package carries its own copy, and two live in one process."""
