"""What is worth trying for a name in the tables of `runtime/launching/tiles.py`: at most 20 entries each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Entry = tuple[int, ...] | None

MOST = 20
MOST_THREADS = 1024
"""Of a program, on every chip."""


@dataclass(frozen=True)
class Limits:
    """What a program can have on a chip: more cannot be launched."""

    shared: int = 227 * 1024
    """Bytes of shared memory (LDS)."""
    wave: int = 32
    """Threads of a warp (wave)."""
    spare: int = 1
    """Tiles in shared memory beyond the stages: AMD's compiler keeps one less than there are stages, so -1."""

    @classmethod
    def of(cls, properties: Any) -> Limits:
        """Return those of a device, from `torch.cuda.get_device_properties`."""
        shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
        amd = bool(getattr(properties, "gcnArchName", ""))
        return cls(shared, properties.warp_size, -1 if amd else 1)


HOPPER = Limits()
BLOCKS = (
    (64, 128, 4, 5), (64, 256, 4, 3), (128, 128, 4, 4), (32, 256, 2, 6), (64, 64, 4, 5), (128, 128, 4, 2),
    (128, 64, 4, 5), (16, 512, 2, 5), (16, 256, 2, 4), (64, 256, 4, 4), (16, 32, 1, 4), (32, 64, 2, 4),
)  # fmt: skip
"""Rows, columns, warps and stages of skinny products, the likeliest first."""


def candidates(name: str, current: Entry, limits: Limits = HOPPER) -> list[Entry]:
    """Return entries for a name that a chip can launch, without `current`, the likeliest first."""
    kind, shape, *_ = name.split()
    if kind == "attention":
        found: Iterable[Entry] = splits(current, int(shape.split("x")[3]), limits)
    else:
        rows, cols, element_size = map(int, shape.split("x"))
        if kind.startswith("skinny"):
            return skinny(kind, (rows, cols, element_size), current, limits)
        found = [None, *varied(one_row(kind, rows, cols, limits))[: MOST - 1]]
    return [entry for entry in dict.fromkeys(found) if entry != current][:MOST]


def varied(tiles: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The best number of warps for each block first, then the second best for each, and so on."""
    turns: dict[tuple[int, int], int] = {}
    numbered = []
    for block_rows, block_cols, warps in tiles:
        turn = turns[block_rows, block_cols] = turns.get((block_rows, block_cols), -1) + 1
        numbered.append((turn, (block_rows, block_cols, warps)))
    return [tile for _, tile in sorted(numbered, key=lambda pair: pair[0])]


def one_row(kind: str, rows: int, cols: int, limits: Limits = HOPPER) -> list[tuple[int, int, int]]:
    """Tiles for one input row, by how near they are to 24 elements a thread and 4096 elements a program.

    At most 128 elements a thread: they are in registers, of which a thread has 255 (NVIDIA) or 512 (AMD).
    """
    wave = limits.wave
    halves = 1 if kind == "linear" else 2
    longest = 1 << (cols - 1).bit_length()
    lengths = [n for n in (512, 1024, 2048, 4096) if n <= longest]
    whole = [n for n in lengths if 3 * (-cols % n) <= cols]  # a mask over the last block costs little
    tiles = []
    for block_rows, block_cols, warps in itertools.product((1, 2, 4, 8), whole or lengths or [longest], (2, 4, 8, 16)):
        size = block_rows * block_cols * halves
        if wave * warps <= MOST_THREADS and rows % block_rows == 0 and 8 <= size // (wave * warps) <= 128:
            tiles.append((block_rows, block_cols, warps))

    def distance(tile: tuple[int, int, int]) -> float:
        size = tile[0] * tile[1] * halves
        return abs(math.log2(size / (wave * tile[2]) / 24)) + 0.7 * abs(math.log2(size / 4096))

    return sorted(tiles, key=distance)


def skinny(kind: str, weight: tuple[int, int, int], current: Entry, limits: Limits = HOPPER) -> list[Entry]:
    """Divisions for 2 to 32 input rows: blocks that won some shape on an H100, with splits for 128 or 256 programs.

    Args:
        kind: with the rows in its name, if they are more than 16.
        weight: its rows, columns, and bytes of a number.
        current: what is in use.
        limits: of the chip.
    """
    rows, cols, element_size = weight
    height = int(kind.rpartition("_")[2]) if kind[-1].isdigit() else 16
    found: list[Entry] = [None]
    for block_rows, block_cols, warps, stages in BLOCKS:
        row_blocks = -(-rows // block_rows)
        wanted = (max(1, 128 // row_blocks), max(1, 256 // row_blocks), 1)
        for splits in dict.fromkeys(min(n, max(1, cols // (2 * block_cols))) for n in wanted):
            shared = max(stages + limits.spare, 1) * (block_rows + height) * block_cols * element_size
            if shared <= limits.shared and block_cols <= max(16, 1 << (cols - 1).bit_length()):
                found.append((block_rows, block_cols, warps, splits, stages))
    return [entry for entry in dict.fromkeys(found) if entry != current][:MOST]


def splits(current: Entry, head_dim: int = 0, limits: Limits = HOPPER) -> list[Entry]:
    """Divisions of attention around the one in use, whose fields are heads, splits, slots, dot, num_warps.

    With `dot` a tile of keys and one of values, in 16 bits, pass through shared memory.
    """
    assert current is not None
    heads, parts, slots, dot, warps = current
    tried = [
        (n, s, w)
        for n in (parts // 4, parts // 2, parts, parts * 2, parts * 4)
        for s in (slots // 4, slots // 2, slots, slots * 2)
        for w in (1, 2, 4, 8)
        if 1 <= n <= 64 and 16 <= s <= 128 and (not dot or 2 * 2 * s * head_dim <= limits.shared)
    ]

    def distance(form: tuple[int, int, int]) -> float:
        return sum(abs(math.log2(new / old)) for new, old in zip(form, (parts, slots, warps), strict=True))

    nearest = sorted(tried, key=distance)[:MOST]
    return [(heads, n, s, dot, w) for n, s, w in nearest]
