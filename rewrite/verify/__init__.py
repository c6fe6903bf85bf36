"""Runs a rewritten modeling file against the original: structure, parity and latency.

`verify(original, rewritten, options)` answers with a `Verdict`; `render` and `summary` put one into words. Nothing
here imports torch or transformers before `verify` is called.
"""

from __future__ import annotations

from .judging.checks import Progress
from .judging.verdict import Check, Divergence, Gate, Options, Reached, Verdict
from .margins import worst
from .models.loaded_sides import Side
from .render import not_verified, render, summary
from .runner import verify

__all__ = [
    "Check",
    "Divergence",
    "Gate",
    "Options",
    "Progress",
    "Reached",
    "Side",
    "Verdict",
    "not_verified",
    "render",
    "summary",
    "verify",
    "worst",
]
