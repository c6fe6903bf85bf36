"""Rewrites respelled modeling files and verifies them: against the original as transformers has it.

    python -m tests.metamorphic.verified [MODEL ...] [--each 3] [--rows DIR]

What passes proves two things at once: the respelling kept the meaning, and so did the rewriting of it. A line a pair;
the exit code is 1 if one fails. A run that is started again with the same rows goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rewrite.benchmark.rungs import write
from rewrite.codemod.build import build
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import Source, resolve
from rewrite.transforms import select
from rewrite.verify import Options as Checks
from rewrite.verify import verify

from .matrix import turned
from .rewriting import respell
from .rewritings import all_rewritings

SITES = Path(__file__).parents[2] / "fixtures" / "sites.json"
PINNED = tuple(sorted({model for models in json.loads(SITES.read_text("utf-8")).values() for model in models}))
"""The models whose sites are counted for each version."""
QUICK = Checks(quick=True, compile=False, clean_process=False, others=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.metamorphic.verified", description=__doc__)
    parser.add_argument("models", nargs="*", default=PINNED)
    parser.add_argument("--each", type=int, default=3, help="respellings a file, of those that change something")
    parser.add_argument("--rows", type=Path, default=Path("build/verified"))
    options = parser.parse_args(arguments)
    options.rows.mkdir(parents=True, exist_ok=True)
    failed = 0
    for model in options.models:
        source = resolve(model)
        for name, places, text in _respelled(source, options.each):
            kept = options.rows / f"{model}.{name}.json"
            if not kept.exists():
                kept.write_text(json.dumps({"model": model, "places": places, **_verified(source, text)}) + "\n")
            row = json.loads(kept.read_text())
            failed += not row["passed"]
            print(f"{model:12} {name:28} {places:4} places {'passed' if row['passed'] else row['reason']}", flush=True)
    return 1 if failed else 0


def _respelled(source: Source, each: int) -> list[tuple[str, int, str]]:
    """Respellings of a file; where weights or arguments get other names, the original cannot stand beside it."""
    found: list[tuple[str, int, str]] = []
    kept = tuple(name for name, rewriting in all_rewritings().items() if rewriting.keeps_names)
    for name in turned(kept, source.path.name):
        respelled = respell(source.text, all_rewritings()[name])
        if respelled.places:
            found.append((name, respelled.places, respelled.text))
        if len(found) == each:
            break
    return found


def _verified(source: Source, text: str) -> dict[str, object]:
    transforms, started = select(), time.process_time()
    built = build(replace(source, text=text), transforms)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / f"respelled_{time.time_ns()}"
        write(assemble(built, transforms, Options((), ()), folder), folder)
        verdict = verify(source.path, folder, QUICK)
    sites = sum(len(report.rewritten) for report in built.rewritten.transforms)
    checks = sum(check.status == "passed" for gate in verdict.gates for check in gate.checks)
    return {
        "passed": verdict.passed, "reason": verdict.reason, "sites": sites, "checks": checks,
        "seconds": round(time.process_time() - started, 1),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
