"""The proof that a step can be captured: its rules catch what a capture refuses, and rewritten models pass them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import capture  # noqa: E402
from stream_rules import Refused, stream_rules  # noqa: E402

from hf_rewrite_runtime.cache.layers import INDEXED  # noqa: E402

X, INDEX, MASK = torch.arange(6.0), torch.tensor([1, 3]), torch.arange(6) > 2
REFUSED = {
    "item": lambda: X[0].item(),
    "truth": lambda: bool(MASK.any()),
    "int": lambda: torch.arange(INDEX[0], 5),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "unique": lambda: INDEX.unique(),
    "mask": lambda: X[MASK],
    "mask write": lambda: X.clone().__setitem__(MASK, X[:3]),
    "bincount": lambda: INDEX.bincount(),
    "repeats": lambda: X[:2].repeat_interleave(INDEX),
    "constant": lambda: torch.tensor([1.0], device=X.device),
    "classes": lambda: torch.nn.functional.one_hot(INDEX),
}
ALLOWED = {
    "arange": lambda: torch.arange(3, device=X.device) + INDEX[0],
    "index": lambda: X[INDEX],
    "fill": lambda: X.clone().__setitem__(MASK, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "scalar": lambda: X * torch.tensor(2.0),
    "full": lambda: torch.full((3,), 1.0, device=X.device),
    "one_hot": lambda: torch.nn.functional.one_hot(INDEX, num_classes=5),
    "topk": lambda: X.topk(2).indices,
    "where": lambda: torch.where(MASK, X, -X),
}


@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_capture_refuses_is_refused(step):
    step()
    with pytest.raises(Refused) as caught, stream_rules():
        step()
    assert caught.value.where.startswith("test_capture.py:")


@pytest.mark.parametrize("step", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_a_capture_allows_is_allowed(step):
    with stream_rules():
        step()


def checked(name, folder):
    """Check one class in a process of its own: a package registers its operators once a process."""
    (found,) = capture.in_processes(capture.check, [(name, "cpu", folder)], 1)
    return found


CLEAN = [
    "LlamaForCausalLM",
    "OPTForCausalLM",
    "MixtralForCausalLM",
    "TrOCRForCausalLM",
    pytest.param(
        "DeepseekV32ForCausalLM",
        marks=pytest.mark.skipif(INDEXED is None, reason="this transformers has no layers with an indexer's keys"),
    ),
]


@pytest.mark.parametrize("name", CLEAN)
def test_rewritten_models_decode_under_the_rules(name, tmp_path):
    assert capture.generate(name, tmp_path) == {"class": name, "skip": None}
    found = checked(name, tmp_path)
    assert {outcome for side, outcome in found.items() if side.startswith("after")} == {"clean"}


@pytest.mark.parametrize(
    ("planted", "outcome"),
    [
        ("inputs_embeds.sum().item()", "refused"),
        ("position_ids = position_ids + position_ids.clamp(max=1)", "other logits"),
    ],
)
def test_a_planted_bug_is_caught(planted, outcome, tmp_path):
    capture.generate("LlamaForCausalLM", tmp_path)
    file = tmp_path / "rewritten_LlamaForCausalLM" / "modeling_llama.py"
    line = "        hidden_states = inputs_embeds\n"
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, f"{line}        {planted}\n"))
    found = checked("LlamaForCausalLM", tmp_path)
    assert found["before"] == "clean"
    assert found["after"].startswith(outcome)
