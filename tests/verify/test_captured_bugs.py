"""Every bug planted into the captured forward is caught by its check."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers.models.bert import modeling_bert
from transformers.models.siglip import modeling_siglip

from rewrite.verify import Options
from rewrite.verify.calls import captured_replays
from rewrite.verify.calls.captured_replays import captured_checks
from rewrite.verify.judging.checks import run_check
from rewrite.verify.judging.verdict import Check
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Pair, Workbench
from rewrite.verify.models.subjects import Subject

from .copies import generated, plant

BUGS = {
    "outputs handed out as they are": ("_runtime", "group[0].clone()", "group[0]"),
    "inputs not copied in": ("_runtime", "own.copy_(given)", "pass"),
    "arguments told apart by shape alone": (
        "_runtime",
        "return tensor.shape, tensor.stride(), tensor.dtype",
        "return ()",
    ),
    "a number drawn where none is": (
        "_runtime",
        "(before, start) = self._now(), self._before",
        "(before, start) = self._now(), (None, self._before[1])",
    ),
    "a hook unseen": ("_runtime", "(self._filled if registry else self._empty).append(registry)", "pass"),
    "a part of the model unseen": (
        "_runtime",
        "for registry in [state[name] for name in _REGISTRIES if name in state]:",
        "for registry in []:",
    ),
    "outputs of zeros divided by": (
        "_runtime",
        "return apart / norm if norm else apart",
        "return apart / norm",
    ),
    "outputs of another form": (
        "_runtime",
        "with_tensors(self._value, instead)",
        "with_tensors(self._value, torch.zeros_like)",
    ),
}


PADDED = {
    "the mask of padding hides nothing": ("return Fill(0, 1)", "return Fill(1, 1)"),
    "the padding is kept": (
        "for dim, size in part:\n        tensor = tensor.narrow(dim, 0, size)",
        "for dim, size in part:\n        tensor = tensor.narrow(dim, tensor.shape[dim] - size, size)",
    ),
}
"""Bugs in how texts are padded, which the proof of a bucket sees; the check sees them where that is left out."""
UNPADDED = {
    "an output in another dtype": (
        "torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)",
        "torch.empty_permuted(tensor.shape, order, device=tensor.device)",
    ),
    "every output taken for one that shares memory": ("            if len(group) == 1:\n", "            if False:\n"),
    "the lengths the wrong way round": ("Cut(_dims(wanted, found, text),", "Cut(_dims(found, wanted, text),"),
}
"""Bugs for which texts have a graph each, which computes the same."""
PROOF = (
    ("def _agree(self, ", "def _agree(self, *_):\n        return\n\n    def _agrees(self, "),
    ("if not all(map(equal, one, other)):", "if False:"),
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "siglip", "siglip")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("packages") / "bert", "bert")


def checked(package: Path, original: type = modeling_siglip.SiglipVisionModel) -> Check:
    rewritten = getattr(loaded_sides.load(loaded_sides.locate(package)), original.__name__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench = Workbench(
        Subject(original, rewritten, False), small_variants(original, False, {})[:1], Options(device=device)
    )
    (check,) = captured_checks(bench)
    return run_check(check)


def test_the_captured_forward_is_checked(package: Path) -> None:
    check = checked(package)
    assert (check.status, check.figures["replays"]) == ("passed", 6)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_captured_forward_is_caught(name: str, package: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(package, broken)
    plant(broken, *BUGS[name])
    assert checked(broken).status == "failed"


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("proved", [True, False])
def test_a_bug_in_padded_texts_is_refused_or_caught(name: str, proved: bool, texts: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(texts, broken)
    for bug in (PADDED[name], *(() if proved else PROOF)):
        plant(broken, "_runtime", *bug)
    assert_refused_or_caught(checked(broken, modeling_bert.BertModel), refused=proved)


@pytest.mark.parametrize("name", UNPADDED)
def test_texts_that_are_padded_no_more_are_noticed(name: str, texts: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(texts, broken)
    plant(broken, "_runtime", *UNPADDED[name])
    assert_refused_or_caught(checked(broken, modeling_bert.BertModel), refused=True)


def assert_refused_or_caught(check: Check, refused: bool) -> None:
    """What the package refuses of itself computes the same; on a CPU it is seen that it need not."""
    if refused and torch.cuda.is_available():
        assert check.status == "passed"
        return
    assert check.status == "failed"
    assert ("may be padded to share a graph" in check.detail) == refused


def test_an_original_that_counts_its_calls_is_copied_for_its_truth() -> None:
    class Counts(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1
            return {"out": x * self.calls}

    model = Counts()
    compared = captured_replays._Compared(Pair(model, Counts()), "fp64 max")
    compared.call("call 0", {"x": torch.ones(2)})
    assert model.calls == 1
    assert [tensor.tolist() for tensor in compared._truth().values()] == [[1.0, 1.0]]
    assert compared.figures("counted")["counted max"] == 0
