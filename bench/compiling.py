"""Seconds to compile the kernels of a prompt and a step side by side, by how many are in the compiler at a time.

    python bench/compiling.py [--target sm_90] [--at-a-time 1,2,4,6,12] [--rounds 3]

Needs no GPU: Triton compiles for the chip named, without the functions that would launch the kernels, which another
compiler builds. Kernels are those of the catalogue of `python -m rewrite.kernels`, in its order and, as
`compile_ahead` takes them, long ones first. Each cell is the median of the rounds; the cache on disk is empty.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KERNELS = (
    "rms_norm", "gated_activation", "rotary", "rotary_rows", "linear", "skinny_linear", "gated", "qkv", "rope_cache",
    "decode_attention", "best_of_block", "take_best",
)  # fmt: skip


def launches(arch: str) -> list[Any]:
    """One launch of each kernel, as on a chip."""
    from hf_rewrite_runtime.launching import launch
    from rewrite.kernels.chips import CHIPS
    from rewrite.kernels.compile_work import pretended

    pretended(CHIPS[arch], launch)
    catalogue = importlib.import_module("rewrite.kernels.catalogue")
    cases = importlib.import_module("rewrite.kernels.kernel_cases")
    first = {entry.kernel: entry.launch for entry in reversed(cases.entries(catalogue.cases()))}
    return [first[kernel] for kernel in KERNELS]


def seconds(jobs: Sequence[Any], at_a_time: int) -> float:
    """Compile all of them once, from nothing."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    for job in jobs:
        job.kernel.jit_function.device_caches.clear()
    started = time.perf_counter()
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(lambda job: job(), jobs))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--at-a-time", default="1,2,4,6,12")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    jobs = launches(given.target)
    jobs[0]()  # loads the compiler
    orders = {"catalogue": jobs, "long first": sorted(jobs, key=lambda job: job.length, reverse=True)}
    print(f"{len(jobs)} kernels for {given.target}, {os.cpu_count()} cores\n{'at a time':>9}  " + "  ".join(orders))
    for number in map(int, given.at_a_time.split(",")):
        medians = [statistics.median(seconds(order, number) for _ in range(given.rounds)) for order in orders.values()]
        cells = (f"{value:>{len(name) - 2}.2f} s" for name, value in zip(orders, medians, strict=True))
        print(f"{number:>9}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
