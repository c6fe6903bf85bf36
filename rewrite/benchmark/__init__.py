"""Measures a rewritten package against its original: prefill, decode and `generate()`, interleaved, with parity.

`python -m rewrite.benchmark PACKAGE` needs torch and transformers only; `rewrite bench` is the same with a table and a
chart. Nothing here imports torch or transformers before a measurement starts.
"""

from __future__ import annotations

from .benchmark_plan import Cell, Plan

__all__ = ["Cell", "Plan"]
