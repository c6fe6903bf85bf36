"""A sum behind a block comes with the norm that read it before: the same numbers, and nothing is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_rewrite_runtime.norms import sum_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

WIDTH = 16


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.calls = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.calls += isinstance(hidden_states, Tensor)
        return rms_norm(hidden_states, self.weight, 1e-6)


@pytest.fixture
def parts() -> tuple[nn.Linear, Norm, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH), Norm(), torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)


@torch.no_grad()
def test_the_second_sum_comes_with_its_norm(parts: Any) -> None:
    projection, norm, product, residual = parts
    expected = norm(residual + product)
    for calls in (1, 1):  # its own call, and then none more
        total = sum_norm.added(product, residual, projection)
        assert torch.equal(total, residual + product)
        assert torch.equal(sum_norm.normed(total, norm), expected)
        assert norm.calls == 1 + calls
    assert sum_norm._LAST.normed is None


@torch.no_grad()
@pytest.mark.parametrize("change", ["in_place", "other_tensor", "other_norm", "hook"])
def test_what_is_changed_on_the_way_is_normed_anew(parts: Any, change: str) -> None:
    projection, norm, product, residual = parts
    for _ in range(2):
        sum_norm.normed(sum_norm.added(product, residual, projection), norm)
    total, reader = sum_norm.added(product, residual, projection), norm
    if change == "in_place":
        total.mul_(2)
    elif change == "other_tensor":
        total = total * 2
    elif change == "other_norm":
        reader = Norm()
    else:
        reader.register_forward_hook(lambda module, given, output: output + 1)
        total = sum_norm.added(product, residual, projection)
    assert torch.equal(sum_norm.normed(total, reader), reader(total))


def test_gradients_take_the_plain_sum(parts: Any) -> None:
    projection, norm, product, residual = parts
    with torch.no_grad():
        for _ in range(2):
            sum_norm.normed(sum_norm.added(product, residual, projection), norm)
    calls = norm.calls
    total = sum_norm.added(product.requires_grad_(), residual, projection)
    sum_norm.normed(total, norm).sum().backward()
    assert norm.calls == calls + 1
    assert product.grad is not None


@torch.no_grad()
def test_a_norm_that_nobody_reads_goes_with_its_sum(parts: Any) -> None:
    projection, norm, product, residual = parts
    for _ in range(2):
        sum_norm.normed(sum_norm.added(product, residual, projection), norm)
    total = sum_norm.added(product, residual, projection)
    kept = weakref.ref(sum_norm._LAST.normed)  # type: ignore[arg-type]
    assert kept() is not None
    assert not total.__dict__  # a hidden state that somebody saves is a plain tensor
    del total
    gc.collect()
    assert kept() is None
