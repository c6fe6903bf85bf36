"""Measures a rewritten package against its original: prefill, decode and `generate()`, interleaved, with parity.

`rewrite bench` prints the table and draws the chart. Nothing here imports torch or transformers before a measurement
starts.
"""

from __future__ import annotations

from .benchmark_plan import Cell, Plan

__all__ = ["Cell", "Plan"]
