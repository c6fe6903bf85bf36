"""`gemm.json` as tables for aiter: which products torch is to compute, and which ones its own tuner is to look at.

aiter reads a CSV of tuned products when it is imported, and rewrites a file that has two rows of one shape; so a shape
stands here once, the faster row of two. A solution index belongs to one build of a library and is measured by aiter's
tuner alone: nothing here invents one. What the vendor's library won is a tuned row (`libtype` torch), everything else
goes to the tuner as a shape.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.launching.card_tables import GEMM
from rewrite.errors import UsageError

from .product_tiles import VENDOR

TUNED = (
    "gfx", "cu_num", "M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle", "libtype", "solidx",
    "splitK", "us", "kernelName", "err_ratio", "tflops", "bw",
)  # fmt: skip
SHAPES = ("M", "N", "K", "bias", "dtype", "outdtype", "scaleAB", "bpreshuffle")
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True, order=True)
class Shape:
    """The key of a row; fields in the order of the columns."""

    M: int
    N: int
    K: int
    bias: bool
    dtype: str

    @classmethod
    def of(cls, size: str) -> Shape:
        """Read `128x4096x4096 bfloat16 bias`."""
        sizes, dtype, *rest = size.split()
        m, n, k = map(int, sizes.split("x"))
        return cls(m, n, k, bool(rest), dtype)

    def cells(self) -> tuple[Any, ...]:
        """The cells of `SHAPES`."""
        kind = f"torch.{self.dtype}"
        return self.M, self.N, self.K, self.bias, kind, kind, False, False


@dataclass(frozen=True)
class Tables:
    """Two CSV files as text."""

    tuned: str
    shapes: str


def export(folder: Path) -> Tables:
    """Return the tables for `gemm.json` of a folder.

    Raises:
        UsageError: there is none, or it has no product that aiter could compute.
    """
    path = folder / GEMM
    if not path.is_file():
        raise UsageError(f"there is no {path}: `rewrite tune DIR --products` measures one.")
    tables = tables_of(json.loads(path.read_text(encoding="utf-8")))
    if tables.shapes.count("\n") < 2 and tables.tuned.count("\n") < 2:
        raise UsageError(
            f"{path} has no product in 16 bits that was measured on an AMD card or that torch should not compute."
        )
    return tables


def tables_of(content: Mapping[str, Any]) -> Tables:
    """Return the tables for the content of a `gemm.json`."""
    tuned: dict[tuple[str, int, Shape], float] = {}
    shapes: set[Shape] = set()
    for chip in content.values():
        for size, entry in chip["products"].items():
            shape = Shape.of(size)
            if shape.dtype not in HALVES:
                continue
            if entry["path"] == VENDOR and "gfx" in chip:
                key = (str(chip["gfx"]), int(chip["cu_num"]), shape)
                tuned[key] = min(tuned.get(key, float("inf")), float(entry["us"][VENDOR]))
            elif entry["path"] != VENDOR:
                shapes.add(shape)
    rows = (_tuned_row(gfx, units, shape, us) for (gfx, units, shape), us in sorted(tuned.items()))
    return Tables(_csv(TUNED, rows), _csv(SHAPES, (shape.cells() for shape in sorted(shapes))))


def _tuned_row(gfx: str, units: int, shape: Shape, us: float) -> tuple[Any, ...]:
    flops = 2 * shape.M * shape.N * shape.K
    moved = 2 * (shape.M * shape.K + shape.N * shape.K + shape.M * shape.N)
    tflops, gigabytes = flops / us / 1e6, moved / us / 1e3
    return gfx, units, *shape.cells(), "torch", 0, 0, f"{us:.4f}", "", 0.0, f"{tflops:.2f}", f"{gigabytes:.2f}"


def _csv(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
