"""The error of one tensor: how large, and where; of equal ones too, which are not looked through."""

from __future__ import annotations

import pytest
import torch

from rewrite.verify.judging.compare import Mismatch, measure
from rewrite.verify.judging.low_precision_bound import compare
from rewrite.verify.state.declarations import comparable

INFINITE, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("index", [(0, 0, 0), (1, 2, 3), (1, 0, 2)])
@pytest.mark.parametrize("wrong", [5.0, INFINITE, NAN])
def test_the_largest_error_is_found_where_it_is(index: tuple[int, ...], wrong: float) -> None:
    expected = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    found = expected.clone()
    found[index] = expected[index] + wrong
    error = measure("logits", expected, found)
    assert error.index == index
    assert error.max == (5.0 if wrong == 5.0 else INFINITE)
    assert error.rms == (pytest.approx(5 / 24**0.5) if wrong == 5.0 else INFINITE)
    assert (error.expected, error.scale) == (float(expected[index]), 23.0)


@pytest.mark.parametrize("value", [1.0, NAN, INFINITE])
def test_equal_tensors_have_no_error_and_keep_their_scale(value: float) -> None:
    expected = torch.tensor([[2.0, value], [-4.0, 0.0]])
    error = measure("logits", expected, expected.clone())
    assert (error.max, error.rms, error.index, error.scale) == (0.0, 0.0, (0, 0), 4.0)


def test_a_tensor_of_another_shape_is_no_match() -> None:
    with pytest.raises(Mismatch, match=r"logits has shape \[3\], expected \[2\]"):
        measure("logits", torch.zeros(2), torch.zeros(3))
    plain = {"logits": torch.ones(2, 3)}
    with pytest.raises(Mismatch, match=r"shape \[3, 2\]"):
        compare(plain, plain, {"logits": torch.ones(3, 2)}, 1e-3, routed=False)


KINDS = (torch.float16, torch.device("cpu"), torch.strided, torch.finfo(torch.float16), torch.Size([2]), {"a": len})


@pytest.mark.parametrize("value", KINDS, ids=str)
def test_every_kind_of_value_is_comparable(value: object) -> None:
    assert comparable(value) == comparable(value)


def test_values_without_attributes_of_their_own_differ() -> None:
    assert comparable(torch.float16) != comparable(torch.bfloat16)
    assert comparable(torch.device("cpu")) != comparable(torch.device("meta"))
