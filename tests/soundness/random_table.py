"""Counts how many random modules are rewritten wrongly: `python -m soundness.random_table 200 [transform]`."""

from __future__ import annotations

import sys
from collections import Counter
from time import process_time

from hypothesis import HealthCheck, Phase, given, settings

from rewrite.transforms import select
from soundness.case import Case
from soundness.compare import examine_quickly
from soundness.places import PLACES


def survey(name: str, examples: int) -> tuple[Counter[str], str]:
    """Return how many modules were rewritten and how many wrongly, and the shortest wrong one."""
    transforms = select((name, *PLACES[name].also))
    counts: Counter[str] = Counter()
    shortest = ""

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
        derandomize=True,
    )
    @given(PLACES[name].cases)
    def examined(case: Case) -> None:
        nonlocal shortest
        verdict = examine_quickly(case, transforms, name)
        counts["examples"] += 1
        counts["rewritten"] += name in verdict.sites
        if verdict.difference:
            counts["wrong"] += 1
            text = f"{verdict.difference}\n{case.text}"
            shortest = text if not shortest or len(text) < len(shortest) else shortest

    examined()
    return counts, shortest


def main(examples: str, wanted: str = "") -> None:
    """Print one row a transform, and the shortest wrong module of each to the file of errors."""
    print("| transform | modules | rewritten | wrong | ms each |\n|---|---|---|---|---|")
    for name in sorted(PLACES):
        if wanted in name:
            start = process_time()
            counts, shortest = survey(name, int(examples))
            each = 1000 * (process_time() - start) / counts["examples"]
            columns = [str(counts[key]) for key in ("examples", "rewritten", "wrong")]
            print(f"| {name} | {' | '.join(columns)} | {each:.0f} |", flush=True)
            print(f"=== {name}\n{shortest}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
