"""The table of docs/gemm.md from bench/results/gemm-h100.json: `python bench/gemm_table.py`, or with `--check`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path("bench/results/gemm-h100.json")
PAGE = Path("docs/gemm.md")
START, END = "<!-- gemm: generated -->\n", "<!-- gemm: end -->"
PEAK = 3.35e12
"""Bytes a second of an H100 SXM, by its data sheet."""
LAYERS = ("qkv", "gate-up", "down", "o")


def text(record: dict[str, Any]) -> str:
    """Return what stands between the marks."""
    results = sorted(record["results"], key=_place)
    slower = [result for result in results if result["ratio"] < 1]
    copy = record["copy_bytes_per_s"]
    lines = [
        f"Made by `python bench/gemm.py --json gemm.json` ({record['device']}; bf16; medians of graphs over copies of",
        "the weight, contenders in turn, each checked against fp32). Microseconds a call; cuBLAS is the faster of",
        "torch's two ways to it (cuBLAS, cuBLASLt). Ours overlaps with the kernel before it, as in a decode step;",
        f'"alone" it does not. The last two columns are shares of {PEAK / 1e12:.2f} TB/s and of a 1 GiB copy',
        f"({copy / 1e12:.2f} TB/s, read and written). Slower than cuBLAS: {len(slower)} of {len(results)}.",
        "",
        "| Llama | layer | weight | M | cuBLAS | ours | alone | times as fast | form | of peak | of copy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_row(result, copy) for result in results),
        "",
        "A form is `rows/columns/warps` of the weight for one row, and `rows/columns/warps/splits/stages` otherwise.",
    ]
    return "\n".join(lines) + "\n"


def _place(result: dict[str, Any]) -> tuple[Any, ...]:
    case = result["case"]
    return float(case["model"].rstrip("B")), LAYERS.index(case["layer"]), case["rows"]


def _row(result: dict[str, Any], copy: float) -> str:
    case, us = result["case"], result["us"]
    moved = 2 * (case["outputs"] * case["inputs"] + case["rows"] * (case["inputs"] + case["outputs"]))
    rate = moved / (us["ours"] * 1e-6)
    form = "/".join(str(part) for part in result["form"][:5])
    return (
        f"| {case['model']} | {case['layer']} | {case['outputs']}x{case['inputs']} | {case['rows']} "
        f"| {min(us['cublas'], us['cublaslt']):.2f} | {us['ours']:.2f} | {us['alone']:.2f} | {result['ratio']:.2f} "
        f"| {form} | {rate / PEAK:.0%} | {rate / copy:.0%} |"
    )


def main(check: bool) -> int:
    """Write the table; with `check`, only say whether it is out of date."""
    page = PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(START)
    tail = rest.partition(END)[2]
    wanted = f"{head}{START}{text(json.loads(RESULTS.read_text(encoding='utf-8')))}{END}{tail}"
    if check:
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
