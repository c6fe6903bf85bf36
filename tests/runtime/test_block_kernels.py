"""Weights with a scale for each block, and many tokens sorted by expert: every code, and sums against fp64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from block_weights import SILU, SWISH, FP8Linear, Norm, blocks, by_definition, mixture
from conftest import INTERPRETED
from torch import Tensor, nn

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device.e4m3 import encode
from hf_rewrite_runtime.launching.launch import HIP, WAVE, Target
from hf_rewrite_runtime.linear import block_linear
from hf_rewrite_runtime.linear.block_groups import (
    Read,
    block_scales,
    eight_sums,
    four_sums,
    in_words,
    octets,
    row_groups,
    sixteen,
)
from hf_rewrite_runtime.linear.block_rows import launch_block_rows
from hf_rewrite_runtime.linear.blocks import Blocks, _reference, dequantized, narrowed, reason_against, widened
from hf_rewrite_runtime.linear.linear import gated_linear, linear
from hf_rewrite_runtime.moe import block_experts as few
from hf_rewrite_runtime.moe.form import ExpertsForm, gating
from hf_rewrite_runtime.moe.grouped import grouped_experts
from hf_rewrite_runtime.norms.norm_form import norm_form
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
experts = importlib.import_module("hf_rewrite_runtime.moe.experts")
FORMATS = {torch.float8_e4m3fn: False, torch.float8_e4m3fnuz: True}


@triton.jit
def _decode(codes_ptr, out_ptr, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, widened(tl.load(codes_ptr + at), True, FNUZ))


@triton.jit
def _narrow(codes_ptr, out_ptr, DECODE: tl.constexpr, FNUZ: tl.constexpr, CUT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    narrow = narrowed(widened(tl.load(codes_ptr + at), DECODE, FNUZ), tl.bfloat16, CUT)
    tl.store(out_ptr + at, narrow.to(tl.int16, bitcast=True))


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


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_code_of_8_bits_is_a_bf16(dtype: torch.dtype, decode: bool, cut: bool, device: torch.device) -> None:
    """Without a rounding too, as on AMD's chips: it cuts off nothing."""
    if dtype == torch.float8_e4m3fnuz and not (decode or INTERPRETED):
        pytest.skip("no such numbers in hardware here")
    if dtype == torch.float8_e4m3fnuz and not decode and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        pytest.skip("no such numbers in this Triton's interpreter")
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    got = torch.zeros(256, dtype=torch.int16, device=device)
    _narrow[(1,)](codes if decode else codes.view(dtype), got, decode, FORMATS[dtype], cut)
    wanted = codes.view(dtype).float()
    found = got.view(torch.bfloat16).float()
    number = ~wanted.isnan()
    assert torch.equal(found[number], wanted[number])
    assert decode or INTERPRETED or found[~number].isnan().all()  # the interpreter decodes them as 480


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


@triton.jit
def _one_group(
    x_ptr,
    values_ptr,
    scale_ptr,
    out_ptr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    FOUR: tl.constexpr,
    EXPONENTS: tl.constexpr,
    DECODE: tl.constexpr,
    PTX: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.arange(0, ROWS)[:, None]
    loaded = row_groups(values_ptr + row * SIZE, row >= 0, 0, 1, SIZE, 1)
    x_ptr += octets(0, FOUR, 1)[None, :]
    mask = octets(0, FOUR, 1)[None, :] >= 0
    if FOUR:
        sums = four_sums(loaded, x_ptr, mask, 1, PTX)
    else:
        sums = eight_sums(loaded, sixteen(x_ptr, mask, 1), 1, DECODE, PTX)
    tl.store(out_ptr + row, sums * block_scales(scale_ptr + row, row >= 0, 0, 1, 1, EXPONENTS, 1))


def group_products(weight: Blocks, x: Tensor, read: Read | None = None) -> Tensor:
    """What kernels of one row compute of rows of one group."""
    read = read or in_words(weight)
    out = torch.full((weight.shape[0],), torch.nan, device=x.device)
    form = (read.size, weight.four, weight.exponents, read.decode, read.ptx)
    _one_group[(1,)](x, read.values, read.scale, out, weight.shape[0], *form)
    return out


@pytest.mark.parametrize("place", range(32))
def test_every_code_at_every_place_of_a_group(place: int, device: torch.device) -> None:
    """Each is multiplied with a column of its own: the sum has all 16 bits of e2m1 and its scale, or e4m3's number."""
    x = (torch.arange(32, dtype=torch.float32, device=device) + 1) ** 2
    codes = torch.zeros(256, 32, dtype=torch.uint8)
    codes[:, place] = torch.arange(256) % 16
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
    exponents = (torch.arange(256, dtype=torch.uint8)[:, None] % 128) + 64
    for weight in (Blocks(packed.to(device), exponents.to(device), 1, 32),) + (
        (Blocks(eights(place).to(device), torch.full((256, 1), 0.5, device=device), 1, 16),) if place < 16 else ()
    ):
        wanted = _reference(weight, torch.float64)[:, place] * x[place].double()
        number = wanted.isfinite()
        assert number.sum() >= 254
        assert torch.equal(group_products(weight, x)[number].double(), wanted[number])


def test_bytes_that_a_chip_converts_are_read_as_they_are(device: torch.device) -> None:
    """As on gfx950."""
    x = torch.rand(32, device=device) + 0.5
    numbers = eights(5).view(torch.uint8)[
        torch.arange(256) & 0x7F != 0x7F
    ]  # no CPU of torch 2.8 chooses of 8-bit floats
    codes = numbers.view(torch.float8_e4m3fn)[:128].contiguous().to(device)
    weight = Blocks(codes, torch.full((128, 1), 0.5, device=device), 1, 16)
    got = group_products(weight, x, Read(codes, weight.scale, 16, False, False))
    assert torch.equal(got, _reference(weight, torch.float32)[:, 5] * x[5])


def eights(place: int) -> Tensor:
    codes = torch.zeros(256, 16, dtype=torch.uint8)
    codes[:, place] = torch.arange(256)
    return codes.view(torch.float8_e4m3fn)


def test_every_exponent_scales_a_group(device: torch.device) -> None:
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    exponents = torch.cat((exponents, exponents[:1]))
    for values, columns in (
        (torch.full((256, 16), 0x22, dtype=torch.uint8), 32),
        (eights(3)[0x38:0x39].expand(256, 16).contiguous(), 16),
    ):
        weight = Blocks(values.to(device), exponents.to(device), 1, columns)
        wanted = _reference(weight, torch.float64).sum(1)
        got = group_products(weight, torch.ones(32, device=device)).double()
        assert torch.equal(got, wanted.float().double())


@pytest.mark.parametrize("kind", ["eight", "exponents"])
def test_weights_are_dequantised(kind: str, device: torch.device) -> None:
    weight = blocks(33, 80, device, kind)
    assert torch.equal(dequantized(weight, torch.float32), _reference(weight, torch.float64).float())


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


@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_programs_that_share_rows(splits: int, device: torch.device, poisoned: None) -> None:
    """Seven tiles of columns, the last one not whole; twice, since the counters have to be zeros again."""
    rows, cols = 80, 208
    weight = blocks(rows, cols, device, "eight")
    x, residual = torch.randn(5, 1, cols, device=device), torch.randn(5, 1, rows, device=device)
    bias, norm = torch.randn(rows, device=device), Norm(torch.rand(cols, device=device) + 0.5)
    dense = _reference(weight, torch.float64)
    for prologue, given in ((None, x), (norm_form(norm), norm(x))):
        wanted = given.double() @ dense.T + bias.double() + residual.double()
        for _ in range(2):
            out = torch.full_like(residual, torch.nan)
            tile = (32, 128 // WAVE, splits, 2)
            launch_block_rows(x, weight, bias, prologue, residual, out, tile)
            assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize(("count", "apart"), [(1, False), (3, True)])
def test_several_rows_are_normed_first_on_amd(
    count: int, apart: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_linear, "HIP", True)
    called = []

    class Counted(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(x, torch.Tensor):
                called.append(1)
            return rms_norm(x, self.weight, 1e-6)

    weight, norm = blocks(80, 64, device, "eight"), Counted(torch.rand(64, device=device) + 0.5)
    x = torch.randn(count, 1, 64, device=device)
    wanted = norm(x).double() @ _reference(weight, torch.float64).T
    called.clear()
    got = block_linear._by_kernel(x, (weight, None), norm, None, "")
    assert bool(called) == apart
    assert (got.double() - wanted).norm() <= 2e-6 * wanted.norm()


def test_a_cast_model_is_the_original_s(device: torch.device) -> None:
    layer = nn.ModuleList([FP8Linear(blocks(32, 32, device, "eight"), None)])
    block_linear.BlockLinear.adopt(layer)
    layer.float()
    with pytest.raises(AssertionError, match="Hub"):
        layer[0](torch.randn(1, 32, device=device))


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


@pytest.mark.parametrize("kind", ["eight", "four"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_experts_whose_tiles_are_loaded_ahead(kind: str, ahead: int, device: torch.device, poisoned: None) -> None:
    """Several tiles of a row, the last of them partly beyond it, however many are on their way."""
    form = SWISH if kind == "four" else SILU
    parts = mixture(kind, form, device, 160, 96)
    x, index = torch.randn(1, 160, device=device), torch.tensor([[2, 0]], device=device)
    weights, how, out = torch.rand(1, 2, device=device), gating(form), torch.empty(1, 160, device=device)
    assert how is not None
    few.launch_block_experts(x, index, weights, parts, None, out, how, ((2, 2, WAVE, ahead), (2, 2, WAVE, ahead)))
    wanted = by_definition(x, index, weights, parts, how)
    assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()


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
    if not HIP:
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


def test_what_takes_a_weight_s_place_is_looked_at(device: torch.device) -> None:
    """A layer is adopted once; its parameters may be replaced, in place or by assignment, at any time."""
    layer = FP8Linear(blocks(64, 96, device, "eight"), None)
    block_linear.BlockLinear.adopt(nn.ModuleList([layer]))
    x = torch.randn(1, 96, device=device)
    for name in ("weight", "weight_scale_inv"):
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.T.contiguous().T
        assert not parameter.is_contiguous()
        wanted = x.double() @ _reference(block_linear.blocks_of(layer), torch.float64).T
        for got in (layer(x), linear(x, layer)):
            assert (got - wanted).norm() <= 2e-6 * wanted.norm(), name
        assert backend.fallbacks()["block_linear", "blocks"]


@pytest.mark.parametrize("count", [1, 5])
def test_biases_and_residuals_that_do_not_lie_as_the_kernels_read(count: int, device: torch.device) -> None:
    dtype = torch.float32 if count == 1 else torch.float16
    bias = torch.randn(64, device=device, dtype=dtype)[::2]
    layer = FP8Linear(blocks(32, 96, device, "eight"), bias)
    layer.bias.data = bias
    block_linear.BlockLinear.adopt(nn.ModuleList([layer]))
    x = torch.randn(count, 1, 96, device=device, dtype=dtype)
    dense = x.double() @ _reference(block_linear.blocks_of(layer), torch.float64).T + bias.double()
    for residual in (torch.randn(32, device=device), torch.randn(count, 1, 32, device=device).bfloat16()):
        got = linear(x, layer, residual=residual)
        assert got.dtype == torch.result_type(x, residual)
        assert (got - dense - residual.double()).norm() <= 2e-3 * dense.norm()


@pytest.mark.parametrize("of", ["norm", "bias", "residual"])
def test_gradients_of_what_stands_beside_the_input(of: str, device: torch.device) -> None:
    layer = FP8Linear(blocks(32, 96, device, "eight"), torch.randn(32, device=device))
    block_linear.BlockLinear.adopt(nn.ModuleList([layer]))
    norm = Norm(torch.rand(96, device=device) + 0.5)
    x, residual = torch.randn(1, 96, device=device), torch.randn(1, 32, device=device)
    trained = {"norm": norm.weight, "bias": layer.bias, "residual": residual}[of]
    trained.requires_grad_()
    linear(x, layer, norm=norm, residual=residual).sum().backward()
    wanted = _reference(block_linear.blocks_of(layer), torch.float64).sum(0) * norm(x).double() / norm.weight
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad, wanted[0].float() if of == "norm" else torch.ones_like(trained))


def test_autocast_chooses_one_dtype_for_any_number_of_rows(device: torch.device) -> None:
    layer = FP8Linear(blocks(32, 96, device, "eight"), None)
    block_linear.BlockLinear.adopt(nn.ModuleList([layer]))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = {layer(torch.randn(count, 96, device=device)).dtype for count in (1, 40)}
        found.add(linear(torch.randn(1, 96, device=device), layer).dtype)
    assert found == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    """As where somebody put a checkpoint's own tensors in the place of loaded ones."""
    weight = blocks(33, 80, device, "eight")
    weight = weight._replace(scale=weight.scale.to(dtype))
    assert reason_against(weight) is None
    assert torch.equal(dequantized(weight, torch.float32), _reference(weight, torch.float64).float())
    layer = FP8Linear(weight, None)
    block_linear.BlockLinear.adopt(nn.ModuleList([layer]))
    for count, of in ((1, torch.float32), (5, torch.float16)):
        x = torch.randn(count, 80, device=device, dtype=of)
        wanted = x.double() @ _reference(weight, torch.float64).T
        assert (layer(x) - wanted).norm() <= 1e-3 * wanted.norm()


def test_an_fp64_is_not_rounded_to_fp32_first(device: torch.device) -> None:
    weight = blocks(33, 80, device, "eight")
    assert torch.equal(dequantized(weight, torch.float64), _reference(weight, torch.float64))


def test_four_bits_with_numbers_as_scales_are_not_for_kernels(device: torch.device) -> None:
    """FP8Experts may hold e2m1 with scales in fp32, which the kernels would read as exponents."""
    weight = blocks(32, 64, device, "four")
    weight = weight._replace(scale=torch.rand(32, 2, device=device))
    assert reason_against(weight) == "blocks"
    assert torch.equal(dequantized(weight, torch.float32), _reference(weight, torch.float32))


@pytest.mark.parametrize("many", [False, True])
def test_experts_of_odd_tensors(many: bool, device: torch.device, poisoned: None) -> None:
    """Tokens that lie column by column, strided biases, a residual of another dtype, experts that are not here."""
    parts = mixture("four", SWISH, device)
    parts = parts._replace(biases=tuple(bias.T.contiguous().T for bias in parts.biases))
    x = (torch.randn(64, 2, device=device) * 0.1).half().T
    weights, residual = torch.rand(2, 2, device=device), torch.randn(2, 64, device=device)
    index = torch.tensor([[3, 0], [1, 3]], device=device)
    how = gating(SWISH)
    assert how is not None
    present = weights.masked_fill(index == 3, 0.0)
    wanted = by_definition(x, index.clamp(max=2), present, parts, how) + residual.double()
    got = few.block_experts(x, parts, index, weights, residual, 1.0, many)
    assert got.dtype == torch.float32
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


def test_experts_biases_that_are_trained(device: torch.device) -> None:
    parts = mixture("four", SWISH, device)
    down_bias = parts.biases[1].requires_grad_()
    x, index = torch.randn(1, 64, device=device), torch.tensor([[2]], device=device)
    weights = torch.tensor([[0.25]], device=device)
    few.block_experts(x, parts, index, weights, None, 1.0, many=False).sum().backward()
    assert down_bias.grad is not None
    assert down_bias.grad.mean(1).tolist() == [0.0, 0.0, 0.25]


def test_many_experts_parts_are_summed_in_fp32_without_kernels() -> None:
    """As `FP8Experts` sums them; in bf16 a part that is small beside the sum would be lost each time."""
    one = mixture("eight", SILU, torch.device("cpu"))
    same = [weight._replace(values=weight.values[:1].expand(8, -1, -1), scale=weight.scale[:1].expand(8, -1, -1))
            for weight in one[:2]]  # fmt: skip
    parts = few.BlockExperts(*same, (None, None), SILU)
    x, index = torch.randn(1, 64).bfloat16(), torch.arange(8)[None]
    weights = torch.ones(1, 8)
    alone = few.block_experts(x, parts, index[:, :1], weights[:, :1], None, 1.0, many=False).float()
    weights[0, 0] = 256.0
    got = few.block_experts(x, parts, index, weights, None, 1.0, many=False)
    assert torch.equal(got, (263 * alone).bfloat16())
