"""A model that computes in fp32 in every dtype may differ by what that costs itself, and by no more."""

from __future__ import annotations

import pytest
import torch

from rewrite.verify.judging.compare import Mismatch, near_exact
from rewrite.verify.judging.fp32_free_reference import only_rounds, roundings

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
