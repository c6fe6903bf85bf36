"""What a failed verdict says of an edit in a modeling file: where it is, and what it looks like."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from rewrite.verify import Options, Verdict, verify
from rewrite.verify.diagnosis import likely
from rewrite.verify.render import render

from .copies import generated, planted, upstream

NORM = "return rms_norm(hidden_states, self.weight, self.variance_epsilon)"
ADDED = "residual_block(self.self_attn, norm=self.input_layernorm, residual=residual)"
ALONE, PADDED = (f"fp64 sdpa, base: prefill, {what}" for what in ("batch 1", "left padding"))
STEP = "itself: decode step"

EDITS = {
    "a wrong eps": (NORM, NORM.replace("self.variance_epsilon", "1e-6"), "LlamaRMSNorm", "the eps of a norm"),
    "a residual dropped": (
        ADDED, ADDED.replace(", residual=residual", ""), "LlamaDecoderLayer", "a residual is left out",
    ),
    "gate and up swapped": (
        "(self.gate_proj, self.up_proj)", "(self.up_proj, self.gate_proj)",
        "LlamaMLP", "it is what up_proj gives in place of what gate_proj gives",
    ),
    "the scaling forgotten": (
        "            scaling=self.scaling,\n            **kwargs", "            scaling=1.0,\n            **kwargs",
        "LlamaAttention", "the scaling of scores",
    ),
    "a mask that does not arrive": (
        "                attention_mask=causal_mask,", "                attention_mask=None,",
        "LlamaAttention", "the attention mask does not arrive",
    ),
    "a cast": (
        NORM, f"{NORM}.to(torch.bfloat16).to(hidden_states.dtype)",
        "LlamaRMSNorm", "rounded to torch.bfloat16: a cast",
    ),
}  # fmt: skip
"""What somebody might do to the file, the class it is in, and what is said of it."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "llama", "llama")


def edited(package: Path, copy: Path, old: str, new: str, *checks: str) -> Verdict:
    shutil.copytree(package, copy)
    file = copy / "modeling_llama.py"
    file.write_text(planted(file.read_text("utf-8"), old, new), "utf-8")
    return verify(upstream("llama"), copy, Options(quick=True, clean_process=False, others=False, checks=checks))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found_and_named(edit: str, package: Path, tmp_path: Path) -> None:
    old, new, kind, said = EDITS[edit]
    verdict = edited(package, tmp_path / "llama", old, new, ALONE, PADDED)
    found = verdict.divergence
    assert found is not None, verdict.reason
    assert found.kind == kind
    assert said in found.likely
    line = int(found.place.removeprefix("modeling_llama.py:"))
    lines = (tmp_path / "llama" / "modeling_llama.py").read_text("utf-8").splitlines()
    assert any("def forward(" in text for text in lines[line - 1 : line + 2])
    text = " ".join(render(verdict).split())
    assert f"computed in {found.place}" in text
    assert f"likely: {found.likely}" in text


def test_what_is_wrong_is_between_what_agrees_and_what_does_not(package: Path, tmp_path: Path) -> None:
    verdict = edited(package, tmp_path / "llama", *EDITS["the scaling forgotten"][:2], ALONE)
    assert verdict.divergence is not None
    text = " ".join(render(verdict).split())
    assert "goes wrong after v_proj, whose output agrees, and before o_proj, whose input does not" in text


def test_a_step_that_is_wrong_names_the_methods_that_make_it(package: Path, tmp_path: Path) -> None:
    old = "linear(attn_output, self.o_proj, residual=residual)"
    new = "linear(attn_output * (1.5 if skips_mask(cache) else 1), self.o_proj, residual=residual)"
    verdict = edited(package, tmp_path / "llama", old, new, STEP)
    assert "LlamaAttention.forward (modeling_llama.py:" in verdict.reason


def tensors(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def test_each_hypothesis_is_said_of_what_it_is_about() -> None:
    first, second, third = tensors(2, 5, 8)
    parts = {"gate": first, "up": second}
    right = functional.silu(first) * second
    said = {
        "1.5 times": likely(third, third * 1.5, [], {}, ""),
        "left out": likely(first + third, third, [first], {}, ""),
        "added twice": likely(first + third, first * 2 + third, [first], {}, ""),
        "what gate gives has another factor in the sum: -0.5": likely(
            third + first, third + first * 0.5, [], parts, ""
        ),
        "changed places": likely(right, functional.silu(second) * first, [], parts, ""),
        "silu of gate is left out": likely(right, first * second, [], parts, ""),
        "in place of": likely(first, second, [], parts, ""),
        "rounded to torch.float16": likely(third, third.half().double(), [], {}, ""),
        "each row is": likely(third, third * torch.linspace(1, 2, 5, dtype=torch.float64)[:, None], [], {}, ""),
        "without a causal mask": likely(third, third + hole(4), [], {}, ""),
        "the first token alone agrees": likely(third, third + hole(0), [], {}, ""),
        "only rows with padding differ": likely(third, third + row(), [], {}, "prefill, left padding"),
    }
    for wanted, found in said.items():
        assert wanted in found


def test_what_nothing_explains_is_explained_by_nothing() -> None:
    first, second, third = tensors(2, 5, 8)
    assert likely(first, second, [third], {"other": third}, "") == ""
    assert likely(first, second[:1], [], {}, "") == ""
    assert likely(first, first + row(), [], {}, "prefill, batch 3") == ""


def hole(place: int) -> torch.Tensor:
    """Noise at every token `[2, 5, 8]` but one."""
    noise = tensors(2, 5, 8)[1].clone()
    noise[:, place] = 0
    return noise


def row() -> torch.Tensor:
    """Noise in one row of two."""
    noise = tensors(2, 5, 8)[1].clone()
    noise[0] = 0
    return noise
