"""`generate()` of packages in calls drawn by seed, against their originals, on a CPU.

    python bench/generate_calls.py PACKAGE... [--calls 2000] [--seed 0] [--with NAME] [--others]

Calls are those of `rewrite/verify/drawn`. A package is another process, so that one that crashes is a row and not the
end. For each class with a decode loop the table says how many calls were compared, for which the original raises,
which the rewritten side left to the original's loop, whose tokens the host chose over its steps, and what differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rewrite.benchmark.benchmark_models import lock_of
from rewrite.verify import Options
from rewrite.verify.drawn.call_strategies import NOT_DRAWN, unknown
from rewrite.verify.drawn.drawn_calls import DrawnCall
from rewrite.verify.drawn.drawn_comparison import Comparison
from rewrite.verify.generation.loop_checks import SWITCH
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects
from rewrite.verify.runner import settled

TRIED = 400
"""Smaller calls that are tried of one that differs, at most."""
HEAD = "| class | calls | raise in both | by the original's loop | tokens by the host | rounded | differences | s |"


def shares(counts: Counter[str], calls: int) -> str:
    """What of all calls was counted, and the reasons."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common(6))
    return f"{100 * counts.total() / max(calls, 1):.0f}%: {reasons}" if counts else "0%"


def compare(package: Path, given: argparse.Namespace) -> None:
    """Print the row of each class of a package, and what differs as it is found."""
    options = Options(quick=True)

    def wanted(call: DrawnCall) -> bool:
        return not given.named or bool({*call.settings, *call.given} & {*given.named})

    with settled(options):
        source = lock_of(package)["source"]
        upstream = source["module"] or str(package / source["target"])
        subjects = find_subjects(*(loaded_sides.load(loaded_sides.locate(side)) for side in (upstream, package)))
        for subject in (subjects.main, *(subjects.others if given.others else ())):
            if not hasattr(subject.rewritten, SWITCH):
                continue
            started = time.perf_counter()
            variants = small_variants(subject.original, subject.causal, options.config)
            comparison = Comparison(Workbench(subject, variants, options), variants[0], TRIED)
            found = 0
            for difference in comparison.differences(range(given.seed, given.seed + given.calls), wanted):
                found += 1
                print(f"{subject.name}: {difference}", flush=True)
            figures, seconds = comparison.figures, time.perf_counter() - started
            parts = [shares(part, figures.calls) for part in (figures.raised, figures.refused, figures.host)]
            row = [subject.name, figures.calls, *parts, figures.rounded, found, f"{seconds:.0f}"]
            print(f"| {' | '.join(map(str, row))} |", flush=True)


def main() -> int:
    """Compare, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first call")
    parser.add_argument("--with", dest="named", nargs="*", default=(), help="calls that set one of these names alone")
    parser.add_argument("--others", action="store_true", help="classes beside the main one too")
    given = parser.parse_args()
    print("not drawn: " + "; ".join(f"{name}, which {why}" for name, why in sorted(NOT_DRAWN.items())))
    print(f"of which nothing is known: {', '.join(unknown()) or 'none'}\n\n{HEAD}\n|---|---|---|---|---|---|---|---|")
    broken = 0
    for package in given.packages:
        process = multiprocessing.get_context("fork").Process(target=compare, args=(package, given))
        process.start()
        process.join()
        broken += process.exitcode != 0
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
