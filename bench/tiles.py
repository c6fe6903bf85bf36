"""Time tiles of products of few rows at the sizes of published models, to hold `runtime/core/tiles.py` to.

    python bench/tiles.py measure RESULTS.json [--devices cuda:0,cuda:1] [--kinds …] [--sizes 4544x4544 …]  # on a GPU
    python bench/tiles.py compare RESULTS.json                                                              # anywhere

`linear` and `gated` are products of one row, `skinny_linear` of 8 and `skinny_linear_32` of 32; of these torch's own
product is timed beside the tiles.

A product runs in a chain of launches inside a graph, as in a step: each waits for the one before it, with its own
first weights on their way, and the copies of the weight are together larger than the L2 cache. The tiles of a size are
timed in turn, replay by replay; the best eight and the rule's once more, and the median is kept. Gated products and
those with more rows than columns have the RMSNorm before them, the others a residual behind. Kernels compile in as
many processes as there are cores, one for each size.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rewrite.runtime.core.tiles import rule

Tile = tuple[int, ...]

SIZES = {
    "linear": """
640x2560 768x2560 1024x1024 1024x4096 1152x1024 1152x6912 1280x1280 1280x5120 1536x1152 1536x1536 1536x8960 2048x1024
2048x2048 2048x4096 2048x5632 2048x6144 2048x8192 2048x11008 2304x2048 2304x9216 2560x2560 2560x6400 2560x12288
2880x4096 3072x1024 3072x3072 3072x8192 3072x12288 3840x3840 3840x11008 4096x1024 4096x2304 4096x4096 4096x13696
4096x14336 4544x4544 4544x18176 4672x4544 5120x1280 5120x5120 5120x8192 5632x1408 6144x2048 6144x4096 8192x2048
8512x2048 9216x3072 11520x3840 12288x3072 18176x4544 32000x4096 50304x2048 151936x1536 262144x1152
""",
    "gated": """
512x1536 512x2048 1024x4096 2816x1024 4096x2048 5632x2048 6144x2048 6400x2560 6912x1152 8192x2048 8192x3072 8960x1536
9216x2304 11008x2048 11008x3840 12288x2560 13696x4096 14336x4096 16384x2048 18432x7168
""",
}
"""Rows (of each half, where products are gated) and columns."""
SEVERAL = """
768x3072 1024x1024 1024x4096 1152x6912 1280x1280 1280x5120 1536x1152 1536x1536 1536x8960 2048x1536 2048x2048 2048x6144
2048x8192 2304x768 2304x9216 3072x768 3072x1024 3072x2048 3072x3072 3072x8192 3840x1280 4096x1024 4096x2048 4096x2304
4096x4096 4096x14336 4544x18176 4672x4544 5120x1280 6144x4096 9216x3072 12288x2048 13824x1152 16384x2048 17920x1536
18432x2304 28672x4096 50304x2048 151936x1536
"""
SIZES |= {"skinny_linear": SEVERAL, "skinny_linear_32": SEVERAL}
COUNTS = {"skinny_linear": 8, "skinny_linear_32": 32}
"""Rows of the input, by kind; one for the others."""
TORCHS = "torch"
"""Its own product among the tiles."""
SHARED = 220 << 10
"""Bytes of a processor's memory that the tiles in flight may fill."""
PROCESSORS = 132
"""Of the H100 that the rule was found on."""
ROWS, COLUMNS, WARPS = (1, 2, 4, 8), (256, 512, 1024, 2048, 4096), (1, 2, 4, 8)
MOST_BLOCKS = 24
LEAST, MOST = 8, 64
"""Numbers of a weight that a thread loads at once."""
ROTATED_BYTES = 170 << 20
GRAPH_US = 600.0
SCREENED, TIMED, FINALISTS = 4, 15, 8


def candidates(kind: str, rows: int, cols: int) -> list[Tile]:
    """The rule's tile and those that may be better."""
    halves = 1 if kind == "linear" else 2
    found: set[Tile] = {rule(kind, rows, cols, 2, PROCESSORS)}
    for tile in itertools.product(ROWS, COLUMNS, WARPS):
        block_rows, block_cols, warps = tile
        blocks = -(-cols // block_cols)
        fits = rows % block_rows == 0 and blocks <= MOST_BLOCKS and 2 * blocks * block_cols <= 3 * cols
        if fits and LEAST <= block_rows * block_cols * halves // (32 * warps) <= MOST:
            found.add(tile)
    return sorted(found)


def several(kind: str, rows: int, cols: int) -> list[Tile]:
    """The rule's tile of a product of several rows and those that may be better."""
    found: set[Tile] = {rule(kind, rows, cols, 2, PROCESSORS)}
    for block_rows, block_cols, warps in itertools.product((32, 64, 128), (128, 256), (4, 8)):
        blocks = -(-rows // block_rows)
        wanted = {1, *(round(part * PROCESSORS / blocks) for part in (1, 2))}
        stages = min(8, SHARED // (2 * block_cols * (block_rows + max(16, COUNTS[kind]))))
        for splits in sorted(split for split in wanted if 1 <= split <= min(12, cols // (2 * block_cols))):
            tiles = -(-cols // (block_cols * splits))
            numbers, depth = block_rows * block_cols // (32 * warps), min(stages, tiles)
            if depth > 1 and 32 <= numbers <= 128 and blocks * splits >= PROCESSORS // 4:
                found.add((block_rows, block_cols, warps, splits, depth))
    return sorted(found)


def measured(kind: str, size: str, device: int) -> dict[str, Any]:
    """Time the tiles of one size, in a process of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
    import fcntl

    import torch
    from triton.runtime.errors import OutOfResources

    from rewrite.runtime.core.launch import rehearsing
    from rewrite.runtime.products.prologue import Prologue

    linear = importlib.import_module("rewrite.runtime.products.one_row")
    skinny = importlib.import_module("rewrite.runtime.products.skinny")
    rows, cols = map(int, size.split("x"))
    outputs, count = 2 * rows if kind == "gated" else rows, COUNTS.get(kind, 1)

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, out = tensor(count, 1, cols), tensor(count, 1, rows)
    norm = Prologue(tensor(cols), 1e-5) if kind == "gated" or rows > cols else None
    residual = tensor(count, 1, rows) if norm is None else None

    def run(weight: Any, tile: Tile) -> None:
        if tile == (0,):
            torch.nn.functional.linear(x, weight)
        elif count > 1:
            skinny.launch_skinny_linear(x, weight, None, norm, residual, out, tile)
        elif kind == "linear":
            linear.launch_linear(x, linear.Weight(weight), None, norm, residual, out, tile)
        else:
            linear.launch_gated(x, linear.Weight(weight), None, "silu", norm, out, tile)

    tiles = candidates(kind, rows, cols) if count == 1 else [(0,), *several(kind, rows, cols)]
    first = tensor(outputs, cols)
    for tile in [*tiles]:
        try:
            with rehearsing():
                run(first, tile)
        except OutOfResources:
            tiles.remove(tile)
    moved = 2 * outputs * cols
    with Path(tempfile.gettempdir(), f"rewrite-tiles-{device}").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # one process measures at a time
        copies = max(2, min(48, -(-ROTATED_BYTES // moved)))
        weights = [first, *(tensor(outputs, cols) for _ in range(copies - 1))]
        launches = max(copies, min(64, int(GRAPH_US / max(2.0, moved / 3e6))))
        graphs = {tile: torch.cuda.CUDAGraph() for tile in tiles}
        for tile, graph in graphs.items():
            with torch.cuda.graph(graph):
                for number in range(launches):
                    run(weights[number % copies], tile)

        def timed(tile: Tile) -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[tile].replay()
            stop.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(stop)) * 1e3 / launches

        def medians(of: Sequence[Tile], turns: int) -> dict[Tile, float]:
            values = [[timed(tile) for tile in of] for _ in range(turns + 1)][1:]
            return {
                tile: statistics.median(column) for tile, column in zip(of, zip(*values, strict=True), strict=True)
            }

        us = medians(tiles, SCREENED)
        again = {*sorted(us, key=us.__getitem__)[:FINALISTS], rule(kind, rows, cols, 2, PROCESSORS)}
        us |= medians(sorted(again), TIMED)
    return {"kind": kind, "size": size, "bytes": moved, "us": {named(tile): round(t, 3) for tile, t in us.items()}}


def named(tile: Tile) -> str:
    """A tile as JSON has it."""
    return TORCHS if tile == (0,) else ",".join(map(str, tile))


def measure(given: argparse.Namespace) -> None:
    """Time every size, and keep what there is."""
    sizes = [(kind, size) for kind, of_kind in SIZES.items() for size in of_kind.split()]
    sizes = [(kind, size) for kind, size in sizes if not given.sizes or size in given.sizes]
    sizes = [(kind, size) for kind, size in sizes if kind in given.kinds]
    sizes.sort(key=lambda task: -int(task[1].partition("x")[2]))  # what compiles longest goes first
    devices = [int(device.partition(":")[2] or 0) for device in given.devices.split(",")]
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        tasks = [
            pool.submit(measured, kind, size, devices[at % len(devices)]) for at, (kind, size) in enumerate(sizes)
        ]
        for task in as_completed(tasks):
            rows.append(task.result())
            print(line(rows[-1]), flush=True)
            given.results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def lost(row: dict[str, Any]) -> float | None:
    """How many times as long as the best tile of a size the rule's takes; None where that was not timed."""
    rows, cols = map(int, row["size"].split("x"))
    us: dict[str, float] = row["us"]
    own = us.get(named(rule(row["kind"], rows, cols, 2, PROCESSORS)))
    ours = [time for tile, time in us.items() if tile != TORCHS]
    return None if own is None else own / min(ours)


def line(row: dict[str, Any]) -> str:
    """One size."""
    rows, cols = map(int, row["size"].split("x"))
    ours = {tile: time for tile, time in row["us"].items() if tile != TORCHS}
    best = min(ours, key=ours.__getitem__)
    factor = lost(row)
    said = "not timed" if factor is None else f"{factor:.2f} times the best"
    tile = named(rule(row["kind"], rows, cols, 2, PROCESSORS))
    other = f", torch's {row['us'][TORCHS]:.2f} us" if TORCHS in row["us"] else ""
    return f"{row['kind']:16} {row['size']:12} rule {tile:14} {said:21} best {best:14} {ours[best]:7.2f} us{other}"


def compare(given: argparse.Namespace) -> None:
    """Print how far the rule, as it is now, is from the best of what was timed."""
    rows = json.loads(given.results.read_text("utf-8"))
    for row in sorted(rows, key=lambda row: (row["kind"], -(lost(row) or 0.0))):
        print(line(row))
    for kind in sorted({row["kind"] for row in rows}):
        factors = [factor for row in rows if row["kind"] == kind and (factor := lost(row)) is not None]
        mean = math.exp(statistics.mean(map(math.log, factors)))
        print(f"{kind}: {len(factors)} sizes, geometric mean {mean:.3f}, at most {max(factors):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, comparing = commands.add_parser("measure"), commands.add_parser("compare")
    for command in (measuring, comparing):
        command.add_argument("results", type=Path)
    measuring.add_argument("--devices", default="cuda:0")
    measuring.add_argument("--sizes", nargs="+", default=())
    measuring.add_argument("--kinds", nargs="+", choices=SIZES, default=("linear", "gated"))
    given = parser.parse_args()
    (measure if given.command == "measure" else compare)(given)


if __name__ == "__main__":
    main()
