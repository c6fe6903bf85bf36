"""`add_norm`: which norms take part, and that every other one is called as it stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.linear.prologue import prologue_of
from hf_rewrite_runtime.norms.add_norm import add_norm
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.norm_form import Prologue
from hf_rewrite_runtime.norms.rms_norm import rms_norm


class RewrittenRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def add_forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon)


NORMS = {
    "rewritten": (lambda: RewrittenRMSNorm(64), None),
    "LayerNorm": (lambda: nn.LayerNorm(64), None),
    "LayerNorm without bias": (lambda: nn.LayerNorm(64, bias=False), None),
    "LayerNorm without affine": (lambda: nn.LayerNorm(64, elementwise_affine=False), None),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((3, 64)), "normalized_shape"),
    "RMSNorm": (lambda: nn.RMSNorm(64, eps=1e-5), None),
    "RMSNorm without affine": (lambda: nn.RMSNorm(64, eps=1e-5, elementwise_affine=False), None),
    "RMSNorm without eps": (lambda: nn.RMSNorm(64), "other_norm"),
    "RMSNorm of two dimensions": (lambda: nn.RMSNorm((3, 64), eps=1e-5), "other_norm"),
    "original": (lambda: LlamaRMSNorm(64), "other_norm"),
    "Identity": (lambda: nn.Identity(), "other_norm"),
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


class Doubled(RewrittenRMSNorm):
    """Replaces `forward` alone."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


class Called(RewrittenRMSNorm):
    """Does more than its `forward` when it is called."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1 + super().__call__(hidden_states)


def test_a_call_of_its_own_is_made() -> None:
    norm = Called(64).requires_grad_(False)
    x, residual = torch.randn(2, 3, 64)
    assert torch.equal(add_norm(x, residual, norm)[0], norm(residual + x))
    assert backend.fallbacks() == {("add_norm", "call_replaced"): 1}


@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_replaced_forward_is_called(layer_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    norm: nn.Module = Doubled(64)
    if layer_norm:
        norm = nn.LayerNorm(64)
        monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x + 1)
    x, residual = torch.randn(2, 3, 64)
    normed, _ = add_norm(x, residual, norm.requires_grad_(False))
    assert torch.equal(normed, norm(residual + x))
    reason = "norm_observed" if layer_norm else "other_norm"
    assert backend.fallbacks() == {("add_norm", reason): 1}


def test_a_forward_set_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RewrittenRMSNorm(64).requires_grad_(False)
    monkeypatch.setattr(RewrittenRMSNorm, "forward", lambda self, x: x + 1)
    x, residual = torch.randn(2, 3, 64)
    assert torch.equal(add_norm(x, residual, norm)[0], residual + x + 1)


def test_what_is_no_tensor_is_added_and_normed_as_it_stands() -> None:
    norm = RewrittenRMSNorm(64).requires_grad_(False)
    x = torch.randn(3, 64)
    normed, summed = add_norm(x, 0.5, norm)  # type: ignore[arg-type]
    assert torch.equal(summed, x + 0.5)
    assert torch.equal(normed, norm(x + 0.5))
    with pytest.raises(TypeError):
        add_norm(x, x, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        add_norm(x, x, nn.LayerNorm(1, elementwise_affine=False))


LAYOUTS = {
    "transposed": lambda: torch.randn(2, 64, 3).transpose(1, 2),
    "heads": lambda: torch.randn(2, 3, 4, 64).transpose(1, 2),
    "slice": lambda: torch.randn(2, 3, 100)[..., 10:74],
    "expanded": lambda: torch.randn(2, 1, 64).expand(2, 3, 64),
    "contiguous": lambda: torch.randn(2, 3, 64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("make", [RewrittenRMSNorm, nn.LayerNorm, lambda width: nn.RMSNorm(width, eps=1e-6)])
def test_results_are_laid_out_as_torch_lays_them_out(name: str, dtype: torch.dtype, make: type[nn.Module]) -> None:
    norm = make(64).to(dtype).requires_grad_(False)
    x = LAYOUTS[name]().to(dtype)
    for residual in (torch.randn(x.shape).to(dtype), x * 2):
        normed, summed = add_norm(x, residual, norm)
        wanted = residual + x
        assert summed.stride() == wanted.stride()
        assert normed.stride() == norm(wanted).stride()
        h = wanted.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        assert rms_norm(wanted, torch.ones(64), 1e-6).stride() == h.stride()


def test_an_eps_that_is_a_tensor_is_broadcast() -> None:
    x, eps = torch.randn(3, 64), torch.rand(3, 1)
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    assert torch.equal(rms_norm(x, None, eps), h)  # type: ignore[arg-type]
    assert backend.fallbacks() == {("rms_norm", "eps_is_a_tensor"): 1}


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


def test_a_norm_of_torch_is_a_prologue() -> None:
    norm = nn.RMSNorm(64, eps=1e-5).requires_grad_(False)
    assert prologue_of(norm) == Prologue(norm.weight, 1e-5, 0.0, True)
    norm.register_forward_hook(lambda *_: None)
    assert prologue_of(norm) is None
    assert prologue_of(nn.RMSNorm(64).requires_grad_(False)) is None

    class Doubled(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert prologue_of(Doubled(64, eps=1e-5).requires_grad_(False)) is None


def test_a_norm_of_torch_whose_forward_was_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: x + 1)
    norm, x = nn.RMSNorm(64, eps=1e-5).requires_grad_(False), torch.ones(2, 64)
    assert torch.equal(add_norm(x, x, norm)[0], x + x + 1)
    assert prologue_of(norm) is None
