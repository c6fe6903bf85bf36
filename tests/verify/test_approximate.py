"""A package that reads weights in 8 bits is held to the original rounded so, and says how far that is from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rewrite.verify import Options, Verdict, render, summary, verify
from rewrite.verify.calls.approximate import judged
from rewrite.verify.judging.compare import Mismatch
from rewrite.verify.models.loaded_sides import locate
from rewrite.verify.models.rounding import Rounding, rounded

from .bugs import Bug
from .copies import plant, upstream

QUICK = Options(quick=True, fail_fast=True, gates=("parity", "generation"))
FORMAT, WEIGHTS, LINEAR = "_runtime/device/e4m3.py", "_runtime/fp8/fp8_weights.py", "_runtime"

ROUNDED = "inverse.unsqueeze(-1)).to(dtype)"
BUGS = (
    Bug("llama", "scale of another row", "to(dtype), scale)", "to(dtype), scale.roll(1, -1))", file=FORMAT),
    Bug("llama", "scale twice as large", "scale.view(torch.float32),", "scale.view(torch.float32) * 2,", file=FORMAT),
    Bug("llama", "saturated", "((254 - field) << 23).view", "((255 - field) << 23).view", file=FORMAT),
    Bug("llama", "fewer bits", ROUNDED, ROUNDED.replace("dtype", "torch.float8_e5m2"), file=FORMAT),
    Bug("llama", "a prompt's activations in 16 bits", "    if is_step(input):", "    if True:", file=LINEAR),
    Bug("llama", "a step's activations in 8 bits", "input.shape[-2] == 1 and", "False and", file=LINEAR),
    Bug("llama", "copies are never made anew", "kept.state == state:", "True:", file=WEIGHTS),
    Bug("llama", "gate and up swapped", "(self.gate_proj, self.up_proj)", "(self.up_proj, self.gate_proj)"),
    Bug("llama", "residual dropped", "self.o_proj, residual=residual)", "self.o_proj)"),
)  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("approximate") / "llama_fp8"
    command = [sys.executable, "-c", "from rewrite.cli import main; main()", "llama", "--out", str(root)]
    subprocess.run([*command, "--with", "fp8", "--no-verify"], check=True, capture_output=True)
    return root


def judge(package: Path) -> Verdict:
    return verify(upstream("llama"), package, QUICK)


def test_verdict_says_that_it_is_approximate(package: Path) -> None:
    verdict = judge(package)
    assert verdict.passed, verdict.reason
    assert verdict.exit_code == 0
    checks = [check for check in verdict.gates[1].checks if check.name.startswith("approximate")]
    assert [check.status for check in checks] == ["passed", "passed"]
    assert 1e-3 < float(checks[0].figures["KL mean"]) < 1.0
    assert ", approximate: KL 0.0" in summary(verdict)
    assert "approximate, float32" in render(verdict)
    assert render(verdict).endswith("× that of the rounding") or "passed, approximate" in render(verdict)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_bug_does_not_hide_behind_the_rounding(bug: Bug, package: Path, tmp_path: Path) -> None:
    copy = tmp_path / "llama_fp8"
    shutil.copytree(package, copy)
    plant(copy, bug.file or "modeling_llama.py", bug.old, bug.new, bug.count)
    verdict = judge(copy)
    assert not verdict.passed
    assert verdict.failed_gate is not None
    assert verdict.failed_gate.name == bug.gate, verdict.reason


def test_lock_says_what_is_rounded(package: Path) -> None:
    rounding = Rounding.of(locate(package))
    assert rounding is not None
    assert ("LlamaAttention", ("q_proj", "k_proj", "v_proj")) in rounding.groups
    assert ("LlamaForCausalLM", ("lm_head",)) in rounding.groups
    assert Rounding.of(locate("transformers.models.llama.modeling_llama")) is None


def test_rounding_is_to_the_nearest_of_the_format() -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, 33, dtype=torch.float64) * torch.rand(64, 1, dtype=torch.float64) ** 8
    found = rounded(rows)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    largest = rows.abs().amax(-1, keepdim=True)
    scale = 2 ** torch.ceil(torch.log2(largest / 448))
    nearest = ((rows / scale)[..., None] - codes).abs().min(-1).values * scale
    assert torch.allclose((found - rows).abs(), nearest, rtol=0, atol=1e-7 * float(largest.max()))
    assert torch.equal(rounded(found), found)
    assert torch.equal(rounded(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_bound_on_the_divergence_holds() -> None:
    rounding = torch.full((100,), 0.1)
    assert judged(rounding, rounding * 1.2, rounding)["KL mean"] == pytest.approx(0.12)
    with pytest.raises(Mismatch, match="mean KL"):
        judged(rounding, rounding * 1.3, rounding)
