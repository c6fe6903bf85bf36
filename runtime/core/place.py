"""Where this runtime lies: in a package, or flat beside the modeling file as `package/flat.py` writes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

_NESTED = re.search(r"\.runtime\.core(\.place)?$", __name__)
"""Found in a package, where a room is one file, and in a repository that has its files."""

PACKAGE = __name__[: _NESTED.start()] if _NESTED else __name__.rpartition(".")[0]
"""Dotted name of the package that the modeling file is in."""
MODULES = f"{PACKAGE}.runtime." if _NESTED else f"{PACKAGE}.rewrite_runtime_"
"""How the dotted name of every file of this runtime begins."""
FOLDER = Path(sys.modules[f"{PACKAGE}.runtime"].__path__[0]).parent if _NESTED else Path(__file__).parent
"""The folder that the modeling file is in, with the tables that were measured: this file may lie in a shared one."""
_NAME = re.sub(r"\W", "_", PACKAGE)
_NAMES = (_NAME, *(f"{_NAME}_{number}" for number in range(2, 1000)))
NAMESPACE = next(name for name in _NAMES if name not in vars(torch.ops))
"""What its operators are registered under: each package carries its own copy, and two live in one process.

A package that is imported once more, or another version of it, takes a name with a number behind it: models of the
first import may still be in use, with its operators.
"""
