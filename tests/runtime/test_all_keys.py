"""Masks that a model makes itself while a decode step runs."""

from __future__ import annotations

import pytest
import torch

from rewrite.runtime.decode.all_keys import AllKeys


@pytest.mark.parametrize("sizes", [(2, torch.tensor(5)), ((2, torch.tensor(5)),)])
def test_a_mask_as_long_as_the_keys_has_a_column_for_every_slot(sizes):
    with AllKeys(8):
        assert torch.equal(torch.ones(*sizes, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))


@pytest.mark.parametrize("sizes", [(2, 5), ((2, 5),), (5,), (torch.tensor(5),), (torch.tensor(2), 5), (2, 5, 3)])
def test_other_ones_are_as_they_are_asked_for(sizes):
    expected = torch.ones(*sizes)
    with AllKeys(8):
        assert torch.equal(torch.ones(*sizes), expected)
        assert torch.zeros(2, torch.tensor(5)).shape == (2, 5)
