"""Every planted bug is caught, by the gate that is meant to catch it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rewrite.verify import Options, Verdict, verify

from .bugs import COPIED, PRELUDE, Bug
from .copies import plant, planted, source_of, upstream, write_package
from .rewritten_bugs import REWRITTEN

QUICK = Options(quick=True, fail_fast=True, gates=("parity", "generation"))
FULL = Options(fail_fast=True, gates=("parity",))


def judged(bug: Bug, package: Path) -> Verdict:
    return verify(upstream(bug.model), package, FULL if bug.full else QUICK)


def assert_caught(bug: Bug, verdict: Verdict) -> None:
    assert not verdict.passed
    assert verdict.exit_code == 1
    assert verdict.failed_gate is not None
    assert verdict.failed_gate.name in bug.gate.split(" or "), verdict.reason
    print(f"{verdict.reason}\n{verdict.divergence}")


@pytest.mark.parametrize("bug", COPIED, ids=lambda bug: bug.id)
def test_bug_in_a_copy_is_caught(bug: Bug, tmp_path: Path) -> None:
    text = planted(source_of(bug.model), bug.old, bug.new, bug.count)
    text = text.replace("logger = logging", f"{PRELUDE}logger = logging", 1)
    package = write_package(tmp_path / f"{bug.model}_copy", bug.model, text)
    assert_caught(bug, judged(bug, package))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the tool generates, a model each, made when first asked for."""
    root = tmp_path_factory.mktemp("packages")
    found = {}
    for model in sorted({bug.model for bug in REWRITTEN}):
        command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(root / model)]
        subprocess.run([*command, "--no-verify"], check=True, capture_output=True)
        found[model] = root / model
    return found


@pytest.mark.parametrize("bug", REWRITTEN, ids=lambda bug: bug.id)
def test_bug_in_a_rewritten_package_is_caught(bug: Bug, packages: dict[str, Path], tmp_path: Path) -> None:
    package = tmp_path / bug.model
    shutil.copytree(packages[bug.model], package)
    plant(package, bug.file or f"modeling_{bug.model}.py", bug.old, bug.new, bug.count)
    assert_caught(bug, judged(bug, package))
