"""Bugs planted by hand in what is generated, and which of them the checks on configurations catch.

    python bench/planted_configurations.py [MODEL or BUG ...] [--quick]

Each bug of `tests/verify/config_bugs.py` takes a field of the configuration for granted: it shows only away from the
value that the small configurations have by default. Every model's package is made once, and judged without a bug
first: what fails there is a false alarm. Exit code 1 for a bug that passes, or a false alarm.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rewrite.verify import Options
from tests.verify.bugs import Bug
from tests.verify.config_bugs import CONFIGURED, first_failure, spoiled


def generated(model: str, folder: Path) -> Path:
    """Make the package of a model."""
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(folder / model)]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True)
    return folder / model


def judged(model: str, name: str, package: Path, options: Options) -> bool:
    """Print and return whether a check fails."""
    started = time.perf_counter()
    failure = first_failure(model, package, options)
    said = f"{failure.name}: {failure.detail[:100]}" if failure else "passed"
    print(f"{time.perf_counter() - started:4.0f} s  {name}: {said}", flush=True)
    return failure is not None


def caught(bug: Bug, package: Path, options: Options) -> bool:
    """Plant a bug in a copy of a package; print and return whether a check sees it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / bug.model
        shutil.copytree(package, copy)
        spoiled(bug, copy)
        return judged(bug.model, bug.id, copy, options)


def main() -> int:
    """Plant the bugs one after another, and count those that are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    options = Options(quick=arguments.quick)
    bugs = [bug for bug in CONFIGURED if not arguments.wanted or {bug.model, bug.id} & set(arguments.wanted)]
    passed: list[str] = []
    alarms: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in dict.fromkeys(bug.model for bug in bugs):
            package = generated(model, Path(folder))
            if judged(model, f"{model} as it is", package, options):
                alarms.append(model)
            passed += [bug.id for bug in bugs if bug.model == model and not caught(bug, package, options)]
    print(f"{len(bugs) - len(passed)} of {len(bugs)} caught; false alarms: {', '.join(alarms) or 'none'}")
    for name in passed:
        print(f"passes: {name}")
    return 1 if passed or alarms else 0


if __name__ == "__main__":
    sys.exit(main())
