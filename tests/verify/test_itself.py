"""An edit that acts on one way of running alone: found in fp64, named with its lines, and never accepted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rewrite.delivery.acceptable import unacceptable
from rewrite.verify import Check, Options, Verdict, verify

from .copies import generated, upstream

STEP, FORWARD = "itself: decode step", "itself: captured forward"
SCALING = "scaling=self.scaling"
PROJECTED = "        attn_output = self.dense(attn_output)\n"
ADDED = "        attn_output = linear(attn_output, self.o_proj, residual=residual)\n"
SUM = "        hidden_states = attn_outputs + feed_forward_hidden_states + residual\n"
BRANCH = "        attn_output = attn_output + 0.01 * attn_output.roll(1, -1)\n"
NORM = "return rms_norm("
ATTENTION = r"PhiAttention.decode_residual \(modeling_phi.py:\d+\) .*in place of PhiAttention.forward \(mod"
"""Phi's layers have a method for a step: two of its blocks read one norm."""
TOKENS = "            inputs_embeds = self.embed_tokens(input_ids)\n"
BESIDE = (
    "def blended(hidden_states, cache):\n    return hidden_states * (1.001 if getattr(cache, 'stepping', 0) else 1)\n"
)
BLENDED = "inputs_embeds = blended(self.embed_tokens(input_ids), cache)\n"
PRODUCT = "        attn_output = self.c_proj(attn_output)\n"
"""GPT-2's, which has no method for a step."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("itself")
    return {model: generated(folder / model, model) for model in ("qwen3", "phi", "gpt2")}


def judged(package: Path, place: Path, *edits: tuple[str, str, int]) -> Verdict:
    """The verdict on a copy in which the occurrences with these numbers are replaced, all where that is -1."""
    folder = place / package.name
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = next(folder.glob("modeling_*.py"))
    text = path.read_text()
    for old, new, number in edits:
        parts = text.split(old)
        assert len(parts) > number + 1, old
        one = "" if number < 0 else old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])
        text = one or text.replace(old, new)
    path.write_text(text)
    (folder / "beside.py").write_text(BESIDE)
    asked = {"quick": True, "keep_going": True, "clean_process": False, "compile": False, "others": False}
    options = Options(configuration=False, checks=(STEP, FORWARD), gates=("parity",), **asked)  # type: ignore[arg-type]
    return verify(upstream(package.name), folder, options)


def check(verdict: Verdict, name: str) -> Check:
    return next(check for gate in verdict.gates for check in gate.checks if check.name == name)


@pytest.mark.parametrize(
    ("model", "edits"),
    [
        ("qwen3", ()),
        ("qwen3", ((SCALING, f"{SCALING} * 1.001", -1),)),
        ("qwen3", ((ADDED, ADDED + BRANCH, 0),)),
        ("qwen3", ((NORM, NORM.replace("return", "return 1.001 *"), 0),)),
        ("phi", ((SCALING, f"{SCALING} * 0.8", -1),)),
        ("gpt2", ((PRODUCT, f"{PRODUCT}        attn_output = attn_output * 0.8\n", 0),)),
    ],
    ids=("as generated", "scale", "branch", "norm", "two methods", "no method"),
)
def test_an_edit_of_every_way_agrees(
    packages: dict[str, Path], tmp_path: Path, model: str, edits: tuple[tuple[str, str, int], ...]
) -> None:
    verdict = judged(packages[model], tmp_path, *edits)
    assert [check(verdict, name).status for name in (STEP, FORWARD)] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("model", "edit", "said"),
    [
        ("phi", (SCALING, f"{SCALING} * 0.8", 0), ATTENTION),
        ("phi", (SCALING, f"{SCALING} * 1.001", 0), ATTENTION),
        ("phi", (SCALING, f"{SCALING} * 1.001", 1), ATTENTION),
        ("phi", (PROJECTED, PROJECTED + BRANCH, 0), ATTENTION),
        (
            "phi",
            (SUM, SUM.replace("= attn", "= 1.001 * attn"), 0),
            r"PhiDecoderLayer.decode \(.*:\d+\) .*in place of PhiDecoderLayer.forward \(",
        ),
        (
            "qwen3",
            (ADDED, f"        attn_output = attn_output * (1.001 if skips_mask(cache) else 1)\n{ADDED}", 0),
            r"Qwen3Attention.forward \(modeling_qwen3.py:\d+\) gives something else",
        ),
        (
            "qwen3",
            (TOKENS, f"            from .beside import blended\n\n            {BLENDED}", 0),
            r"the operator blended, called in Qwen3Model.forward \(modeling_qwen3.py:\d+\), gives something else",
        ),
        (
            "gpt2",
            (
                PRODUCT,
                f"{PRODUCT}        attn_output = attn_output * (1.001 if getattr(cache, 'stepping', 0) else 1)\n",
                0,
            ),
            r"GPT2Attention.forward \(modeling_gpt2.py:\d+\) gives something else in a step",
        ),
    ],
    ids=["scale", "little", "little_in_step", "branch", "residual", "one_method", "operator", "no_method"],
)
def test_an_edit_of_one_way_alone_is_named_and_not_accepted(
    packages: dict[str, Path], tmp_path: Path, model: str, edit: tuple[str, str, int], said: str
) -> None:
    verdict = judged(packages[model], tmp_path, edit)
    found = check(verdict, STEP)
    assert (found.status, bool(re.search(said, found.detail))) == ("failed", True), found.detail
    assert STEP in verdict.reason
    assert unacceptable(verdict).startswith(f"the package does not agree with itself. {STEP}: ")
