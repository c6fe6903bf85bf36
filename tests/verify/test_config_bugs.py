"""Bugs that show only away from a small configuration are caught; `bench/planted.py` runs them all."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from rewrite.verify import Options

from .config_bugs import CONFIGURED, first_failure, spoiled

SAMPLE = {
    "llama-theta_hard-coded": "rope_parameters.rope_theta",
    "llama-frequencies_never_updated": "rope_parameters.rope_type",
    "llama-eps_at_least_1e-3": "rms_norm_eps",
    "llama-tanh_form_of_gelu_dropped": "hidden_act",
    "llama-dropout_in_inference": "attention_dropout",
    "llama-no_scaling_where_nothing_is_grouped": "num_key_value_heads",
    "llama-gradient_of_biases_dropped": "attention_bias",
    "llama-padding_row_trained": "pad_token_id",
    "bert-hidden_dropout_of_one_tenth": "hidden_dropout_prob",
    "bert-always_causal": "is_decoder",
    "qwen3_moe-sparse_step_ignored": "decoder_sparse_step",
    "qwen3_moe-dense_layers_ignored": "mlp_only_layers",
    "qwen3_moe-window_ignored": "sliding_window",
}
"""Some of the bugs, and the field that shows each."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@cache
def generated(root: Path, model: str) -> Path:
    """What the tool generates for a model, made when first asked for."""
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(root / model)]
    subprocess.run([*command, "--no-verify"], check=True, capture_output=True)
    return root / model


@pytest.mark.parametrize(("name", "field"), SAMPLE.items(), ids=SAMPLE)
def test_a_bug_is_caught_by_its_field(name: str, field: str, root: Path, tmp_path: Path) -> None:
    bug = next(bug for bug in CONFIGURED if bug.id == name)
    package = tmp_path / bug.model
    shutil.copytree(generated(root, bug.model), package)
    spoiled(bug, package)
    failure = first_failure(bug.model, package, Options(), field)
    assert failure is not None
    assert field in failure.name
    print(failure.detail)


def test_a_bug_of_the_decode_step_is_caught_with_all_fields_at_once(root: Path, tmp_path: Path) -> None:
    bug = next(bug for bug in CONFIGURED if bug.name == "activation of the decode step")
    package = tmp_path / bug.model
    shutil.copytree(generated(root, bug.model), package)
    spoiled(bug, package)
    failure = first_failure(bug.model, package, Options(quick=True))
    assert failure is not None
    assert failure.name == "configuration: 20 fields at once"  # each way computes what the file says


@pytest.mark.parametrize("model", ["llama", "bert", "qwen3_moe"])
def test_no_false_alarm(model: str, root: Path) -> None:
    assert first_failure(model, generated(root, model), Options(quick=True, seed=7)) is None


def test_every_bug_has_a_name_of_its_own() -> None:
    names = [bug.id for bug in CONFIGURED]
    assert len(set(names)) == len(names) >= 60
    assert set(SAMPLE) <= set(names)
