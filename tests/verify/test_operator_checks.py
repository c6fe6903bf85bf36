"""What a compiler is told of an operator is checked, and what stands before it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rewrite.verify import Options, verify
from rewrite.verify.state.operator_checks import NONE

from .copies import generated, plant, upstream

BUGS = {
    "another dtype is promised": (
        "_runtime",
        "return torch.empty_like(gate, memory_format=torch.contiguous_format)",
        "return torch.empty(gate.shape)",
    ),
    "the dispatcher stands before operators": (
        "_runtime", "and not _len_torch_dispatch_stack()", "and _len_torch_dispatch_stack()"
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
    return generated(tmp_path_factory.mktemp("packages") / "llama", "llama")


def test_a_package_passes(package: Path) -> None:
    verdict = verify(upstream("llama"), package, OPTIONS)
    checks = {check.name: check.status for check in verdict.gates[-1].checks}
    assert checks == dict.fromkeys(OPTIONS.checks, "passed")


def test_a_package_whose_operators_do_not_run_is_not_asked(tmp_path: Path) -> None:
    verdict = verify(upstream("bloom"), generated(tmp_path / "bloom", "bloom"), OPTIONS)
    said = {check.name: check.detail for check in verdict.gates[-1].checks if check.status == "not run"}
    assert said == dict.fromkeys(OPTIONS.checks, NONE)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, package: Path, tmp_path: Path) -> None:
    file, old, new = BUGS[name]
    broken = tmp_path / f"llama_{len(name)}"
    shutil.copytree(package, broken)
    plant(broken, file, old, new)
    verdict = verify(upstream("llama"), broken, OPTIONS)
    assert "failed" in {check.status for check in verdict.gates[-1].checks}
