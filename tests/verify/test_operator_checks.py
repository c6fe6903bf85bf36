"""What a compiler is told of an operator is checked, what stands before it, and where its package is taken to lie."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rewrite.verify import Options, verify

from .copies import planted, upstream

BUGS = {
    "another dtype is promised": (
        "products.py",
        "return torch.empty_like(gate, memory_format=torch.contiguous_format)",
        "return torch.empty(gate.shape)",
    ),
    "the dispatcher stands before operators": (
        "core.py", "and not _len_torch_dispatch_stack()", "and _len_torch_dispatch_stack()"
    ),
    "the runtime looks elsewhere for its package": (
        "core.py", "Path(sys.modules[f\"{PLACE_PACKAGE}.runtime\"].__path__[0]).parent", "Path(__file__).parent"
    ),
}  # fmt: skip
OPTIONS = Options(
    clean_process=False,
    gates=("structure", "generation"),
    checks=("operators give what their fakes say", "operators are called directly"),
    keep_going=True,
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages") / "llama"
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", "llama", "--out", str(folder)]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True)
    return folder


def test_a_package_passes(package: Path) -> None:
    verdict = verify(upstream("llama"), package, OPTIONS)
    checks = {check.name: check.status for check in verdict.gates[-1].checks}
    assert checks == dict.fromkeys(OPTIONS.checks, "passed")


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, package: Path, tmp_path: Path) -> None:
    file, old, new = BUGS[name]
    broken = tmp_path / f"llama_{len(name)}"
    shutil.copytree(package, broken)
    path = broken / "runtime" / file
    path.write_text(planted(path.read_text("utf-8"), old, new), "utf-8")
    verdict = verify(upstream("llama"), broken, OPTIONS)
    assert "failed" in {check.status for check in verdict.gates[-1].checks}
