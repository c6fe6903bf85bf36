"""A model that computes in fp32 in every dtype may differ by what that costs itself, and by no more."""

from __future__ import annotations

import pytest
import torch

from rewrite.verify.judging.compare import Mismatch, near_exact
from rewrite.verify.judging.unrounded import only_rounds

TRUTH = torch.linspace(-3, 3, 400, dtype=torch.float64).view(1, 4, 100)


def off(by: float) -> torch.Tensor:
    """The truth with an error of that size in every element."""
    return TRUTH + by * torch.where(torch.arange(400).view_as(TRUTH) % 3 == 0, 1.0, -1.0)


@pytest.mark.parametrize(
    ("ours", "own", "rounds"),
    [(2e-6, -2e-6, True), (8e-6, -8e-6, True), (8e-6, -1e-6, False), (2e-6, 0.0, False), (1e-3, -1e-3, False)],
)
def test_a_difference_as_large_as_the_original_s_own_roundings(ours: float, own: float, rounds: bool) -> None:
    with pytest.raises(Mismatch) as found:
        near_exact({"logits": off(own)}, {"logits": off(ours)})
    assert only_rounds(found.value, off(own), TRUTH) is rounds


def test_texts_that_went_apart_say_nothing_of_roundings() -> None:
    mismatch = Mismatch("another cache came back")
    assert not only_rounds(mismatch, off(1e-6), TRUTH)
    assert not only_rounds(Mismatch("", {"max": 1e-7, "rms": 1e-8}), off(1e-6)[:, :2], TRUTH)
