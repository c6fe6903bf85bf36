"""A package whose tensors are dealt to two processes of a CPU: verified, and with bugs planted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .copies import upstream

Found = Mapping[str, Any]


def of_ranks(folder: Path, model: str, *plan: str) -> Found:
    """What two ranks found, of the sound package and with each bug: one start of both processes."""
    package, out = folder / f"{model}_of_ranks", folder / "found.json"
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(package)]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True)
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("rank_bugs.py")
    command = [sys.executable, "-m", *agent, str(worker), str(package), str(upstream(model)), str(out), *plan]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    content: Found = json.loads(out.read_text())
    return content


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A dense model, whose plan deals columns and rows."""
    return of_ranks(tmp_path_factory.mktemp("ranks"), "llama")


@pytest.fixture(scope="module")
def found_of_experts(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A mixture, under the plan that gives each rank some of the experts."""
    return of_ranks(tmp_path_factory.mktemp("experts"), "qwen3_moe", "experts")


def test_a_dealt_package_computes_what_its_original_does_in_one_process(found: Found) -> None:
    assert [check for check in found["sound"] if not check["passed"]] == []
    names = {check["name"] for check in found["sound"]}
    assert {"forward", "gradients", "tokens", "logits of steps", "drawn tokens", "checkpoint"} <= names
    assert {"weights a rank holds", "parameters stay", "tokens of transformers' loop"} <= names


@pytest.mark.parametrize(
    "bug",
    ["missing_sum", "summed_twice", "bias_on_every_rank", "heads_of_another_rank", "columns_in_another_order"],
)
def test_a_bug_between_the_ranks_is_caught(found: Found, bug: str) -> None:
    assert found[bug]["name"] == "logits of steps"
    assert not found[bug]["passed"]
    print(found[bug]["detail"])


def test_heads_that_the_ranks_would_have_to_share_are_refused_by_name(found: Found) -> None:
    assert found["uneven"].startswith("UnevenHeads: model.layers.0.self_attn.")
    assert "whole number of heads of 16" in found["uneven"]


def test_a_mixture_of_which_each_rank_has_some_experts_computes_what_its_original_does(
    found_of_experts: Found,
) -> None:
    assert [check for check in found_of_experts["sound"] if not check["passed"]] == []
    assert all(check["name"].endswith(", whole experts") for check in found_of_experts["sound"])
    assert "decode loop: yes" in found_of_experts["explain"]
    assert "ranks: 2 ranks, sums by gloo" in found_of_experts["explain"]


@pytest.mark.parametrize("bug", ["missing_sum", "summed_twice", "experts_of_another_rank", "experts_on_every_rank"])
def test_a_bug_between_ranks_that_have_some_experts_is_caught(found_of_experts: Found, bug: str) -> None:
    assert found_of_experts[bug]["name"] == "logits of steps, whole experts"
    assert not found_of_experts[bug]["passed"]
    print(found_of_experts[bug]["detail"])
