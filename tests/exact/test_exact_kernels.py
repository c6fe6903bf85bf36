"""Every kernel is its formula, bit by bit, in a ring in which no sum rounds: a sample here, all by the command."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from rewrite import runtime
from rewrite.exact import exact_run
from rewrite.kernels import kernel_run
from rewrite.kernels.__main__ import kernels

RUNTIME = Path(next(iter(runtime.__path__)))
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(
        np.lib.NumpyVersion(np.__version__) >= "2.4.0",
        reason="Triton's interpreter needs numpy before 2.4, as [dev] has it",
    ),
]
ONE_OF_EACH = 1000
"""Of a kernel's launches only the first."""


def test_every_kernel_has_a_formula() -> None:
    """Or a reason why none means anything in the ring."""
    from rewrite.exact.references import REFERENCES, UNSEEN

    assert {*REFERENCES, *UNSEEN} == set(kernel_run.known_kernels())
    assert not REFERENCES.keys() & UNSEEN.keys()


@pytest.mark.slow
def test_a_launch_of_every_kernel_is_its_formula() -> None:
    rows = exact_run.compare_all(jobs=2, every=ONE_OF_EACH)
    assert [row for row in rows if row.differs] == []
    from rewrite.exact.references import UNSEEN

    seen = {row.kernel for row in rows if not row.unseen}
    assert seen == set(kernel_run.known_kernels()) - UNSEEN.keys()


PLANTED = {
    "rms_norm": (
        "norms/rms_norm.py",
        "keep_dims=True) / H + eps)\n            normed",
        "keep_dims=True) / H)\n            normed",
    ),
    "layer_norm": (
        "norms/layer_norm.py",
        "centred * centred, axis=1, keep_dims=True) / H",
        "centred * centred, axis=1, keep_dims=True) / (H - 1)",
    ),
    "rms_norm_backward": (
        "norms/rms_norm_backward.py",
        "scaled * normed, axis=1, keep_dims=True) / H",
        "scaled * normed, axis=1, keep_dims=True) / 1.001",
    ),
    "decode_attention": (
        "attention/decode_attention_kernel.py",
        "scores = product * scaling",
        "scores = product * (scaling * 1.001)",
    ),
    "masked_attention": (
        "attention/masked_attention.py",
        "live = live & (mask != 0)",
        "live = live & (mask == 0)",
    ),
    "latent_values": (
        "attention/latent_decode.py",
        "keep = (some < active)[:, None]",
        "keep = (some < active - 1)[:, None]",
    ),
    "linear": (
        "linear/gemv.py",
        "mask=live[:, None] & (col < I), other=0.0, cache_modifier",
        "mask=live[:, None] & (col < I - 1), other=0.0, cache_modifier",
    ),
    "gated": (
        "linear/gemv.py",
        "_activate(g, ACTIVATION) * u",
        "_activate(u, ACTIVATION) * g",
    ),
    "skinny_linear": (
        "linear/skinny.py",
        "for one in tl.static_range(SPLITS):",
        "for one in tl.static_range(SPLITS - 1):",
    ),
    "rotary": (
        "rope/rotary_kernel.py",
        "_rounded(a * sin_b, DTYPE, ROUND)",
        "_rounded(a * sin_a, DTYPE, ROUND)",
    ),
    "qkv_prompt": (
        "rope/qkv_prefill.py",
        "((b * HK + head) * capacity + t) * D, column, other_column, live, first",
        "((b * HK + head) * capacity + t + 1) * D, column, other_column, live, first",
    ),
    "experts_down": (
        "moe/experts_kernels.py",
        "live = slot < K\n",
        "live = slot < K - 1\n",
    ),
    "grouped": (
        "moe/grouped.py",
        "source = pair // K if GATED",
        "source = pair % K if GATED",
    ),
    "select_experts": (
        "moe/selection.py",
        "keys += tl.load(correction_ptr",
        "keys -= tl.load(correction_ptr",
    ),
    "delta_rule_step": (
        "recurrent/delta_rule_step.py",
        "axis=0)) * beta",
        "axis=0))",
    ),
    "conv_step": (
        "recurrent/conv_step.py",
        "tap == W - 1",
        "tap == W - 2",
    ),
    "state_space_step": (
        "recurrent/state_space_step.py",
        "(dt * x)[:, None]",
        "x[:, None]",
    ),
    "cross_entropy": (
        "loss/cross_entropy.py",
        "tl.where(col == label, 1.0",
        "tl.where(col == label + 1, 1.0",
    ),
    "write_token": (
        "cache/token.py",
        "tl.store(values_ptr + slot * DV",
        "tl.store(values_ptr + (slot - 1) * DV",
    ),
}
"""Bugs by the kernels that they are planted in: a file, what stands there, and what is put in its place."""


@pytest.mark.slow
def test_bugs_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eps, a half, a row, a part or a scale of 1.001: below the noise of 16 bits most of them are not."""
    altered = tmp_path / "hf_rewrite_runtime"
    shutil.copytree(RUNTIME, altered, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text, bug in PLANTED.values():
        whole = (altered / file).read_text("utf-8")
        assert text in whole, f"{file} has no longer: {text}"
        (altered / file).write_text(whole.replace(text, bug), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = exact_run.compare_all([*PLANTED], ["cuda"], jobs=2, every=3)
    assert {row.kernel for row in rows if row.differs} == set(PLANTED)


def test_command_says_what_is_equal(tmp_path: Path) -> None:
    result = CliRunner().invoke(kernels, ["log_decay", "write_token", "fp8_rows", "--exact"])
    assert result.exit_code == 0, result.output
    assert "differ" in result.output
    assert "not seen" in result.output
