"""`add_norm`: which norms take part, and that every other one is called as it stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rewrite.runtime.core import backend
from rewrite.runtime.norms.add_norm import add_norm
from rewrite.runtime.norms.add_rms_norm import add_rms_norm


class RewrittenRMSNorm(LlamaRMSNorm):
    def add_forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon)


NORMS = {
    "rewritten": (lambda: RewrittenRMSNorm(64), None),
    "LayerNorm": (lambda: nn.LayerNorm(64), None),
    "LayerNorm without bias": (lambda: nn.LayerNorm(64, bias=False), None),
    "LayerNorm without affine": (lambda: nn.LayerNorm(64, elementwise_affine=False), None),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((3, 64)), "normalized_shape"),
    "original": (lambda: LlamaRMSNorm(64), "norm_without_add_forward"),
    "Identity": (lambda: nn.Identity(), "norm_without_add_forward"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_result_is_that_of_the_original_lines(name: str, dtype: torch.dtype) -> None:
    make, reason = NORMS[name]
    norm = make().to(dtype).requires_grad_(False)
    x, residual = torch.randn(2, 2, 3, 64).to(dtype)
    normed, summed = add_norm(x, residual, norm)
    assert torch.equal(summed, residual + x)
    assert torch.equal(normed, norm(residual + x))
    assert backend.fallbacks() == ({("add_norm", reason): 1} if reason else {})


def hooked(norm: nn.Module) -> None:
    norm.register_forward_hook(lambda module, inputs, output: output + 1.0)


def pre_hooked(norm: nn.Module) -> None:
    norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2.0,))


def offloaded(norm: nn.Module) -> None:
    forward = norm.forward
    norm.forward = lambda x: forward(x) + 1.0  # type: ignore[method-assign]


def parametrised(norm: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Tanh())


@pytest.mark.parametrize("observe", [hooked, pre_hooked, offloaded, parametrised])
def test_observed_norm_is_called(observe: object) -> None:
    norm = RewrittenRMSNorm(64).requires_grad_(False)
    observe(norm)  # type: ignore[operator]
    x, residual = torch.randn(2, 3, 64)
    normed, _ = add_norm(x, residual, norm)
    assert torch.equal(normed, norm(residual + x))
    assert backend.fallbacks() == {("add_norm", "norm_observed"): 1}


def test_gradients_are_those_of_the_original_lines() -> None:
    norm = RewrittenRMSNorm(64)
    gradients = []
    for fused in (False, True):
        torch.manual_seed(0)
        x, residual = (torch.randn(3, 64, requires_grad=True) for _ in range(2))
        summed = residual + x
        normed, summed = add_norm(x, residual, norm) if fused else (norm(summed), summed)
        (normed.sin() + summed.cos()).sum().backward()
        gradients.append((x.grad, residual.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_autocast_takes_the_torch_form() -> None:
    norm = nn.LayerNorm(64).requires_grad_(False)
    x, residual = torch.randn(2, 3, 64).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed, _ = add_norm(x, residual, norm)
        assert torch.equal(normed, norm(residual + x))
        assert normed.dtype == norm(residual + x).dtype
    assert backend.fallbacks() == {("add_layer_norm", "autocast"): 1}
