"""Weights with a scale for each block, and many tokens sorted by expert: every code, and sums against fp64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from conftest import INTERPRETED
from torch import Tensor, nn

from rewrite.runtime.core import backend
from rewrite.runtime.core.launch import Target
from rewrite.runtime.fp8.format import encode
from rewrite.runtime.moe import block_experts as few
from rewrite.runtime.moe.form import ExpertsForm, Gating, gated, gating
from rewrite.runtime.moe.grouped import grouped_experts
from rewrite.runtime.products import block_linear
from rewrite.runtime.products.blocks import Blocks, _reference, dequantized, widened
from rewrite.runtime.products.linear import gated_linear, linear
from rewrite.runtime.products.prologue import Prologue

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
experts = importlib.import_module("rewrite.runtime.moe.experts")
FORMATS = {torch.float8_e4m3fn: False, torch.float8_e4m3fnuz: True}


@triton.jit
def _decode(codes_ptr, out_ptr, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, widened(tl.load(codes_ptr + at), True, FNUZ))


@triton.jit
def _encode(numbers_ptr, out_ptr, SIZE: tl.constexpr, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, encode(tl.load(numbers_ptr + at), FNUZ))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_code_of_8_bits_is_decoded(dtype: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    got = torch.full((256,), torch.nan, device=device)
    _decode[(1,)](codes, got, FORMATS[dtype])
    wanted = codes.view(dtype).float()
    no_number = [0x80] if FORMATS[dtype] else [0x7F, 0xFF]
    assert wanted.isnan().nonzero().flatten().tolist() == no_number
    assert got[no_number].abs().tolist() == ([0.0] if FORMATS[dtype] else [480.0, 480.0])  # blocks.py says so
    number = ~wanted.isnan()
    assert torch.equal(got[number], wanted[number])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_number_between_two_codes_is_rounded(dtype: torch.dtype, device: torch.device) -> None:
    """All numbers of the format, halfway between neighbours, and next to these on either side."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    middle = (numbers[1:] + numbers[:-1]) / 2
    below, above = (torch.nextafter(middle, torch.full_like(middle, far)) for far in (-1e9, 1e9))
    given = torch.cat((numbers, middle, below, above))
    padded = torch.zeros(1024)
    padded[: given.numel()] = given
    codes = torch.zeros(1024, dtype=torch.uint8, device=device)
    _encode[(1,)](padded.to(device), codes, 1024, FORMATS[dtype])
    assert torch.equal(codes.cpu(), padded.to(dtype).view(torch.uint8))


def test_every_code_of_4_bits_times_every_exponent(device: torch.device) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    row = codes | codes.flip(0) << 4
    exponents = torch.arange(256, dtype=torch.uint8)[:, None]
    weight = Blocks(row.repeat(256, 1).to(device), exponents.to(device), 1, 32)
    assert torch.equal(dequantized(weight, torch.float32), _reference(weight, torch.float64).float())


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


@pytest.mark.parametrize("kind", ["eight", "exponents"])
def test_weights_are_dequantised(kind: str, device: torch.device) -> None:
    weight = blocks(33, 80, device, kind)
    assert torch.equal(dequantized(weight, torch.float32), _reference(weight, torch.float64).float())


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

    def prologue(self) -> Prologue:
        return Prologue(self.weight, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight.double()).to(x.dtype)


@pytest.mark.parametrize(("count", "kind"), [(1, "eight"), (5, "eight"), (5, "exponents"), (40, "eight")])
def test_products(count: int, kind: str, device: torch.device, poisoned: None) -> None:
    dtype = torch.float16 if count == 5 else torch.float32
    rows, cols = 32, 80
    layers = nn.ModuleList(FP8Linear(blocks(rows, cols, device, kind), torch.randn(rows, device=device)) for _ in "ab")
    for layer in layers:
        layer.bias.data = layer.bias.data.to(dtype)
    block_linear.BlockLinear.adopt(layers)
    assert all(type(layer).__name__ == "FP8Linear" and block_linear.is_block_linear(layer) for layer in layers)
    x, residual = (torch.randn(count, 1, size, device=device).to(dtype) for size in (cols, rows))
    norm = Norm((torch.rand(cols, device=device) + 0.5).to(dtype))
    dense = [_reference(block_linear.blocks_of(layer), torch.float64) for layer in layers]
    wanted = [x.double() @ weight.T + layer.bias.double() for weight, layer in zip(dense, layers, strict=True)]
    bound = 2e-6 if dtype == torch.float32 else 2e-3

    def near(got: Tensor, wanted: Tensor) -> None:
        assert got.dtype == dtype
        assert (got.double() - wanted).norm() <= bound * wanted.norm()

    near(layers[0](x), wanted[0])
    near(linear(x, layers[0], residual=residual), wanted[0] + residual.double())
    normed = norm(x).double()
    near(linear(x, layers[1], norm=norm), normed @ dense[1].T + layers[1].bias.double())
    gate, up = (normed @ weight.T + layer.bias.double() for weight, layer in zip(dense, layers, strict=True))
    near(gated_linear(x, tuple(layers), nn.SiLU(), norm=norm), nn.functional.silu(gate) * up)
    assert not backend.fallbacks() or count == 40


def test_a_cast_model_is_the_original_s(device: torch.device) -> None:
    layer = nn.ModuleList([FP8Linear(blocks(32, 32, device, "eight"), None)])
    block_linear.BlockLinear.adopt(layer)
    layer.float()
    with pytest.raises(AssertionError, match="Hub"):
        layer[0](torch.randn(1, 32, device=device))


SWISH = ExpertsForm(None, 1.7, 7.0, 1.0, interleaved=True, biased=True)
SILU = ExpertsForm(nn.SiLU())


def mixture(kind: str, form: ExpertsForm, device: torch.device) -> few.BlockExperts:
    count, size, inner = 3, 64, 32
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


@pytest.mark.parametrize(("kind", "form"), [("eight", SILU), ("four", SWISH)], ids=["eight, silu", "four, swish"])
@pytest.mark.parametrize("many", [False, True])
def test_experts(kind: str, form: ExpertsForm, many: bool, device: torch.device, poisoned: None) -> None:
    parts = mixture(kind, form, device)
    tokens = 20 if many else 1
    x = torch.randn(tokens, 64, device=device) * 0.1
    index = torch.stack([torch.randperm(3)[:2] for _ in range(tokens)]).to(device)
    weights, residual = torch.rand(tokens, 2, device=device), torch.randn(tokens, 64, device=device)
    how = gating(form, 0.5)
    assert how is not None
    wanted = by_definition(x, index, weights, parts, how) + residual.double()
    got = few.block_experts(x, parts, index, weights, residual, 0.5, many)
    assert (got.double() - wanted).norm() <= 2e-6 * wanted.norm()
    with backend.use_backend("reference"):
        plainly = few.block_experts(x, parts, index, weights, residual, 0.5, many)
    assert (plainly.double() - wanted).norm() <= 2e-6 * wanted.norm()


class Experts(nn.Module):
    """Packed weights in 16 bits, whose own way may not be taken."""

    def __init__(self, gate_up: Tensor, down: Tensor, form: ExpertsForm):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(t, requires_grad=False) for t in (gate_up, down))
        self.described = form

    def form(self) -> ExpertsForm:
        return self.described

    def forward(self, *arguments: Any) -> Tensor:
        raise AssertionError("torch's grouped product would ask the host where groups end")


@pytest.mark.parametrize("form", [SILU, SWISH._replace(biased=False, transposed=True)], ids=["silu", "swish"])
def test_many_tokens_never_reach_torch_s_grouped_product_on_amd(
    form: ExpertsForm, device: torch.device, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    parts = mixture("eight", SILU, device)
    dense = [_reference(weight, torch.float32) for weight in parts[:2]]
    layer = Experts(*(weight.mT.contiguous() if form.transposed else weight for weight in dense), form)
    tokens = experts.MAX_TOKENS + 1
    x = torch.randn(tokens, 64, device=device) * 0.1
    index = torch.randint(0, 3, (tokens, 1), device=device)
    weights = torch.rand(tokens, 1, device=device)
    with pytest.raises(AssertionError, match="ask the host"):
        experts.fused_experts(x, layer, index, weights)  # as on NVIDIA's chips, where it does not
    monkeypatch.setattr(experts, "chip_of", lambda tensor: Target("hip", "gfx942"))
    how = gating(form)
    assert how is not None
    got = experts.fused_experts(x, layer, index, weights)
    wanted = by_definition(x, index, weights, parts, how)
    assert (got.double() - wanted).norm() <= 2e-6 * wanted.norm()


def test_other_ranks_experts_add_nothing(device: torch.device, poisoned: None) -> None:
    parts = mixture("four", SILU, device)
    x, weights = torch.randn(4, 64, device=device), torch.rand(4, 2, device=device)
    index = torch.tensor([[0, 3], [3, 3], [1, 2], [3, 0]], device=device)
    how = gating(SILU)
    assert how is not None
    got = grouped_experts(x, index, weights, parts.gate_up, parts.down, (None, None), how)
    present = weights.masked_fill(index == 3, 0.0)
    wanted = by_definition(x, index.clamp(max=2), present, parts, how)
    assert (got.double() - wanted).norm() <= 2e-6 * wanted.norm()
