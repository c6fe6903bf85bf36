"""Packages that are right, verified with many seeds: every check that fails is a false alarm.

    python bench/false_alarms.py [MODEL ...] [--seeds 20] [--first-seed 0] [--quick] [--checks CHECK ...]
                                 [--device cpu] [--jobs 2] [--limit-seconds S] [--rows DIR]

Each verification is whole (all its gates but latency, whatever fails before), but for what no seed changes: the
process of its own that imports the package, and the count of the lines that run. With `--rows` a later call goes on
where this one stops.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

from trials import Row, Tell, Trial, arguments_of, original, packages, results

from rewrite.verify import Options, verify

MODELS = (
    "llama", "qwen3_moe", "gemma2", "bert", "t5", "qwen3_next", "mixtral", "phi3", "olmo2", "gpt_neox", "bart", "vit",
)  # fmt: skip


def verified(model: str, package: Path, options: Options, tell: Tell) -> Row:
    """Verify a package, and name the checks that fail."""
    verdict = verify(original(model), package, options, tell)
    checks = [check for gate in verdict.gates for check in gate.checks]
    failed = [f"{check.name}: {check.detail}" for check in checks if check.status == "failed"]
    count = sum(check.status == "passed" for check in checks)
    return {
        "status": "passed" if verdict.passed else "failed",
        "by": verdict.reason,
        "failed": failed,
        "checks": count,
    }


def trials(options: argparse.Namespace, folder: Path) -> list[Trial]:
    """Every model with one seed, then with the next."""
    made = packages(options.models, folder / "packages", options.jobs)
    found = []
    for seed in range(options.first_seed, options.seeds):
        how = Options(
            device=options.device, seed=seed, quick=options.quick, keep_going=True, clean_process=False, reach=False,
            gates=("structure", "parity", "generation"), checks=tuple(options.checks),
        )  # fmt: skip
        for model, package in made.items():
            about = {"model": model, "seed": seed}
            found.append(Trial(f"{model}-{seed}", partial(verified, model, package, how), about))
    return found


def table(rows: list[Row]) -> str:
    """The counts by model, and what failed."""
    lines = ["| | seeds | checks that passed | false alarms | processor seconds each |", "|---|---|---|---|---|"]
    for model in sorted({row["model"] for row in rows}):
        own = [row for row in rows if row["model"] == model]
        alarms = sum(row["status"] != "passed" for row in own)
        seconds = sum(row.get("processor", 0) for row in own) / len(own)
        lines.append(f"| {model} | {len(own)} | {sum(r.get('checks', 0) for r in own)} | {alarms} | {seconds:.0f} |")
    alarms = [row for row in rows if row["status"] != "passed"]
    said = [
        f"{row['model']}, seed {row['seed']}: {text}" for row in alarms for text in row.get("failed") or [row["by"]]
    ]
    return "\n".join([*lines, *said])


def main() -> None:
    """Verify, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checks", nargs="+", metavar="CHECK", default=[], help="no others: those that are new, say")
    options = arguments_of(parser)
    deadline = time.monotonic() + options.limit_seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.rows or Path(temporary)
        found, rows = trials(options, folder), []
        for row in results(found, folder / "false_alarms", options.jobs, deadline):
            rows.append(row)
            print(f"{row['status']:<9} {row['seconds']:4.0f} s  {row['model']}, seed {row['seed']}", flush=True)
    alarms = sum(row["status"] != "passed" for row in rows)
    print(
        table(rows), f"{alarms} of {len(rows)} verifications raise a false alarm, of {len(found)} asked for", sep="\n"
    )


if __name__ == "__main__":
    main()
