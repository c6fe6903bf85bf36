"""What is to be measured, as plain frozen data, and what came out of it as plain JSON values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
ORIGINAL, STATIC, STEP, LIGER, OURS = "original", "static", "step", "liger", "ours"
TITLES = {
    ORIGINAL: "original, eager",
    STATIC: "original, static cache",
    STEP: "original, compiled step",
    LIGER: "original with Liger",
    OURS: "rewritten",
}
COMPILED = (STATIC, STEP)
"""Sides that compile for tens of seconds before they run, so they are measured after everything else."""


@dataclass(frozen=True)
class Cell:
    """One batch shape: rows, and tokens that are in the cache when decoding starts."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"


@dataclass(frozen=True)
class Plan:
    """One run: a package at one shape.

    `original` names the original where the lock's own name does not lead to it. `shape` is a preset of
    `presets.SHAPES`, or None with a checkpoint in `weights`. `new_tokens` is how many tokens a repeat decodes, of
    a fast side; slow ones decode fewer. `rounds` bounds the repeats from below and above; between those, `seconds`
    is the time a cell may take. `layers` cuts the preset, of a training step. `compiled_cells` are those where the
    original is compiled, `static_cells` those where it is compiled by transformers too (None: the same ones).
    After `budget` seconds nothing new is compiled.
    """

    package: Path
    original: str | None = None
    shape: str | None = "1b"
    weights: str | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    cells: tuple[Cell, ...] = (Cell(1, 512),)
    compiled_cells: tuple[Cell, ...] | None = None
    static_cells: tuple[Cell, ...] | None = None
    prefill: tuple[int, ...] = ()
    sides: tuple[str, ...] = (ORIGINAL, STATIC, STEP, LIGER, OURS)
    new_tokens: int = 128
    rounds: tuple[int, int] = (5, 30)
    seconds: float = 8.0
    budget: float = float("inf")
    parity_rows: int = 4
    parity_tokens: int = 64
    cold: bool = True
    seed: int = 0
    layers: int | None = None

    def wants(self, side: str, cell: Cell) -> bool:
        """Whether a side is measured at a cell."""
        limits = self.compiled_cells if side in COMPILED else None
        if side == STATIC and self.static_cells is not None:
            limits = self.static_cells
        return side in self.sides and (limits is None or cell in limits)


def cells(batches: Sequence[int], contexts: Sequence[int]) -> tuple[Cell, ...]:
    """Every batch at the first context, and the first batch at every other one."""
    first = [Cell(batch, contexts[0]) for batch in batches]
    return tuple(first + [Cell(batches[0], context) for context in contexts[1:]])


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write results so that a process killed at any moment leaves the last complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(plain(record), indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def plain(value: Any) -> Any:
    """Floats to six digits, infinities and NaN to None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    return value


def measured(record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Every (cell, side's name, side's figures) of a result that has a time."""
    for cell in record["cells"]:
        for name, figures in cell["sides"].items():
            if "decode_ms" in figures:
                yield cell, name, figures
