"""Edits of a package that a user may mean: what the verifier finds of each, and whether that can be accepted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rewrite.cli import run
from rewrite.delivery.acceptable import failed, unacceptable
from rewrite.delivery.acceptance import Acceptance
from rewrite.errors import VerificationError
from rewrite.verify import Options, Verdict, render, verify
from rewrite.verify.models.loaded_sides import load, locate
from rewrite.verify.models.subjects import find_subjects

from .copies import generated

ORIGINAL = Path(__file__).parents[2] / "fixtures" / "models" / "modeling_tiny_llama.py"
NUMBERS = "fp64 sdpa, base: prefill, batch 1"
TRAINED = "after weights changed in place, base"
OWN = "itself: decode step"
CHECKS = ("state dict, base", "every model class is there", NUMBERS, TRAINED, "itself: captured forward", OWN)
MLP = "    def forward(self, hidden_states, *, norm=None, residual=None):\n"
LOGITS = "        logits = linear(outputs.last_hidden_state[:, kept, :], self.lm_head)\n"
HEAD = "        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n"
QUERY = "        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)\n"
TURNED = "            rotate=apply_rotary_pos_emb,\n        )\n"
LORA = """\
        self.lora_a = nn.Linear(config.hidden_size, 4, bias=False)
        self.lora_b = nn.Linear(4, SIZE, bias=False)
"""
BRANCH = """\
        more = self.lora_b(self.lora_a(hidden_states))
        query = query + more.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
"""
RIGHT = "config.num_attention_heads * self.head_dim"


def lora(size: str = RIGHT) -> tuple[tuple[str, str], ...]:
    return ((QUERY, QUERY + LORA.replace("SIZE", size)), (TURNED, TURNED + BRANCH))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meant") / "tiny"
    assert run([str(ORIGINAL), "--out", str(folder), "--no-verify", "--diff", "none", "--quiet"]) == 0
    return folder


def edited(package: Path, place: Path, *edits: tuple[str, str]) -> Path:
    """A copy of the package with pieces of its modeling file replaced."""
    folder = place / "tiny"
    shutil.copytree(package, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "modeling_tiny_llama.py"
    text = path.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return folder


def judged(folder: Path) -> Verdict:
    asked = {"quick": True, "keep_going": True, "itself": True, "clean_process": False, "compile": False}
    options = Options(others=False, configuration=False, checks=CHECKS, gates=("parity", "generation"), **asked)  # type: ignore[arg-type]
    return verify(ORIGINAL, folder, options)


def status(verdict: Verdict, name: str) -> tuple[str, str]:
    return next((c.status, c.failure) for gate in verdict.gates for c in gate.checks if c.name == name)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (((TURNED, TURNED + BRANCH),), r"could not run.*AttributeError: .*no attribute 'lora_b' \(modeling_tiny"),
        (lora("7"), r"could not run.*RuntimeError: unflatten"),
        (
            ((MLP, MLP.replace("self, ", "self, scale, ")),),
            "could not run.*TypeError: .*missing 1 required positional",
        ),
        (((LOGITS, LOGITS + "        (\n"),), r"^a check could not run.*modeling_tiny_llama.py:\d+ does not parse"),
        ((("import torch\n", "import torch\nimport no_such_library\n"),), "does not import: ModuleNotFoundError"),
    ],
)
def test_what_could_not_run_cannot_be_accepted(
    package: Path, tmp_path: Path, edits: tuple[tuple[str, str], ...], says: str
) -> None:
    verdict = judged(edited(package, tmp_path, *edits))
    assert re.search(says, unacceptable(verdict)), unacceptable(verdict)
    assert "RAISED" in render(verdict)


def test_a_figure_can_be_accepted_and_holds_what_is_computed(package: Path, tmp_path: Path) -> None:
    """Zeros are as far from the original as a clamp may be: size and cosine tell them apart."""
    clamped = judged(edited(package, tmp_path / "a", (LOGITS, LOGITS + "        logits = logits.clamp(-1, 1)\n")))
    assert (status(clamped, NUMBERS), unacceptable(clamped)) == (("failed", "differs"), "")
    accepted = Acceptance("", {}, "", failed(clamped), {}, {"parity": ()}, quick=True)
    assert accepted.refused(clamped) == []
    for number, worse in enumerate((" * 0", ".roll(1, -1)", " * 5")):
        edit = (LOGITS, LOGITS + f"        logits = logits.clamp(-1, 1){worse}\n")
        refused = accepted.refused(judged(edited(package, tmp_path / str(number), edit)))
        assert any(NUMBERS in said for said in refused), worse


def test_a_branch_of_new_parameters_adds_nothing_beside_the_original(package: Path, tmp_path: Path) -> None:
    """Its zeros leave every number as it is; random values show that a step does not have it."""
    verdict = judged(edited(package, tmp_path, *lora()))
    assert status(verdict, "state dict, base") == ("failed", "wrong")
    for name in (NUMBERS, TRAINED, "itself: captured forward"):
        assert status(verdict, name) == ("passed", ""), name
    assert unacceptable(verdict) == ""  # the step runs what the edit says


def test_a_new_scale_is_the_one_that_its_class_begins_with(package: Path, tmp_path: Path) -> None:
    scale = (HEAD, HEAD + "        self.scale = nn.Parameter(torch.ones(config.vocab_size))\n")
    verdict = judged(edited(package, tmp_path, scale, (LOGITS, LOGITS + "        logits = logits * self.scale\n")))
    for name in (NUMBERS, TRAINED, "itself: captured forward", OWN):
        assert status(verdict, name) == ("passed", ""), name
    assert unacceptable(verdict) == ""


def test_a_step_that_is_not_its_forward_is_no_edit(package: Path, tmp_path: Path) -> None:
    output = "        return linear(attended.flatten(-2), self.o_proj, residual=residual), weights\n"
    alone = "        attended = attended * 1.001 if is_decode_step(past_key_values) else attended\n"
    imported = ("import skips_mask", "import is_decode_step, skips_mask")
    verdict = judged(edited(package, tmp_path, (output, alone + output), imported))
    assert status(verdict, OWN)[0] == "failed"
    assert "TinyLlamaAttention.forward" in unacceptable(verdict)


def test_a_renamed_class_is_found_and_compared(package: Path, tmp_path: Path) -> None:
    folder = edited(package, tmp_path, ("TinyLlamaForCausalLM", "Mine"))
    init = folder / "__init__.py"
    init.write_text(init.read_text().replace("TinyLlamaForCausalLM", "Mine"))
    verdict = judged(folder)
    assert (status(verdict, NUMBERS), status(verdict, OWN)) == (("passed", ""), ("passed", ""))
    assert "TinyLlamaForCausalLM is called Mine" in render(verdict)
    assert unacceptable(verdict) == ""


@pytest.fixture(scope="module")
def two_methods(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("two_methods") / "phi", "phi")


@pytest.mark.parametrize(
    ("old", "new", "count", "said"),
    [
        ("scaling=self.scaling", "scaling=0.5", 1, "PhiAttention.forward was edited, and PhiAttention"),
        (
            "layer_idx, scaling=self.scaling",
            "layer_idx, scaling=0.5",
            1,
            "PhiAttention.decode_residual was edited, and",
        ),
        ("scaling=self.scaling", "scaling=0.5", 2, ""),
        ("        attn_output = self.dense(", "        # why\n        attn_output = self.dense(", 1, ""),
        ("self.scaling = ", "self.scaling = 2 * ", 1, ""),
    ],
)
def test_a_check_says_that_one_of_two_methods_was_edited(
    two_methods: Path, tmp_path: Path, old: str, new: str, count: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "phi"
    shutil.copytree(two_methods, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "modeling_phi.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, count))
    run(["check", str(folder)])
    out = " ".join(capfd.readouterr().out.split())
    assert (said in out, "was edited, and" in out) == (True, bool(said)), out


def test_which_class_is_the_main_one_may_have_to_be_said(package: Path, tmp_path: Path) -> None:
    folder = edited(
        package, tmp_path, ("TinyLlamaForCausalLM", "Mine"), ("__all__ = [", "class Other(Mine): ...\n\n\n__all__ = [")
    )
    init = folder / "__init__.py"
    init.write_text(init.read_text().replace("TinyLlamaForCausalLM", "Mine"))
    sides = load(locate(ORIGINAL)), load(locate(folder))
    with pytest.raises(VerificationError, match="it may be Mine or Other, say which"):
        find_subjects(*sides)
    assert find_subjects(*sides, "Mine").main.rewritten.__name__ == "Mine"
    with pytest.raises(VerificationError, match="no model class Nobody"):
        find_subjects(*sides, "Nobody")
