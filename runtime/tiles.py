"""Which tile a kernel of a decode step takes: measured where it was, else a rule.

A tile is `(BLOCK_ROWS, BLOCK_COLS, num_warps)`: output rows of a program, columns of the weight in one load, warps.
`MEASURED` holds what `rewrite tune` found on a chip; a file `tuned.json` beside the package's modeling file, which
`rewrite tune DIR` writes, is read before it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from .launch import WAVE

Tile = tuple[int, int, int]

TUNED = Path(__file__).parent.parent / "tuned.json"

MEASURED: dict[str, dict[str, Tile]] = {}


def key(kind: str, rows: int, cols: int, element_size: int) -> str:
    """Return the table's name for a product of `kind` with a weight `[rows, cols]`."""
    return f"{kind} {rows}x{cols}x{element_size}"


@functools.cache
def tile(kind: str, rows: int, cols: int, element_size: int, device: int | None) -> Tile:
    """Return the tile for a product of one input row with a weight `[rows, cols]`.

    Args:
        kind: `linear`, `gated` (a program takes `BLOCK_ROWS` rows of each half) or `qkv` (rows are pairs of columns).
        rows: of the output, in the kind's units.
        cols: of the weight.
        element_size: of the weight, in bytes.
        device: index of the CUDA device; None for the interpreter.
    """
    found = _table(device).get(key(kind, rows, cols, element_size))
    return found if found is not None else rule(kind, rows, cols)


def rule(kind: str, rows: int, cols: int) -> Tile:
    """Return a tile for a shape that was not measured.

    About 64 elements a thread, in one load where the columns allow: within 4% of the best of 40 tiles at every shape
    of a 1B Llama (H100, triton 3.6).
    """
    halves = 1 if kind == "linear" else 2
    block_cols = min(4096 if halves == 1 else 1024, 1 << (cols - 1).bit_length())
    if cols % block_cols:  # a block that divides the columns needs no mask
        block_cols = max(256, min(block_cols, cols & -cols))
    block_rows = 4 if halves == 1 and cols > 2048 and rows % 4 == 0 else 2
    while rows % block_rows:
        block_rows //= 2
    threads = max(WAVE, min(512, block_rows * block_cols * halves // 32))
    return block_rows, block_cols, threads // WAVE


@functools.cache
def _table(device: int | None) -> dict[str, Tile]:
    if device is None:
        return {}
    chip = torch.cuda.get_device_properties(device).name
    table = dict(MEASURED.get(chip, {}))
    if TUNED.is_file():
        measured = json.loads(TUNED.read_text(encoding="utf-8")).get(chip, {})
        table.update({name: (int(t[0]), int(t[1]), int(t[2])) for name, t in measured.items()})
    return table


def forget() -> None:
    """Read the tables anew at the next call, after `tuned.json` has changed."""
    _table.cache_clear()
    tile.cache_clear()
