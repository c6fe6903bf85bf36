"""Products of one row side by side in a step, and the norm that they leave behind: fewer kernels, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED
from torch import Tensor, nn

from hf_rewrite_runtime.launching.launch import chip_of
from hf_rewrite_runtime.launching.tiles import Tile
from hf_rewrite_runtime.lazy.multi_gemv import alike, is_same_norm, launch_beside
from hf_rewrite_runtime.lazy.pending_ops import Product
from hf_rewrite_runtime.lazy.step_products import StepProducts
from hf_rewrite_runtime.linear import joined_storage
from hf_rewrite_runtime.linear.gemv import are_parameters
from hf_rewrite_runtime.linear.prologue import LayerNormPrologue
from hf_rewrite_runtime.norms.norm_form import Prologue
from hf_rewrite_runtime.norms.rms_norm import rms_norm

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
CLOSE = 1e-5
"""Relative, in fp32: sums in another order."""


def assert_close(ours: Tensor, exact: Tensor) -> None:
    assert (ours.double() - exact).norm() < CLOSE * exact.norm()


@torch.no_grad()
def stepped(model: Callable[..., Any], *given: Any, residuals: set[int] | None = None) -> Any:
    with StepProducts(poisons=True, residuals=residuals):
        return model(*given)


def normal(norm: nn.LayerNorm) -> nn.LayerNorm:
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    return norm


class Heads(nn.Module):
    """Queries, keys and values as Whisper has them: keys have no bias, queries are scaled behind their product."""

    def __init__(self, size: int, scale: float = 0.25):
        super().__init__()
        self.query, self.value = nn.Linear(size, size), nn.Linear(size, size // 2)
        self.key, self.out = nn.Linear(size, size // 2, bias=False), nn.Linear(size, size)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x) * self.scale
        key, value = self.key(x), self.value(x)
        shared = torch.cat([value, value], -1)
        return self.out(torch.softmax(query * torch.cat([key, key], -1), -1) * shared)


@pytest.mark.parametrize("size", [16, 40, 300])
@pytest.mark.parametrize("norm", ["none", "centred", "root"])
def test_queries_keys_and_values_are_one_kernel(
    norm: str, size: int, device: torch.device, kernels: list[str]
) -> None:
    """Sizes that are no powers of two, too."""
    torch.manual_seed(0)
    heads, centred = Heads(size).to(device), normal(nn.LayerNorm(size)).to(device)
    x, gain = torch.randn(1, 1, size, device=device), torch.rand(size, device=device)

    def before(x: Tensor) -> Tensor:
        return {"none": lambda: x, "centred": lambda: centred(x), "root": lambda: rms_norm(x, gain, 1e-5)}[norm]()

    ours = stepped(lambda: heads(before(x)))
    assert kernels == ["beside", "linear"]
    exact = before(x).double() if norm == "root" else before_exactly(norm, centred, x)
    assert_close(ours, heads.double()(exact))


def before_exactly(norm: str, centred: nn.Module, x: Tensor) -> Tensor:
    return centred.double()(x.double()) if norm == "centred" else x.double()


class Behind(nn.Module):
    """Norms behind the sums, as BART and Marian have them: what a product reads is a residual, too."""

    def __init__(self, size: int):
        super().__init__()
        self.heads, self.cross = Heads(size), nn.Linear(size, size)
        self.up, self.down, self.out = nn.Linear(size, 2 * size), nn.Linear(2 * size, size), nn.Linear(size, size)
        self.first, self.second, self.third = (normal(nn.LayerNorm(size)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x + self.heads(x))
        x = self.third(x + self.out(torch.tanh(self.cross(x))))
        return x + self.down(F.gelu(self.up(x)))


def test_a_norm_that_is_a_residual_too_is_no_kernel(device: torch.device, kernels: list[str]) -> None:
    """From the second run of a step on: the first shows which norms that are."""
    torch.manual_seed(0)
    model, x = Behind(32).to(device), torch.randn(1, 1, 32, device=device)
    residuals: set[int] = set()
    first = stepped(model, x, residuals=residuals)
    assert sorted(kernels) == ["beside", *["layer_norm"] * 3, *["linear"] * 5]
    kernels.clear()
    ours = stepped(model, x, residuals=residuals)
    assert kernels == ["beside", "linear", "beside", "linear", "beside", "linear"]
    model.double()
    for one in (first, ours):
        assert_close(one, model(x.double()))


class Ahead(nn.Module):
    """A norm before each block, whose result nothing but the block reads, though the layer's frame still holds it."""

    def __init__(self, size: int):
        super().__init__()
        self.norm, self.up, self.down = normal(nn.LayerNorm(size)), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm(x)
        return residual + self.down(F.gelu(self.up(x)))


def test_a_norm_that_only_products_read_is_not_written(device: torch.device, kernels: list[str]) -> None:
    model, x = Ahead(16).to(device), torch.randn(1, 1, 16, device=device)
    residuals: set[int] = set()
    for _ in range(2):
        kernels.clear()
        ours = stepped(model, x, residuals=residuals)
        assert kernels == ["linear", "linear"]
    assert not residuals
    assert_close(ours, model.double()(x.double()))


@torch.no_grad()
def test_what_is_not_alike_stays_apart(device: torch.device, kernels: list[str]) -> None:
    """Another input, another norm of the same input, an activation behind it, and what a residual was added to."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16).to(device), nn.Linear(16, 16).to(device)
    norms = [normal(nn.LayerNorm(16)).to(device) for _ in range(2)]
    x, other = torch.randn(2, 1, 1, 16, device=device)
    cases: list[Callable[[], tuple[Tensor, Tensor]]] = [
        lambda: (first(x), second(other)),
        lambda: (first(norms[0](x)), second(norms[1](x))),
        lambda: (F.gelu(first(x)), second(x)),
        lambda: (other + first(x), second(x)),
    ]
    for case in cases:
        kernels.clear()
        ours = stepped(case)
        assert kernels == ["linear", "linear"]
        for one, exact in zip(ours, case(), strict=True):
            assert_close(one, exact.double())


def test_the_fourth_product_has_a_kernel_of_its_own(device: torch.device, kernels: list[str]) -> None:
    products = nn.ModuleList([nn.Linear(16, 8 + i) for i in range(4)]).to(device)
    x = torch.randn(1, 1, 16, device=device)
    ours = stepped(lambda: [product(x) for product in products])
    assert sorted(kernels) == ["beside", "linear"]
    for one, product in zip(ours, products, strict=True):
        assert_close(one, product.double()(x.double()))


def test_a_product_whose_result_is_gone_is_not_computed(device: torch.device, kernels: list[str]) -> None:
    first, second, x = nn.Linear(16, 16).to(device), nn.Linear(16, 8).to(device), torch.randn(1, 1, 16, device=device)

    def layer() -> Tensor:
        second(x)
        return torch.softmax(first(x), -1)

    stepped(layer)
    assert kernels == ["linear"]


def test_what_a_kernel_loads_before_it_waits_is_parameters(device: torch.device) -> None:
    weight, bias = nn.Parameter(torch.rand(8, device=device)), torch.rand(8, device=device)
    parts = [nn.Parameter(torch.rand(8, device=device)) for _ in range(2)]
    whole = joined_storage.join(parts)
    assert isinstance(whole, Tensor)
    assert are_parameters(LayerNormPrologue(weight, weight, 1e-5), whole, None)
    assert are_parameters(None)
    assert not are_parameters(LayerNormPrologue(weight, bias, 1e-5))
    assert not are_parameters(Prologue(bias, 1e-5))
    assert not are_parameters(None, weight, bias)


def test_norms_are_the_same_by_what_they_read(device: torch.device) -> None:
    weight, other = torch.rand(8, device=device), torch.rand(8, device=device)
    assert is_same_norm(None, None)
    assert is_same_norm(LayerNormPrologue(weight, None, 1e-5), LayerNormPrologue(weight.view(8), None, 1e-5))
    assert not is_same_norm(LayerNormPrologue(weight, None, 1e-5), LayerNormPrologue(weight, other, 1e-5))
    assert not is_same_norm(LayerNormPrologue(weight, None, 1e-5), LayerNormPrologue(weight, None, 1e-6))
    assert not is_same_norm(LayerNormPrologue(weight, None, 1e-5), LayerNormPrologue(other, None, 1e-5))
    assert not is_same_norm(LayerNormPrologue(weight, None, 1e-5), Prologue(weight, 1e-5))
    assert not is_same_norm(LayerNormPrologue(weight, None, 1e-5), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])])
@pytest.mark.parametrize("tile", [(4, 256, 1), (2, 64, 1)], ids=["one block", "several"])
@pytest.mark.parametrize("outs", [(16,), (7, 33), (32, 1, 50)])
def test_the_kernel_alone(
    outs: tuple[int, ...], tile: Tile, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every result is written, and nothing beside it, whichever of the parameters come before the wait."""
    torch.manual_seed(0)
    cols = 136
    monkeypatch.setattr("hf_rewrite_runtime.lazy.multi_gemv.tile_for", lambda *_: tile)
    x = (torch.randn(1, 1, cols, device=device) + 3.0).to(dtype)
    norm = LayerNormPrologue(*(torch.rand(cols, device=device).to(dtype) for _ in range(2)), 1e-5)
    weights = [(torch.randn(out, cols, device=device) / cols**0.5).to(dtype) for out in outs]
    biases = [torch.randn(out, device=device).to(dtype) if number != 1 else None for number, out in enumerate(outs)]
    products = [
        Product(x, weight, bias, norm, "gelu", 0.5 + number)
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True))
    ]
    assert all(alike(products[0], product) for product in products)
    chip = chip_of(x)
    overlap = chip is not None and chip.has_dependent_launch
    exact = F.layer_norm(x.double(), (cols,), norm.weight.double(), norm.bias.double(), norm.eps)
    for ahead in (False, True):
        monkeypatch.setattr("hf_rewrite_runtime.lazy.multi_gemv.are_parameters", lambda *_, ahead=ahead: ahead)
        monkeypatch.setattr("hf_rewrite_runtime.lazy.multi_gemv.overlaps", lambda _: overlap)
        whole = [torch.full((1, 1, out + 2), float("nan"), dtype=dtype, device=device) for out in (*outs, cols)]
        *made, normed = [place[..., 1:-1] for place in whole]
        keeps = tile[1] >= cols
        assert launch_beside(products, made, normed) is keeps
        if not keeps:
            assert launch_beside(products, made, None)
        close = 1e-5 if dtype == torch.float32 else 4e-3 if dtype == torch.float16 else 3e-2
        for place in whole:
            assert torch.isnan(place[..., [0, -1]]).all()
        for product, one in zip(products, made, strict=True):
            bias = None if product.bias is None else product.bias.double()
            wanted = F.gelu(F.linear(exact, product.weight.double(), bias)) * product.factor
            assert (one.double() - wanted).norm() <= close * wanted.norm()
        assert torch.isnan(normed).all() if not keeps else (normed.double() - exact).norm() <= close * exact.norm()
