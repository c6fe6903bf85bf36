"""Every bug planted into the decode loop is caught, and by a check of the loop."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rewrite.verify import Options, verify
from rewrite.verify.generation.loop_scenarios import SCENARIOS
from rewrite.verify.generation.poison import poison

from .bugs import Bug
from .copies import generated, plant, upstream
from .loop_bugs import CAPTURED, LOOP, TURNS

CHECKED = Options(quick=True, fail_fast=True, gates=("generation",))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "llama", "llama")


def test_the_loop_is_checked_where_there_is_one(package: Path) -> None:
    verdict = verify(upstream("llama"), package, CHECKED)
    assert verdict.passed, verdict.reason
    checks = [check for check in verdict.gates[-1].checks if check.name.startswith("decode loop")]
    assert len(checks) == 13 + len(SCENARIOS)
    assert {check.status for check in checks} == {"passed"}


@pytest.mark.parametrize("bug", LOOP, ids=lambda bug: bug.id)
def test_a_bug_in_the_loop_is_caught(bug: Bug, package: Path, tmp_path: Path) -> None:
    assert_caught(bug, package, tmp_path, CHECKED)


@pytest.mark.parametrize("check", TURNS)
def test_a_bug_that_shows_in_one_check_is_caught_there(check: str, package: Path, tmp_path: Path) -> None:
    options = Options(fail_fast=True, gates=("generation",), checks=(f"decode loop, {check}",), clean_process=False)
    assert_caught(TURNS[check], package, tmp_path, options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("bug", CAPTURED, ids=lambda bug: bug.id)
def test_a_bug_in_what_is_captured_is_caught(bug: Bug, package: Path, tmp_path: Path) -> None:
    # On a GPU every greedy check goes through the loop; the first of them may see the bug.
    assert_caught(bug, package, tmp_path, replace(CHECKED, device="cuda"), ("decode loop", "greedy"))


def test_a_layer_that_the_decoder_does_not_have_is_not_poisoned() -> None:
    # bart with more encoder layers than decoder layers: the cache counts the encoder's
    keys, values = torch.zeros(2, 1, 5, 2), torch.zeros(2, 1, 5, 2)
    written = SimpleNamespace(keys=keys, values=values, is_initialized=True)
    missing = SimpleNamespace(keys=None, values=None, is_initialized=False)
    cache = SimpleNamespace(attention_layers=[written, missing], starts=torch.tensor([0, 2]), length=4)
    poison(SimpleNamespace(cache=cache), 7.0)
    expected = torch.tensor([[0.0, 0, 0, 0, 7], [7, 7, 0, 0, 7]])[:, None, :, None].expand(2, 1, 5, 2)
    assert torch.equal(keys, expected)
    assert torch.equal(values, expected)


def assert_caught(
    bug: Bug, package: Path, tmp_path: Path, options: Options, checks: tuple[str, ...] = ("decode loop",)
) -> None:
    copy = tmp_path / "llama"
    shutil.copytree(package, copy)
    assert bug.file is not None
    plant(copy, bug.file, bug.old, bug.new, bug.count)
    verdict = verify(upstream("llama"), copy, options)
    assert not verdict.passed
    assert verdict.failed_gate is not None
    assert verdict.failed_gate.name == bug.gate, verdict.reason
    assert verdict.failed_gate.failures[0].name.startswith(checks), verdict.reason
    print(verdict.reason)
