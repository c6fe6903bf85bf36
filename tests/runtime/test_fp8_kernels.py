"""The kernels of weights and rows in 8 bits: bits against plain torch, products against fp64.

Under the interpreter, whose own 8-bit casts are wrong, kernels read weights as bytes that they decode by shifts, as on
chips without the conversion; that of a chip is run where there is one, and compiled for all in test_ahead_of_time.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import EMULATED, INTERPRETED, KERNEL_DTYPES
from test_step_kernels import Norm, projection
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.device.e4m3 import Quantized, dtype_for, has_fp8, quantize
from hf_rewrite_runtime.fp8 import fp8_add_rms_norm, fp8_gated_activation, fp8_rows
from hf_rewrite_runtime.fp8 import fp8_gemv as fp8_step
from hf_rewrite_runtime.fp8 import fp8_linear as fp8_linear_file
from hf_rewrite_runtime.fp8.fp8_linear import fp8_gated_linear, fp8_gated_product, fp8_linear, is_step
from hf_rewrite_runtime.fp8.fp8_qkv_step import fp8_qkv_step
from hf_rewrite_runtime.fp8.fp8_rows import quantized_rows
from hf_rewrite_runtime.fp8.fp8_weights import refresh
from hf_rewrite_runtime.launching.launch import Target
from hf_rewrite_runtime.linear.gated_activation import gated_activation
from hf_rewrite_runtime.linear.linear import linear
from hf_rewrite_runtime.norms.add_rms_norm import add_rms_norm
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
HARD = (1.0, 448.0, 448.0001, 240.0001, 1e-20, 0.0, 3e38)
"""Largest magnitudes of a row: the ends of both formats, subnormals of fp32, and its own end."""


def same_bits(got: Quantized, wanted: Quantized) -> None:
    assert got.values.dtype == wanted.values.dtype
    assert torch.equal(got.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(got.scale, wanted.scale)


def rows_of(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    x = torch.randn(count, size, device=device) * torch.rand(count, size, device=device) ** 6
    largest = torch.tensor(HARD, device=device).repeat(count)[:count, None].clamp_max(torch.finfo(dtype).max)
    return (x / x.abs().amax(-1, keepdim=True) * largest).to(dtype)


@dtypes
@pytest.mark.parametrize("size", [1, 63, 1000])
def test_rows_are_quantised_to_the_same_bits(
    size: int, dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    x = rows_of(9, 2 * size, dtype, device)[:, size:]
    same_bits(quantized_rows(x), quantize(x, dtype_for(x)))
    assert not backend.fallbacks()


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter's conversion is one that rounds otherwise")
def test_a_conversion_that_rounds_otherwise_is_not_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended MI300X: what its first use finds, and that a capture does not wait for that."""
    monkeypatch.setattr(fp8_rows, "chip_of", lambda tensor: Target("hip", "gfx942"))
    monkeypatch.setattr(fp8_rows, "has_fp8", lambda tensor: True)
    monkeypatch.setattr(fp8_rows, "_proven", {})
    x = rows_of(9, 63, torch.float32, device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not fp8_rows.converts(x)
    assert not fp8_rows._proven
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    same_bits(quantized_rows(x), quantize(x, dtype_for(x)))
    assert fp8_rows._proven == {x.get_device(): False}
    assert backend.fallbacks() == {("fp8_rows", "conversion_differs"): 1}
    monkeypatch.setattr(fp8_rows, "_proven", {x.get_device(): True})
    assert fp8_rows.converts(x)
    converted, wanted = (found.values.view(torch.uint8) for found in (quantized_rows(x), quantize(x, dtype_for(x))))
    assert not torch.equal(converted, wanted)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter rounds otherwise")
def test_the_conversion_of_this_chip_rounds_as_torch_does(device: torch.device) -> None:
    if not has_fp8(torch.empty(1, device=device)):
        pytest.skip("it has none")
    assert fp8_rows.rounds_alike(torch.empty(1, device=device))


@pytest.mark.parametrize("block", [16, 64])
def test_wide_rows_are_walked(block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_rows.row_tiles, "tile", lambda size, count: (1, block, 1))
    monkeypatch.setattr(fp8_gated_activation, "MAX_BLOCK_COLS", block)
    x, y = rows_of(3, 100, torch.float32, device), rows_of(3, 100, torch.float32, device)
    same_bits(quantized_rows(x), quantize(x, dtype_for(x)))
    got = fp8_gated_activation.quantized_gated_activation(x, y, "relu")
    same_bits(got, quantize(x.relu() * y, dtype_for(x)))


def test_rows_that_are_no_numbers_show(device: torch.device) -> None:
    for bad in (torch.nan, torch.inf):
        x = torch.ones(2, 8, device=device)
        x[1, 3] = bad
        scale = quantized_rows(x).scale
        assert scale[0] == 2.0 ** math.ceil(-math.log2(torch.finfo(dtype_for(x)).max))
        assert scale[1].isnan()


@dtypes
def test_norm_and_activation_quantise_what_they_would_write(
    dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    """Of the rounded result: the bits that a kernel of its own would give."""
    x, residual = (torch.randn(20, 1000, device=device).to(dtype) for _ in range(2))
    norm = Norm(1000).to(device, dtype)
    normed, summed = fp8_add_rms_norm.fp8_add_norm(x, residual, norm)
    wanted = add_rms_norm(x, residual, norm.weight, 1e-5)
    torch.testing.assert_close(normed, wanted[0], rtol=4 * torch.finfo(dtype).eps, atol=0)  # another kernel's sums
    assert torch.equal(summed, wanted[1])
    same_bits(quantized_rows(normed), quantize(normed, dtype_for(normed)))
    assert quantized_rows(normed).values.data_ptr() == quantized_rows(normed).values.data_ptr()  # not made anew
    packed = torch.randn(20, 600, device=device).to(dtype)
    gate, up = packed.chunk(2, -1)
    got = fp8_gated_activation.quantized_gated_activation(gate, up, "silu")
    product = gated_activation(gate, up, nn.functional.silu)
    same_bits(got, quantize(product, dtype_for(product)))
    assert not backend.fallbacks()


def test_rows_written_to_since_are_quantised_anew(device: torch.device) -> None:
    x = torch.randn(20, 64, device=device)
    normed, _ = fp8_add_rms_norm.fp8_add_norm(x, x, Norm(64).to(device))
    normed.mul_(3)
    same_bits(quantized_rows(normed), quantize(normed, dtype_for(normed)))


def rounded(module: nn.Linear, kind: torch.dtype) -> Tensor:
    """A weight rounded to 8 bits and back, by the definition."""
    weight = module.weight.detach()
    return quantize(weight, dtype_for(weight)).dequantized(kind)


@dtypes
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("inputs", "outputs", "bias", "offset"), [(64, 48, True, 0.0), (290, 7, False, 1.0)])
def test_products_of_few_rows(
    inputs: int,
    outputs: int,
    bias: bool,
    offset: float,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    poisoned: None,
) -> None:
    """Against the product of the rounded weights in fp64: a wrong scale, row or order is a hundred times the bound."""
    if dtype == torch.float32 and rows > 1:
        pytest.skip("more than one row are for the tensor cores, which have no fp32")
    norm, one, two = Norm(inputs, offset), projection(inputs, outputs, bias), projection(inputs, outputs, bias)
    for module in (norm, one, two):
        module.to(device, dtype)
    one.weight.data[::3] *= 5.0  # rows with scales of their own
    x = torch.randn(rows, 1, inputs, device=device).to(dtype)
    residual = torch.randn(rows, 1, outputs, device=device).to(dtype)

    def plain(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        weights = [rounded(module, kind) for module in (one, two)]
        biases = [None if module.bias is None else module.bias.detach().to(kind) for module in (one, two)]
        with backend.use_backend("reference"):
            norm.to(kind)
            normed = norm(x.to(kind))
            norm.to(dtype)
        gate, up = (nn.functional.linear(normed, w, b) for w, b in zip(weights, biases, strict=True))
        return residual.to(kind) + gate, nn.functional.silu(gate) * up

    got = (
        fp8_linear(x, one, norm=norm, residual=residual),
        fp8_gated_linear(x, (one, two), nn.functional.silu, norm=norm),
    )
    assert not backend.fallbacks()
    for ours, theirs, exact in zip(got, plain(dtype), plain(torch.float64), strict=True):
        assert_as_exact_as(theirs, ours, exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize(("rows", "apart"), [(1, False), (3, True)])
def test_several_rows_are_normed_first_on_amd(
    rows: int, apart: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_linear_file, "HIP", True)
    called = []

    class Counted(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(x, torch.Tensor):
                called.append(1)
            return rms_norm(x, self.weight, 1e-5, offset=self.offset)

    norm, one = Counted(64, 0.0).to(device, torch.float16), projection(64, 48, True).to(device, torch.float16)
    x = torch.randn(rows, 1, 64, device=device).half()
    got = fp8_linear(x, one, norm=norm)
    assert bool(called) == apart
    wanted = nn.functional.linear(norm(x.float()), rounded(one, torch.float32), one.bias.float())
    assert (got.float() - wanted).norm() <= 2e-3 * wanted.norm()


@dtypes
@pytest.mark.parametrize("tile", [(2, 32, 1), (4, 64, 2)], ids=str)
def test_tiles(tile: Any, dtype: torch.dtype, device: torch.device, poisoned: None) -> None:
    inputs, outputs = 192, 56
    weight = (torch.randn(2 * outputs, inputs, device=device) * inputs**-0.5).to(dtype)
    in_8_bits = quantize(weight, dtype_for(weight))
    x = torch.randn(1, inputs, device=device).to(dtype)
    y = torch.empty(1, 2 * outputs, device=device, dtype=dtype)
    fp8_step.launch_linear(x, fp8_step.read(in_8_bits), None, None, None, y, tile)
    plain = x @ in_8_bits.dequantized(dtype).T
    assert_as_exact_as(plain, y, x.double() @ in_8_bits.dequantized(torch.float64).T, torch.finfo(dtype).eps)


@dtypes
@pytest.mark.parametrize("batch", [1, 3])
def test_query_and_cache_write(batch: int, dtype: torch.dtype, device: torch.device) -> None:
    heads, kv_heads, head_dim, hidden = 4, 2, 16, 64
    modules = [projection(hidden, count * head_dim, True).to(device, dtype) for count in (heads, kv_heads, kv_heads)]
    norm = Norm(hidden).to(device, dtype)
    x = torch.randn(batch, 1, hidden, device=device).to(dtype)
    angle = torch.rand(batch, 1, head_dim, device=device)

    def run() -> Tensor:
        cache = PreallocatedCache(1, batch, 32, device)
        cache.layers[0].allocate(kv_heads, head_dim, head_dim, dtype, device)
        cache.position.fill_(5)
        tables = (angle.cos().to(dtype), angle.sin().to(dtype))
        with cache.step():
            query = fp8_qkv_step(x, modules, tables, cache, 0, head_dim=head_dim, norm=norm)
        written = [t[:, :, 5].flatten(1) for t in (cache.layers[0].keys, cache.layers[0].values)]
        return torch.cat([query.flatten(1), *written], dim=1)

    got = run()
    assert not backend.fallbacks()
    with backend.use_backend("reference"):
        wanted = run()
    assert is_step(x)
    torch.testing.assert_close(got, wanted, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.skipif(INTERPRETED, reason="needs a chip with 8-bit products, and graphs")
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_many_rows(bias: bool, device: torch.device) -> None:
    """By torch's product of 8-bit rows, where the chip has one: what the 8 bits stand for, multiplied in fp64."""
    module = projection(512, 256, bias).to(device, torch.bfloat16)
    x = torch.randn(3, 40, 512, device=device).to(torch.bfloat16)
    got = fp8_linear(x, module)
    read = quantize(x, dtype_for(x)).dequantized(torch.float64)
    exact, plain = (
        nn.functional.linear(
            read.to(kind), rounded(module, kind), None if module.bias is None else module.bias.to(kind)
        )
        for kind in (torch.float64, torch.bfloat16)
    )
    assert_as_exact_as(plain, got, exact, torch.finfo(torch.bfloat16).eps)
    # emulated, torch multiplies on the CPU
    assert EMULATED or has_fp8(x) == (("fp8_product", "chip_without_fp8") not in backend.fallbacks())


@pytest.mark.skipif(INTERPRETED, reason="needs a chip with 8-bit products, and graphs")
def test_a_graph_follows_a_change_in_place(device: torch.device) -> None:
    module, x = projection(256, 128, False).to(device, torch.bfloat16), torch.randn(1, 1, 256, device=device)
    x = x.to(torch.bfloat16)
    before = fp8_linear(x, module)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_linear(x, module)
    graph.replay()
    assert torch.equal(out, before)
    module.weight.neg_()
    refresh(module)
    graph.replay()
    assert torch.equal(out, -before)
    assert not backend.fallbacks()


@pytest.mark.parametrize("product", [linear, fp8_linear])
@pytest.mark.parametrize("rows", [1, 20])
def test_what_is_trained_beside_frozen_weights(product: Any, rows: int, device: torch.device) -> None:
    """A norm, or what the product is added to: a kernel's result would be detached from them."""
    layer, norm = projection(64, 48, True).to(device), Norm(64).to(device)
    x, residual = torch.randn(rows, 1, 64, device=device), torch.randn(rows, 1, 48, device=device)
    for trained, options in ((norm.weight, {"norm": norm}), (residual, {"residual": residual})):
        trained.requires_grad_()
        product(x, layer, **options).sum().backward()
        assert trained.grad is not None
        trained.requires_grad_(False)


def test_an_activation_s_other_half_is_trained(device: torch.device) -> None:
    gate, up = torch.randn(20, 64, device=device), torch.randn(20, 64, device=device, requires_grad=True)
    fp8_gated_product(gate, up, nn.SiLU(), projection(64, 48, False).to(device)).sum().backward()
    assert up.grad is not None


@pytest.mark.parametrize("product", [linear, fp8_linear])
def test_a_residual_of_another_dtype_is_added_as_torch_does(product: Any, device: torch.device) -> None:
    layer = projection(64, 48, False).to(device)
    for own, other in ((torch.float32, torch.float16), (torch.float16, torch.float32)):
        x, residual = torch.randn(1, 1, 64, device=device, dtype=own), torch.randn(1, 1, 48, device=device).to(other)
        layer.weight.data = layer.weight.data.to(own)
        assert product(x, layer, residual=residual).dtype == torch.float32
