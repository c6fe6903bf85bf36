"""What ran on the emulator: `python -m tests.emulator.results FILE…` prints a table of kernels and chips.

The files are those of `pytest --emulate CHIP --emulate-results FILE`. With `--choose` the cheapest test of each kernel
is written to `SAMPLE`, which `test_emulated_kernels.py` runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rewrite.kernels.kernel_run import known_kernels

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "fixtures/kernels/emulated.json"
"""A test for each kernel."""
ENOUGH = 100_000
"""Instructions of a test of the sample: half a second."""
NVIDIA = {
    "integer_skinny": "NVIDIA's matrix instructions, by the words that a thread has",
    "mxfp4_down": "NVIDIA's matrix instructions that sum up for each thread",
    "mxfp4_gate_up": "NVIDIA's matrix instructions that sum up for each thread",
    "shared_sum": "peer memory of NVIDIA's cards",
}
"""Kernels that no AMD chip launches, and what for."""


def run_as(module: str) -> None:
    """Run the command of a module of this folder, by the name under which pytest's files import it."""
    sys.path.insert(0, str(ROOT / "tests"))
    importlib.import_module(f"emulator.{module}").main()


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of files of results."""
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a row for each kernel: how many tests launched it on each chip, and how many of these failed."""
    chips = sorted({one["chip"] for one in results})
    passed: dict[str, Counter[str]] = defaultdict(Counter)
    failed: dict[str, Counter[str]] = defaultdict(Counter)
    for one in results:
        for kernel in one["kernels"] if one["outcome"] != "skipped" else ():
            (passed if one["outcome"] == "passed" else failed)[kernel][one["chip"]] += 1
    lines = [f"| kernel | {' | '.join(chips)} |", "|---" * (len(chips) + 1) + "|"]
    for kernel in known_kernels():
        cells = [_cell(kernel, passed[kernel][chip], failed[kernel][chip]) for chip in chips]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(kernel: str, passed: int, failed: int) -> str:
    if kernel in NVIDIA:
        return "–"
    return f"{passed} right" + (f", {failed} wrong" if failed else "") if passed or failed else "not run"


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return a line for each chip, and why tests were skipped."""
    lines = []
    for chip in sorted({one["chip"] for one in results}):
        mine = [one for one in results if one["chip"] == chip]
        outcomes = Counter(one["outcome"] for one in mine)
        count = sum(one["instructions"] for one in mine)
        lines.append(f"{chip}: {dict(outcomes)}, {count} instructions")
        lines += [
            f"  {number} {why}" for why, number in Counter(o["why"] for o in mine if o["outcome"] == "skipped").items()
        ]
        lines += [f"  FAILED {one['test']}" for one in mine if one["outcome"] == "failed"]
    return "\n".join(lines)


def choose(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return for each kernel the longest test that launches it and takes a second or so, or else the shortest.

    Of kernels whose programs count themselves one in which they do.
    """
    found: dict[str, dict[str, Any]] = {}

    def rank(one: dict[str, Any]) -> tuple[bool, int, str]:
        count = one["instructions"]
        return count > ENOUGH, count if count > ENOUGH else -count, one["test"]

    passed = sorted((one for one in results if one["outcome"] == "passed"), key=rank)
    for name in ("counting", "kernels"):
        for one in passed:
            for kernel in one.get(name, ()):
                found.setdefault(kernel, one)
    wanted = set(known_kernels()) - NVIDIA.keys()
    return {kernel: one["test"] for kernel, one in sorted(found.items()) if kernel in wanted}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--choose", action="store_true", help=f"write {SAMPLE.relative_to(ROOT)}")
    given = parser.parse_args()
    results = read(given.files)
    if given.choose:
        SAMPLE.write_text(json.dumps(choose(results), indent=1) + "\n", encoding="utf-8")
    print(table(results))
    print(summary(results))


if __name__ == "__main__":
    run_as("results")
