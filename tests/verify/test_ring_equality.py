"""A package is the same polynomial as its original, and bugs below the noise of 16 bits are not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from hf_rewrite_runtime.linear import packing
from rewrite import cli
from rewrite.finite import ring, ring_tensor
from rewrite.finite.ring_tensor import RingTensor
from rewrite.verify import Options, ring_equality
from rewrite.verify.judging.checks import run_check
from rewrite.verify.judging.verdict import Check
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import find_subjects

from .copies import plant, upstream


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of two models."""
    root = tmp_path_factory.mktemp("packages")
    for model in ("llama", "qwen3"):
        result = CliRunner().invoke(cli.cli, [model, "--out", str(root / model), "--no-verify"])
        assert result.exit_code == 0, result.output
    return root


def judged(model: str, package: Path, *, quick: bool = True) -> Check:
    options = Options(quick=quick)
    modules = [loaded_sides.load(loaded_sides.locate(side)) for side in (upstream(model), package)]
    main = find_subjects(modules[0], modules[1]).main
    bench = Workbench(main, small_variants(main.original, main.causal, options.config), options)
    (check,) = ring_equality.ring_checks(bench)
    return run_check(check)


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_package_is_the_same_polynomial(model: str, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its packed products, which step aside for every other class of tensors."""
    packed: list[type] = []
    as_one = packing.as_one

    def heard(tensors: list[torch.Tensor]) -> torch.Tensor | str:
        packed.append(type(tensors[0]))
        return as_one(tensors)

    monkeypatch.setattr(packing, "as_one", heard)
    check = judged(model, packages / model)
    assert check.status == "passed", check.detail
    assert check.figures["configurations"] == 4
    assert set(packed) == {RingTensor}


PLANTED = {
    "a scale of 1.001": ("llama", "self.scaling = self.head_dim**-0.5", "self.scaling = 1.001 * self.head_dim**-0.5"),
    "a norm without its eps": ("llama", "self.variance_epsilon = eps", "self.variance_epsilon = 0.0"),
    "a head's norm without its eps": (
        "qwen3",
        "self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)",
        "self.q_norm = Qwen3RMSNorm(self.head_dim, eps=0.0)",
    ),
    "a norm's weight left out": ("qwen3", "rms_norm(hidden_states, self.weight,", "rms_norm(hidden_states, None,"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_bugs_below_the_noise_of_16_bits_are_seen(bug: str, packages: Path, tmp_path: Path) -> None:
    model, old, new = PLANTED[bug]
    shutil.copytree(packages / model, tmp_path / model)
    plant(tmp_path / model, f"modeling_{model}.py", old, new)
    check = judged(model, tmp_path / model)
    assert check.status == "failed"
    assert check.failure == "differs"
    assert "of another polynomial" in check.detail


def test_what_has_no_meaning_is_not_run(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ring_tensor.COMPUTES, torch.ops.aten.silu)
    check = judged("llama", packages / "llama")
    assert check.status == "not run"
    assert check.detail == "aten.silu has no meaning in a finite ring"


def test_identities_of_the_ring() -> None:
    a, b = ring.random((500,), "a"), ring.random((500,), "b")
    assert torch.equal(ring.exp(ring.add(a, b)), ring.mul(ring.exp(a), ring.exp(b)))
    assert torch.equal(ring.div(ring.mul(a, torch.tensor(64)), torch.tensor(64)), a)
    assert torch.equal(ring.mul(ring.elements(torch.tensor(1 / 64)), torch.tensor(64)), torch.tensor(1))
    assert torch.equal(ring.matmul(a[:, None], b[None])[:, 0], ring.mul(a, b[0]))
    hidden = ring.elements(torch.tensor([-1e30, float("-inf")]))
    assert ring.exp(hidden).tolist() == [0, 0]
    assert ring.add(hidden, a[:2]).tolist() == hidden.tolist()
