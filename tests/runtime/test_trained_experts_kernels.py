"""Experts that make their own gradients by grouped products, against fp64 and against what autograd makes of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from differentiated import all_as_exact, gradients
from experts_of import Mixture, every_pair
from tolerances import assert_same_gradient
from torch import Tensor
from torch.nn import functional as F

from hf_rewrite_runtime.core import backend

experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
trained = importlib.import_module("hf_rewrite_runtime.moe.experts_autograd")

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

ACTIVATIONS = {
    "silu": torch.nn.SiLU(),
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU(approximate="tanh"),
    "relu": torch.nn.ReLU(),
}
grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.10 brought grouped products")
dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


def mixture(device: torch.device, tokens: int, count: int, top_k: int, size: int, inner: int) -> list[Tensor]:
    """Return tokens, weights of their experts, weights of experts, of which the last has no tokens, and index."""
    shapes = ((tokens, size), (count, 2 * inner, size), (count, size, inner))
    x, gate_up, down = (torch.randn(s, device=device) / (s[-1] if len(s) > 2 else 1) ** 0.5 for s in shapes)
    index = torch.rand(tokens, count - 1, device=device).topk(top_k, -1).indices
    return [x, torch.rand(tokens, top_k, device=device), gate_up, down, index]


DRAWS = 16
"""Of one token, whose share of the mean error is that of few roundings."""
MIXTURES = [(1, 3, 1, 16, 8), (33, 6, 2, 24, 40), (7, 9, 8, 64, 72)]


@grouped
@dtypes
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", MIXTURES, ids=str)
def test_experts(device: torch.device, poisoned: None, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """The sum and four gradients, also those of weights of an expert that nobody chose."""
    if not INTERPRETED and dtype != torch.bfloat16:
        pytest.skip("torch's grouped product asks the host where a group ends, but for bfloat16")
    if kind != "silu" and shape != MIXTURES[1]:
        pytest.skip("one shape for the others")
    drawn = [_results(device, shape, kind, dtype) for _ in range(DRAWS if shape[0] == 1 else 1)]
    pooled = (
        [torch.cat(list(map(torch.flatten, same))) for same in zip(*of, strict=True)]
        for of in zip(*drawn, strict=True)
    )
    all_as_exact(*pooled)


def _results(device: torch.device, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return sum and gradients by autograd, by the kernels, and in fp64."""
    *inputs, index = mixture(device, *shape)
    inputs = [x.to(dtype) for x in inputs]
    mine = lambda x, w, gate_up, down: trained.trained_experts(x, index, w, gate_up, down, kind)
    plain = lambda *inputs: every_pair(*inputs, index, ACTIVATIONS[kind])
    theirs, ours, truth = ([form(*given), *gradients(form, given)] for form, given in (
        (plain, inputs), (mine, inputs), (plain, [x.double() for x in inputs])
    ))  # fmt: skip
    assert not ours[3][-1].any()
    assert not ours[4][-1].any()
    return [theirs, ours, truth]


@grouped
def test_experts_wider_than_a_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    *inputs, index = mixture(device, 9, 4, 2, 16, 40)
    dtype = KERNEL_DTYPES[-1] if not INTERPRETED else torch.float32
    mine = lambda x, w, gate_up, down: trained.trained_experts(x, index, w, gate_up, down, "silu")
    whole = gradients(mine, [x.to(dtype) for x in inputs])
    monkeypatch.setattr(trained.row_tiles, "tile", lambda size, count: (2, 16, 1))
    for walked, at_once in zip(gradients(mine, [x.to(dtype) for x in inputs]), whole, strict=True):
        assert_same_gradient(at_once, walked)


@grouped
def test_experts_whose_weights_are_frozen_or_in_fp32(device: torch.device) -> None:
    """As a router's are in several families, with the gradients of the rest alone."""
    x, weights, gate_up, down, index = mixture(device, 9, 4, 2, 16, 24)
    dtype = KERNEL_DTYPES[-1]
    module = Mixture(gate_up.to(dtype), down.to(dtype)).requires_grad_(False)
    given = [x.to(dtype).requires_grad_(), weights.requires_grad_()]
    ours = torch.autograd.grad(experts.fused_experts(given[0], module, index, given[1]).square().sum(), given)
    assert not backend.fallbacks()
    out = module.float()(given[0].float(), index, given[1]).to(dtype)
    theirs = torch.autograd.grad(out.square().sum(), given)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=0.02, atol=0.02)


def test_experts_that_are_watched_are_called(device: torch.device) -> None:
    x, weights, gate_up, down, index = mixture(device, 9, 4, 2, 16, 24)
    module = Mixture(torch.nn.Parameter(gate_up), torch.nn.Parameter(down))
    seen: list[int] = []
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    experts.fused_experts(x, module, index, weights).sum().backward()
    assert seen
    handle.remove()
    wanted = module.down_proj.grad.clone()
    module.zero_grad()
    experts.fused_experts(x, module, index, weights).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(module.down_proj.grad, wanted)


@grouped
def test_experts_keep_gate_and_up_alone(device: torch.device) -> None:
    """Besides what is there anyway, and numbers."""
    *inputs, index = mixture(device, 9, 4, 2, 16, 24)
    leaves = [x.to(KERNEL_DTYPES[-1] if not INTERPRETED else torch.float32).requires_grad_() for x in inputs]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        trained.trained_experts(leaves[0], index, *leaves[1:], "silu")
    there = {x.data_ptr() for x in leaves}
    assert [tuple(x.shape) for x in kept if x.is_floating_point() and x.data_ptr() not in there] == [(18, 48)]


def forgets_the_share(*given: Any) -> Any:
    of_both, shared, of_weights = trained_gradients(*given)
    return of_both, shared / given[2].reshape(-1)[given[3]].unsqueeze(-1), of_weights


def swaps_gate_and_up(*given: Any) -> Any:
    of_both, *others = trained_gradients(*given)
    return of_both.roll(of_both.shape[1] // 2, 1), *others


def unsorted_weights(*given: Any) -> Any:
    *others, of_weights = trained_gradients(*given)
    return *others, of_weights.reshape(-1)[given[3]].view_as(of_weights)


trained_gradients = trained.gradients_of_gates


@grouped
@pytest.mark.parametrize("bug", [forgets_the_share, swaps_gate_and_up, unsorted_weights])
def test_planted_bug_in_experts_is_caught(
    device: torch.device, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    *inputs, index = mixture(device, 9, 4, 2, 16, 24)
    inputs = [x.to(KERNEL_DTYPES[-1] if not INTERPRETED else torch.float32) for x in inputs]
    plain = lambda *inputs: every_pair(*inputs, index, ACTIVATIONS["silu"])
    theirs = gradients(plain, inputs)
    exact = gradients(plain, [x.double() for x in inputs])
    monkeypatch.setattr(trained, "gradients_of_gates", bug)
    ours = gradients(lambda x, w, gate_up, down: trained.trained_experts(x, index, w, gate_up, down, "silu"), inputs)
    with pytest.raises(AssertionError):
        all_as_exact(theirs, ours, exact)
