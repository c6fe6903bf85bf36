"""What a model holds is compared in a form that is equal for both sides, whatever it is."""

from __future__ import annotations

import pytest
import torch

from rewrite.verify.state.declarations import comparable

KINDS = (torch.float16, torch.device("cpu"), torch.strided, torch.finfo(torch.float16), torch.Size([2]), {"a": len})


@pytest.mark.parametrize("value", KINDS, ids=str)
def test_every_kind_of_value_is_comparable(value: object) -> None:
    assert comparable(value) == comparable(value)


def test_values_without_attributes_of_their_own_differ() -> None:
    assert comparable(torch.float16) != comparable(torch.bfloat16)
    assert comparable(torch.device("cpu")) != comparable(torch.device("meta"))
