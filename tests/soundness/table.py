"""Writes which cases compute something else, by the transform that is to blame: `python -m soundness.table`."""

from __future__ import annotations

import re
import sys
from collections import defaultdict

from rewrite.codemod.passes import rewrite_text
from rewrite.transform import Transform
from soundness.case import Case, cases
from soundness.compare import Verdict, all_transforms, difference_of, examine


def culprits(case: Case, verdict: Verdict, transforms: list[Transform]) -> list[str]:
    """Return the transforms without any of which the case is sound; all that rewrote where no single one is."""
    alone = []
    for name in verdict.sites:
        rewritten = rewrite_text(case.text, [t for t in transforms if t.name != name])
        if rewritten.sites == 0 or not difference_of(case, list(verdict.original), rewritten.text):
            alone.append(name)
    return alone or list(verdict.sites)


def main(wanted: str = "") -> None:
    """Examine every case whose name contains `wanted` and print the table as Markdown."""
    transforms = all_transforms()
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    counts = {"cases": 0, "rewritten": 0, "wrong": 0, "invalid": 0, "twins missed": 0}
    for case in cases():
        if wanted not in case.name:
            continue
        counts["cases"] += 1
        verdict = examine(case, transforms)
        counts["rewritten"] += bool(verdict.sites)
        if (raised := verdict.original[0].raised) != case.raises:
            counts["invalid"] += 1
            found["invalid"].append((case.name, f"the original raises {raised or 'nothing'}"))
        if not {*filter(None, case.must_rewrite.split(", "))} <= {*verdict.sites}:
            counts["twins missed"] += 1
            found["twins missed"].append((case.name, case.must_rewrite))
        if verdict.difference:
            counts["wrong"] += 1
            for name in culprits(case, verdict, transforms) or ["the engine"]:
                found[name].append((case.name, verdict.difference))
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    for name, rows in sorted(found.items()):
        silent = sum("raises" not in difference for _, difference in rows)
        print(f"\n## {name}: {len(rows)}, {silent} of them silently\n\n| case | what differs |\n|---|---|")
        for title, difference in rows:
            print(f"| {title} | {_short(difference)} |")


def _short(difference: str) -> str:
    return re.sub(r" strides .*? instead of .*", " has other values", difference.splitlines()[0]).replace("|", "/")


if __name__ == "__main__":
    main(*sys.argv[1:])
