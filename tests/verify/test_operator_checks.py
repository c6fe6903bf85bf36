"""What a compiler is told of an operator is checked, what stands before it, and where its package is taken to lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rewrite.verify import Options, verify

from .copies import generated, planted, upstream

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
    return generated(tmp_path_factory.mktemp("packages") / "llama", "llama")


def test_a_package_passes(package: Path) -> None:
    verdict = verify(upstream("llama"), package, OPTIONS)
    checks = {check.name: check.status for check in verdict.gates[-1].checks}
    assert checks == dict.fromkeys(OPTIONS.checks, "passed")


def test_a_package_without_operators_is_not_asked(tmp_path: Path) -> None:
    verdict = verify(upstream("bloom"), generated(tmp_path / "bloom", "bloom"), OPTIONS)
    said = {check.name: check.detail for check in verdict.gates[-1].checks if check.status == "not run"}
    assert said == dict.fromkeys(OPTIONS.checks, "the package brings no operators")


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, package: Path, tmp_path: Path) -> None:
    file, old, new = BUGS[name]
    broken = tmp_path / f"llama_{len(name)}"
    shutil.copytree(package, broken)
    path = broken / "runtime" / file
    path.write_text(planted(path.read_text("utf-8"), old, new), "utf-8")
    verdict = verify(upstream("llama"), broken, OPTIONS)
    assert "failed" in {check.status for check in verdict.gates[-1].checks}
