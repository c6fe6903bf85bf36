"""Which form a kernel of a decode step takes: measured where it was, else a rule.

An entry of the tables is one of

    BLOCK_ROWS, BLOCK_COLS, num_warps      a tile: output rows of a program, columns of the weight in one load, warps
    the fields of `skinny.Form`            the same and more, for 2 to 32 rows
    the fields of `decode_attention.Split`
    None (`null`)                          torch's own product, with norm, activation and residual as operators

`MEASURED` holds what `rewrite tune` found, by chip and key. `tuned.json` (`tables`), which `rewrite tune DIR` writes,
has the same form and goes first:

    {"NVIDIA H100 80GB HBM3": {"linear 2048x8192x2": [4, 2048, 8], "gated 8192x2048x2": null, …}, …}

A chip's name is `torch.cuda.get_device_properties(device).name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from . import card_tables
from .launch import HIP, WAVE, Target, processors, shared_memory

STAGES = 2 if HIP else 5
"""Tiles of a skinny product that are in flight; LDS is 64 KiB on AMD cards."""

SPARED = 7 << 10
"""Bytes of shared memory that a skinny product leaves to what is not its tiles."""

LEAST_FILL = 0.7
"""Programs of a processor, average over most, with which a product of few rows is content."""

MOST_AHEAD = 128
"""Elements of the weight that a thread may have in flight on AMD cards, in a product of one row.

The compiler of Triton 3.9 loads all tiles of a program before it multiplies the first: with 224 elements a thread held
280 registers, or 256 and 32 more in memory; with 112 it holds 168 (compiled for gfx942; 105 with Triton 3.6).
"""

Tile = tuple[int, ...]
Entry = tuple[int, ...] | None

MEASURED: dict[str, dict[str, Entry]] = {
    # torch 2.11, triton 3.6. Skinny products with 8-bit weights by bench/gemm.py, the sizes of a Llama of 8B; the
    # others in whole steps of Llamas of 1B and 8B and of Qwen3-30B-A3B, with 512 tokens before.
    "NVIDIA H100 80GB HBM3": {
        "attention 1x4x8x128 1024": (8, 16, 32, 1, 4),
        "gated 14336x4096x1": (2, 4096, 8),
        "linear 128256x4096x1": (2, 4096, 8),
        "linear 4096x14336x1": (8, 1024, 4),
        "linear 4096x4096x1": (4, 2048, 4),
        "linear 5120x2048x2": (8, 1024, 8),
        "linear 6144x4096x1": (8, 1024, 4),
        "qkv 32x2048x2": (1, 1024, 4),
        "skinny_linear 128256x4096x1": (64, 256, 4),
        "skinny_linear 28672x4096x1": (64, 256, 4),
        "skinny_linear 4096x14336x1": (32, 512, 4),
        "skinny_linear 4096x4096x1": (32, 512, 4),
        "skinny_linear 6144x4096x1": (32, 256, 4),
    },
}

_tried: dict[str, Entry] = {}
_listener: Callable[[str, Entry], None] | None = None


def key(kind: str, rows: int, cols: int, element_size: int) -> str:
    """Return the tables' name for a product of `kind` with a weight `[rows, cols]`."""
    return f"{kind} {rows}x{cols}x{element_size}"


def attention_key(batch: int, kv_heads: int, group: int, head_dim: int, capacity: int) -> str:
    """Return the tables' name for attention to a cache whose capacity is rounded up to a power of two."""
    return f"attention {batch}x{kv_heads}x{group}x{head_dim} {1 << (capacity - 1).bit_length()}"


def tile(kind: str, rows: int, cols: int, element_size: int, device: int | None) -> Tile | None:
    """Return the tile for a product of few input rows with a weight `[rows, cols]`; None for torch's own product.

    Args:
        kind: of one row `linear`, `gated` (a program takes `BLOCK_ROWS` rows of each half) or `qkv` (rows are pairs of
            columns); of 2 to 16 rows `skinny_linear`, of 17 to 32 `skinny_linear_32`, whose tiles are `skinny.Form`s.
        rows: of the output, in the kind's units.
        cols: of the weight.
        element_size: of the weight, in bytes.
        device: index of the CUDA device; None for the interpreter.
    """

    def ruled() -> Tile:
        return rule(kind, rows, cols, element_size, processors(device), shared_memory(device))

    found = entry(key(kind, rows, cols, element_size), device, ruled)
    return None if found is None else tuple(map(int, found))


def entry(name: str, device: int | None, otherwise: Callable[[], Entry]) -> Entry:
    """Return what the tables have under a name; `otherwise()` where that was not measured."""
    table = _tried if name in _tried else _table(device)
    found = table[name] if name in table else otherwise()
    if _listener is not None:
        _listener(name, found)
    return found


@functools.cache
def rule(
    kind: str,
    rows: int,
    cols: int,
    element_size: int = 2,
    processors: int = Target.processors,
    shared: int = Target.shared,
) -> Tile:
    """Return a tile for a shape that was not measured, on a card with so many processors and so much shared memory.

    For one row and weights of 16 bits on NVIDIA's cards `_plain_rule` and `_halves_rule`. The others, which were not
    measured, have 16 to 32 elements a thread, in blocks that need no mask.
    """
    if kind.startswith("skinny"):
        if element_size == 2 and not HIP:
            return _several_rule(32 if kind.endswith("_32") else 16, rows, cols, processors, shared)
        return _skinny_rule(rows, cols, element_size, processors)
    if element_size == 2 and not HIP:
        return (_plain_rule if kind == "linear" else _halves_rule)(rows, cols, processors)
    halves = 1 if kind == "linear" else 2
    if kind == "gated" and cols > 2048 and cols % 2048 == 0:
        return 1, 2048, 256 // WAVE
    block_cols = min(4096 if halves == 1 else 1024, next_power(cols))
    if cols % block_cols:
        block_cols = max(256, min(block_cols, cols & -cols))
    block_rows = _dividing(rows, 4 if halves == 1 and cols > 2048 and rows % 4 == 0 else 2)
    threads = max(WAVE, min(512, block_rows * block_cols * halves // 32))
    while HIP and kind == "linear" and block_rows > 1 and block_rows * cols > MOST_AHEAD * threads:
        block_rows //= 2
    return block_rows, block_cols, threads // WAVE


def _plain_rule(rows: int, cols: int, processors: int) -> Tile:
    """Return a tile for one row, found in whole steps of 11 models of 0.5B to 14B on an H200 (`bench/step_tiles.py`).

    A mask over the last block costs little and a small block much, in which a program has few bytes on their way. Few
    rows are left to more programs; of more rows a program takes two, up to 4,096 columns with two warps.
    """
    few, head = rows < 18 * processors, rows >= 64 * processors
    block: Tile
    if cols <= 2048 and cols != 1536 and (head or (cols > 1536 and rows > 24 * processors)):
        block = 4, 1024, 4
    elif cols <= 1024:
        block = 2, next_power(cols), 1
    elif cols < 1536:
        block = 2, 256, 1
    elif cols <= 2048:
        block = 2, 2048, 2
    elif head:
        block = (2, 1024, 2) if cols > 4096 and cols % 2048 else (2, 2048, 4)
    elif few and cols >= 8192:
        block = 2, 512, 2
    elif few:
        block_cols = _masking_little(cols, 2048)
        block = (1, 2048, 4 if cols % 2048 else 2) if block_cols == 2048 else (2, block_cols, 4)
    elif cols <= 4096:
        block = 2, _masking_little(cols, 2048), 2
    elif cols >= 8192 and (cols % 2048 or cols > 16384):  # Triton 3.9 spills with wider blocks of 28,672 columns
        block = 2, 1024, 4
    else:
        block = (1, 2048, 2) if rows < 24 * processors else (2, 2048, 4)
    return _dividing(rows, block[0]), *block[1:]


def _halves_rule(rows: int, cols: int, processors: int) -> Tile:
    """Return a tile for one row where a program takes rows of two halves: gated products, and pairs of a rotation."""
    block: Tile
    if cols > 1024 and rows < 8 * processors:
        block = _pairs_rule(cols)
    elif cols <= 1024:
        block = 2, next_power(cols), 2
    elif cols <= 1536:
        block = 2, 256, 2
    elif cols <= 2048:
        block = 1, 1024, 4
    elif cols % 2048 == 0:
        block = 1, 2048, 8
    elif 3072 <= cols < 4096:
        block = (1, 1024, 2) if cols % 1024 else (1, 2048, 4)
    else:
        block = 2, 512, 2
    return _dividing(rows, block[0]), *block[1:]


def _pairs_rule(cols: int) -> Tile:
    """Return a tile for pairs of columns of a head, which are few."""
    masked = -cols % 1024
    if cols < 2048:
        return (2, 512, 2) if cols < 1536 else (1, 512, 4)
    if cols >= 4096:
        return 1, 2048, 8 if cols % 2048 == 0 else 4
    return (2, 1024, 4) if 6 * masked <= cols else (1, 1024, 2) if 4 * masked <= cols else (2, 512, 2)


def _masking_little(cols: int, most: int) -> int:
    """Return the largest power of two up to `most` whose blocks are beyond `cols` by no more than a third of it."""
    while 3 * (-cols % most) > cols:
        most //= 2
    return most


def next_power(cols: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (cols - 1).bit_length()


def _dividing(rows: int, block_rows: int) -> int:
    """Return `block_rows`, or the largest power of two below that divides `rows`."""
    while rows % block_rows:
        block_rows //= 2
    return block_rows


def in_one_turn(processors: int) -> int:
    """Return how many programs a card runs at a time where each takes a processor for itself: 128 on an H100's 132.

    Whole sixteens, in which weights come apart evenly; the rest begins the next kernel.
    """
    return processors // 16 * 16


def _several_rule(height: int, rows: int, cols: int, processors: int, shared: int) -> Tile:
    """Return a tile for 2 to 32 rows, filled up to `height`, found in whole steps of eleven models.

    On an H200 (Triton 3.6, 2026-11-26, `bench/step_tiles.py`) a product of 8 rows takes 0.1 µs more (mean of 48, at
    most 1.5) than with the best of about 20 tiles. What counts is how evenly programs fall to processors, and how soon
    the first tile is there: three tiles in flight, of 32 KiB, read as fast as five. With a stage more than a program
    has tiles all of them are on their way at once.
    """
    tile = _of_many_rows(height, rows, cols, processors, shared) or _of_few_rows(rows, cols, processors)
    if tile is None:
        tile = _skinny_rule(rows, cols, 2, processors)
    block_rows, block_cols, warps, splits, most = tile
    block_cols = max(16, min(block_cols, next_power(cols)))

    def fitting() -> int:
        return (shared - SPARED) // (2 * block_cols * (block_rows + height))

    while fitting() < 4 and block_cols > 64:  # wider tiles spill on an A100 (compiled)
        block_cols //= 2
        most *= 2
    tiles = -(-cols // (block_cols * splits))
    return block_rows, block_cols, warps, splits, max(1, min(most, fitting(), tiles + (tiles > 1)))


def _of_many_rows(height: int, rows: int, cols: int, processors: int, shared: int) -> Tile | None:
    """Return a tile for a weight of gates or a head, whose tiles of 128 rows are half as many as processors, or more.

    One program a processor has as much on its way as shared memory takes. Where that makes a second turn of a few
    programs, and two on each processor hold all tiles at once, they are half as wide: 152 tiles on 132 processors took
    6.9 µs less so (`[19456, 2560]`). Two tiles of 64 rows, loaded before the kernel ahead has ended, are sooner yet
    where two programs a processor are all there are, and fit there.
    """
    tiles, halves = -(-rows // 128), -(-rows // 64)
    if 2 * tiles < processors:
        return None
    fit = 2 * 2 * 2 * 256 * (64 + height) <= shared
    if fit and 1.7 * processors < halves <= 2 * processors and cols <= 2048 and cols % 256 == 0:
        return 64, 256, 4, 1, 2
    if processors < tiles <= 2 * processors or (tiles > processors and cols <= 2048 and height == 16):
        return 128, 64, 4, 1, 5
    return 128, 128, 8, 1, 8


def _of_few_rows(rows: int, cols: int, processors: int) -> Tile | None:
    """Return a tile of 64 rows for other weights, with as many programs to a row as fall to processors evenly.

    Sums that meet cost more than a few processors that wait. Where nearly half of them would wait, a short program has
    a neighbour on its processor and a long one more in flight.
    """
    tiles, most = -(-rows // 64), cols // 512
    if cols <= 1280:
        return (32, 256, 4, 1, 8) if rows >= 8 * processors else None
    if cols == 2048 and 4 * tiles <= 2 * processors and _fill(4 * tiles, processors) >= LEAST_FILL:
        return 64, 256, 4, 4, 3 if 4 * tiles <= processors else 2
    splits = max(1, min(processors // tiles, most))
    if splits * tiles >= LEAST_FILL * processors:
        return 64, 256, 4, splits, 3
    return (64, 256, 4, max(1, min(2 * processors // tiles, most)), 2) if cols < 4096 else (64, 256, 4, splits, 5)


def _fill(programs: int, processors: int) -> float:
    """Return how many programs a processor has, average over most."""
    return programs / (processors * -(-programs // processors))


@functools.cache
def head_rule(height: int, rows: int, cols: int, head_dim: int, processors: int, shared: int) -> Tile:
    """Return a `skinny.Form` for 2 to 32 rows, filled up to `height`, whose tiles are heads of `head_dim` rows.

    As `_several_rule`, with as many programs as run at a time.
    """
    block_cols = max(16, min(128, next_power(cols)))
    splits = max(1, min(in_one_turn(processors) * head_dim // rows, cols // (4 * block_cols)))
    if HIP:  # LDS holds one program's tiles
        splits = _even_parts(rows // head_dim, -(-cols // block_cols), processors, 1)
    stages = min(8, (shared - SPARED) // (2 * block_cols * (head_dim + height)), -(-cols // (block_cols * splits)))
    return head_dim, block_cols, 8 if head_dim >= 128 else 4, splits, max(1, stages)


def _skinny_rule(rows: int, cols: int, element_size: int, processors: int) -> Tile:
    """Return tiles of 16 KiB, 64 rows for Hopper's tensor cores, with splits for as many programs as processors.

    The tiles in flight fill more than half of a processor's shared memory, so programs beyond the 132 of an H100 wait
    for a second turn: 192 of two splits took 22.6 µs, 96 of one 19.4 (6144x4096, 8 rows). A program has four tiles or
    more.
    There are as many of AMD's waves of 64 as of warps: two would hold twice the registers each, and LDS leaves room
    for two programs (compiled for gfx942).
    """
    block_rows = max(16, min(64, 1 << (rows - 1).bit_length()))
    block_cols = max(16, min(256 // element_size, 1 << (cols - 1).bit_length()))
    if HIP:
        splits = _even_parts(-(-rows // block_rows), -(-cols // block_cols), processors, 2)
        return block_rows, block_cols, 4, splits, STAGES
    splits = min(in_one_turn(processors) * block_rows // rows, cols // (4 * block_cols))
    return block_rows, block_cols, 4, max(1, splits), STAGES


def _even_parts(tiles: int, steps: int, processors: int, resident: int) -> int:
    """Return how many programs share each of a weight's `tiles` of rows, of `steps` tiles of columns, on AMD.

    With as many parts the busiest processor reads the fewest tiles; of several such numbers the least, since sums that
    meet cost. A program has two tiles or more, and all of them run at a time. Not measured: 70B's qkv of 8 rows, 160
    tiles for an MI300X's 304 processors, takes 56 us in one part and 43 in three by the model (docs/kernels.md).
    """
    most = max(1, min(steps // 2, resident * processors // tiles))
    return min(range(1, most + 1), key=lambda parts: -(-steps // parts) * -(-tiles * parts // processors))


@card_tables.cached
def _table(device: int | None) -> dict[str, Entry]:
    if device is None:
        return {}
    chip = torch.cuda.get_device_properties(device).name
    table = dict(MEASURED.get(chip, {}))
    measured = card_tables.read(card_tables.TUNED).get(chip, {})
    table.update({name: None if found is None else tuple(map(int, found)) for name, found in measured.items()})
    return table


def try_out(entries: Mapping[str, Entry]) -> None:
    """Put entries before all tables, in place of those tried out before; `rewrite tune` measures them so."""
    global _tried
    _tried = dict(entries)


def listen(listener: Callable[[str, Entry], None] | None) -> None:
    """Tell `listener` of every name that is asked for and what it got; None for nobody."""
    global _listener
    _listener = listener
