"""Weights with a scale for each block, layers and experts of them, for the tests of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_rewrite_runtime.linear.blocks import Blocks, _reference
from hf_rewrite_runtime.moe import block_experts as few
from hf_rewrite_runtime.moe.form import ExpertsForm, Gating, gated
from hf_rewrite_runtime.norms.rms_norm import rms_norm


def blocks(rows: int, cols: int, device: torch.device, kind: str, leading: tuple[int, ...] = ()) -> Blocks:
    if kind == "four":
        codes = torch.randint(0, 256, (*leading, rows, cols // 2), dtype=torch.uint8)
        exponents = torch.randint(119, 125, (*leading, rows, cols // 32), dtype=torch.uint8)
        return Blocks(codes.to(device), exponents.to(device), 1, 32)
    scale = torch.rand(*leading, -(-rows // 32), -(-cols // 32)) * 0.1 + 0.01
    if kind == "exponents":
        scale = torch.randint(119, 125, scale.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    codes = torch.randn(*leading, rows, cols).to(torch.float8_e4m3fn)
    return Blocks(codes.to(device), scale.to(device), 32, 32)


class FP8Linear(nn.Linear):
    """As transformers' looks from outside."""

    block_size = (32, 32)

    def __init__(self, weight: Blocks, bias: Tensor | None):
        rows, cols = weight.shape
        super().__init__(cols, rows, bias=False, device="meta")
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight.scale, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        raise AssertionError("a kernel from the Hub would be needed")


class Norm(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):  # what it computes is asked for
            return rms_norm(x, self.weight, 1e-6)
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight.double()).to(x.dtype)


SWISH = ExpertsForm(None, 1.7, 7.0, 1.0, interleaved=True, biased=True)
SILU = ExpertsForm(nn.SiLU())


def mixture(kind: str, form: ExpertsForm, device: torch.device, size: int = 64, inner: int = 32) -> few.BlockExperts:
    count = 3
    biases = (torch.randn(count, 2 * inner), torch.randn(count, size)) if form.biased else (None, None)
    gate_up, down = blocks(2 * inner, size, device, kind, (count,)), blocks(size, inner, device, kind, (count,))
    return few.BlockExperts(gate_up, down, tuple(None if b is None else b.to(device) for b in biases), form)


def by_definition(x: Tensor, index: Tensor, weights: Tensor, parts: few.BlockExperts, how: Gating) -> Tensor:
    gate_up, down = (_reference(weight, torch.float64) for weight in parts[:2])
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, slots in enumerate(index.tolist()):
        for slot, expert in enumerate(slots):
            both = gate_up[expert] @ x[token].double()
            both = both if parts.biases[0] is None else both + parts.biases[0][expert].double()
            halves = (both[::2], both[1::2]) if how.interleaved else both.chunk(2)
            result = down[expert] @ gated(*halves, how)
            result = result if parts.biases[1] is None else result + parts.biases[1][expert].double()
            out[token] += result * weights[token, slot].double() * how.scaling
    return out
