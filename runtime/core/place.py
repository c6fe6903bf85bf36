"""Where this runtime lies: installed, or vendored beside a modeling file (`rewrite vendor`)."""

from __future__ import annotations

import re

import torch

ROOT = __name__.rpartition(".core.")[0]
"""Dotted name of the runtime: `hf_rewrite_runtime`, or `package._runtime`."""
_NAME = "hf_rewrite" if ROOT == "hf_rewrite_runtime" else re.sub(r"\W", "_", ROOT.rpartition(".")[0])
_NAMES = (_NAME, *(f"{_NAME}_{number}" for number in range(2, 1000)))
NAMESPACE = next(name for name in _NAMES if name not in vars(torch.ops))
"""What its operators are registered under.

A runtime that is imported once more takes a name with a number behind it: models of the first import may still be in
use, with its operators.
"""
