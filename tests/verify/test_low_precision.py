"""The yardstick of low precision, for any class: what is further off in 16 bits than the original is found."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from rewrite.verify.breadth import OPTIONS
from rewrite.verify.calls import precision
from rewrite.verify.calls.precision import modules_alone
from rewrite.verify.calls.single_forward import ENOUGH, low_precision_alone
from rewrite.verify.judging.compare import Mismatch, near_exact
from rewrite.verify.judging.fp32_free_reference import only_rounds, roundings
from rewrite.verify.judging.low_precision_bound import compare
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants
from rewrite.verify.models.model_pair import Workbench
from rewrite.verify.models.subjects import paired

from .copies import planted, source_of, upstream, write_package

NORMED = "return self.weight * hidden_states.to(input_dtype)"
ROUNDED = """if input_dtype == torch.bfloat16:
            hidden_states = hidden_states.to(torch.float8_e4m3fn).to(torch.float32)
        return self.weight * hidden_states.to(input_dtype)"""


def bench_of(model: str, text: str, name: str, folder: Path) -> Workbench:
    package = write_package(folder / f"{model}_low_precision", model, text)
    loaded = loaded_sides.load(loaded_sides.locate(upstream(model))), loaded_sides.load(loaded_sides.locate(package))
    subject = next(found for found in paired(*loaded) if found.name == name)
    return Workbench(subject, small_variants(subject.original, subject.causal, {})[:1], OPTIONS)


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_copy_is_as_far_off_as_the_original(name: str, tmp_path: Path) -> None:
    figures = low_precision_alone(bench_of("llama", source_of("llama"), name, tmp_path))
    assert figures["bfloat16 bit-equal"] is True


def test_a_rounding_that_fp64_does_not_see_is_found(tmp_path: Path) -> None:
    text = planted(source_of("llama"), NORMED, ROUNDED)
    with pytest.raises(Mismatch, match="error"):
        low_precision_alone(bench_of("llama", text, "LlamaModel", tmp_path))


def errors(flipped: float, tokens: int, tensors: int = 20) -> dict[str, float | str | bool]:
    """Compare runs in which our side sends this share of the tokens to another expert, a few tokens a tensor."""
    generator = torch.Generator().manual_seed(0)
    truth = {f"step {i}": torch.randn(tokens, ENOUGH, generator=generator).double() for i in range(tensors)}
    own, new = (
        {name: value + 1e-3 * torch.randn(value.shape, generator=generator) for name, value in truth.items()}
        for _ in range(2)
    )
    for name in list(new)[: round(flipped * tensors)]:
        new[name][0] += 1.0
    return dict(compare(truth, own, new, 2**-8, routed=True))


def test_routed_tokens_that_a_rounding_flips_are_left_out_whatever_tensor_they_stand_in() -> None:
    errors(0.1, tokens=1)
    with pytest.raises(Mismatch, match="largest error"):
        errors(0.2, tokens=1)


ROOT = "hidden_states * torch.rsqrt(variance + self.variance_epsilon)"
DIVIDED = "hidden_states / torch.sqrt(variance + self.variance_epsilon)"
SHORT = "hidden_states * torch.rsqrt(variance + self.variance_epsilon).half().float()"


def divided_bench(root: str, folder: Path) -> Workbench:
    """Both sides scale by 1 + weight in fp32; the original divides by the root, the other one does what is given."""
    text = planted(source_of("llama"), NORMED, "return (hidden_states * (1.0 + self.weight.float())).to(input_dtype)")
    packages = [
        write_package(folder / f"llama_{i}", "llama", planted(text, ROOT, by)) for i, by in enumerate((DIVIDED, root))
    ]
    subject = next(
        one
        for one in paired(*(loaded_sides.load(loaded_sides.locate(p)) for p in packages))
        if one.name == "LlamaModel"
    )
    return Workbench(subject, small_variants(subject.original, subject.causal, {})[:1], OPTIONS)


def test_another_order_inside_a_module_that_casts_to_fp32_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = divided_bench(ROOT, tmp_path)
    assert float(modules_alone(bench, bench.base, "float32")["modules"]) > 1
    monkeypatch.setattr(precision, "unrounded", contextlib.nullcontext)
    with pytest.raises(Mismatch, match="the original's own is 0"):
        modules_alone(bench, bench.base, "float32")


def test_too_few_bits_inside_a_module_that_casts_to_fp32_are_found(tmp_path: Path) -> None:
    bench = divided_bench(SHORT, tmp_path)
    with pytest.raises(Mismatch, match="largest error"):
        modules_alone(bench, bench.base, "float32")


TRUTH = torch.linspace(-3, 3, 400, dtype=torch.float64).view(1, 4, 100)


def off(by: float) -> torch.Tensor:
    """The truth with an error of that size in every element."""
    return TRUTH + by * torch.where(torch.arange(400).view_as(TRUTH) % 3 == 0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("ours", "own", "rounds"),
    [(2e-6, -2e-6, True), (8e-6, -8e-6, True), (8e-6, -1e-6, False), (2e-6, 0.0, False), (1e-3, -1e-3, False)],
)
def test_a_difference_as_large_as_the_original_s_own_roundings(ours: float, own: float, rounds: bool) -> None:
    expected, found, truth = ({"logits": tensor} for tensor in (off(own), off(ours), TRUTH))
    with pytest.raises(Mismatch):
        near_exact(expected, found)
    assert only_rounds(expected, found, truth) is rounds
    same = {"scores": TRUTH}
    assert only_rounds(expected | same, found | same, truth | same) is rounds
    assert not only_rounds(expected | {"state": off(1e-6)}, found | {"state": off(8e-6)}, truth | {"state": TRUTH})


def test_texts_that_went_apart_say_nothing_of_roundings() -> None:
    expected, found = {"logits": off(1e-6)}, {"logits": off(-1e-6)}
    assert not only_rounds(expected, found, {"logits": TRUTH[:, :2]})
    assert not only_rounds(expected, found, {"logits": TRUTH, "another cache": TRUTH})


def test_errors_of_several_texts_are_pooled() -> None:
    found = [
        roundings({"logits": off(own)}, {"logits": off(ours)}, {"logits": TRUTH})
        for own, ours in ((-1e-6, 2e-6), (-4e-6, 2e-6))
    ]
    assert [errors is not None and errors.alone for errors in found] == [False, True]
    assert found[0] is not None
    assert found[1] is not None
    total = found[0] + found[1]
    assert total.alone
    assert total.own == pytest.approx(found[0].own + found[1].own)
    assert "the original's own roundings to fp32 make" in str(total)
