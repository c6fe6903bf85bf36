"""Bugs planted by hand into what was generated, and whether `verify` catches each, by the gate that should.

    python bench/planted.py [MODEL ...] [--bugs FILE …] [--name PART] [--full] [--seed 0]
                            [--device cpu] [--jobs 2] [--limit-seconds S] [--rows DIR]

The bugs are data: every tuple of `Bug` in tests/verify/<bugs>.py. Those of `argument_bugs` show in what `forward` is
given and returns, those of `config_bugs` away from the values that small configurations have by default; those of
`generation_bugs` name the check that has to catch them, which runs alone. Each model
is rewritten once; each bug is planted into a copy of that package and verified in a process of its own, until its
first failed check. With `--rows` a later call goes on where this one stops.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from trials import Row, Tell, Trial, arguments_of, judged, packages, results

from rewrite.verify import Options

ROOT = Path(__file__).resolve().parent.parent


def bugs_of(name: str) -> list[Any]:
    """The bugs of a file of tests/verify, each once."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(f"tests.verify.{name}")
    bug_class = importlib.import_module("tests.verify.bugs").Bug
    lists = [value for value in vars(module).values() if isinstance(value, tuple)]
    return list(dict.fromkeys(bug for found in lists for bug in found if isinstance(bug, bug_class)))


def tried(bug: Any, package: Path, options: Options, tell: Tell) -> Row:
    """Verify a copy of a package with a bug planted into it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / package.name
        shutil.copytree(package, copy)
        plant = importlib.import_module("tests.verify.copies").plant
        for name, old, new in ((bug.file or f"modeling_{bug.model}.py", bug.old, bug.new), *getattr(bug, "also", ())):
            try:
                plant(copy, name, old, new, bug.count)
            except AssertionError as error:
                return {"status": "not planted", "gate": "", "by": str(error)}
        return _asked_alone(bug, copy) if hasattr(bug, "check") else judged(bug.model, copy, options, tell)[0]


def _asked_alone(bug: Any, package: Path) -> Row:
    """Run the one check that has to catch a bug."""
    found = importlib.import_module("tests.verify.generation_bugs").result_of(bug, package)
    caught = found.status == "failed"
    return {"status": "caught" if caught else "survived", "gate": bug.gate if caught else "", "by": found.name}


def said(row: Row) -> str:
    """One line about a bug."""
    elsewhere = row["status"] == "caught" and row["gate"] != row["expected"]
    status = f"caught, not by {row['expected']}" if elsewhere else row["status"]
    return f"{status:<9} {row['seconds']:4.0f} s  {row['bug']} · {row.get('gate', '')}: {row['by']}"


def trials(options: argparse.Namespace, folder: Path) -> list[Trial]:
    """The bugs to plant, their packages made."""
    how = Options(
        device=options.device, seed=options.seed, quick=not options.full, fail_fast=True, compile=options.full,
        clean_process=options.full, reach=False, gates=("structure", "parity", "generation"),
    )  # fmt: skip
    bugs = [bug for name in options.bugs for bug in bugs_of(name) if options.name in bug.id]
    bugs = [bug for bug in bugs if bug.model in (options.models or (bug.model,))]
    made = packages(dict.fromkeys(bug.model for bug in bugs), folder / "packages", options.jobs)
    return [
        Trial(
            bug.id.replace("/", "_"), partial(tried, bug, made[bug.model], how), {"bug": bug.id, "expected": bug.gate}
        )
        for bug in bugs
    ]


def main() -> None:
    """Plant the bugs, each into a copy of its own, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--bugs", nargs="*", default=["argument_bugs", "config_bugs"])
    parser.add_argument("--name", default="")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = arguments_of(parser)
    deadline = time.monotonic() + options.limit_seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.rows or Path(temporary)
        found, rows = trials(options, folder), []
        for row in results(found, folder / "planted", options.jobs, deadline):
            rows.append(row)
            print(said(row), flush=True)
    left = [said(row) for row in rows if row["status"] != "caught"]
    print(f"{len(rows) - len(left)} of {len(rows)} caught, of {len(found)} in all", *left, sep="\n")
    print(f"{sum(row.get('processor', 0) for row in rows) / max(1, len(rows)):.1f} processor seconds a bug")


if __name__ == "__main__":
    main()
