"""Where this runtime lies: installed, or vendored beside a modeling file (`rewrite vendor`)."""

from __future__ import annotations

import re

import torch

_NESTED = __name__.endswith(".guards.place")
"""Not so where `rewrite export --hub --vendor` has put its files beside the modeling file."""
PREFIX = __name__.removesuffix("guards.place" if _NESTED else "guards_place")
"""How the name of every module of this runtime begins: `hf_rewrite_runtime.`, or `package._runtime.`."""
_PACKAGE = PREFIX.rstrip(".").rpartition(".")[0] if _NESTED else PREFIX.rpartition(".")[0]
_NAME = re.sub(r"\W", "_", _PACKAGE) or "hf_rewrite"
_NAMES = (_NAME, *(f"{_NAME}_{number}" for number in range(2, 1000)))
NAMESPACE = next(name for name in _NAMES if name not in vars(torch.ops))
"""What its operators are registered under.

A runtime that is imported once more takes a name with a number behind it: models of the first import may still be in
use, with its operators.
"""
