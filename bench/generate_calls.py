"""`generate()` of packages in calls drawn by seed, against their originals.

    python bench/generate_calls.py PACKAGE... [--calls 2000] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

from rewrite.benchmark.benchmark_models import lock_of
from rewrite.verify import Options
from rewrite.verify.generation.drawn_calls import unknown
from rewrite.verify.generation.drawn_comparison import Comparison, Difference
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.runner import settled

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    for package in given.packages:
        options = Options(quick=True)
        with settled(options):
            module = lock_of(package)["source"]["module"]
            sides = [loaded_sides.load(loaded_sides.locate(side)) for side in (module, package)]
            main = find_subjects(*sides).main
            bench = Workbench(main, small_variants(main.original, main.causal, options.config), options)
            print(package, main.name, unknown(main.original), flush=True)
            started = time.perf_counter()
            comparison = Comparison(bench, bench.base)
            def tell(seed, found):
                print(f"  call {seed}: {found}", flush=True)
            found = comparison.run(range(given.seed, given.seed + given.calls), tell)
            print(comparison.sides.dtype, comparison.sides.wide, comparison.figures, f"{time.perf_counter()-started:.0f} s", len(found), "differences", flush=True)

main()
