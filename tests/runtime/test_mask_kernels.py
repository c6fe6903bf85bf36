"""Masks that every layer of a step makes anew: computed once, and again where somebody wrote what they are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED
from torch import Tensor

from hf_rewrite_runtime.attention.step_attention import StepAttention
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.lazy.pointwise_fusion import FUNCTIONS
from hf_rewrite_runtime.lazy.step_products import StepProducts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
LAYERS, HEADS, SLOTS, DIM, AT = 3, 2, 48, 16, 30
LEAST = -1e9


class Step:
    """A step of layers with a bias of positions and a mask, of their own keys and of an encoder's, as T5 has them."""

    def __init__(self, device: torch.device):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.device = device
        self.new = [[normal(1, HEADS, 1, DIM) for _ in range(2)] for _ in range(LAYERS)]
        self.heard = [[normal(1, HEADS, SLOTS, DIM) for _ in range(2)] for _ in range(LAYERS)]
        self.held = [[normal(1, HEADS, SLOTS, DIM) for _ in range(2)] for _ in range(LAYERS)]
        self.table, self.visible = normal(SLOTS, HEADS), normal(1, 1, 1, SLOTS) > -1
        self.between: Callable[[Tensor, Tensor], object] = lambda bias, visible: None

    def run(self, defers: bool) -> list[Tensor]:
        """Return what each layer attends to, and the cache afterwards."""
        cache = PreallocatedCache(LAYERS, 1, SLOTS, self.device)
        for layer, held in zip(cache.attention_layers, self.held, strict=True):
            layer.allocate(HEADS, DIM, DIM, torch.float32, self.device)
            for buffer, contents in zip(layer.buffers, held, strict=True):
                buffer.copy_(contents)
        cache.position.fill_(AT)
        with torch.no_grad(), cache.step():
            attention = StepAttention(cache, self.heard)
            products = StepProducts(
                {F.scaled_dot_product_attention: attention.plain}, {F.scaled_dot_product_attention: attention},
                poisons=True,
            )  # fmt: skip
            products.chains = FUNCTIONS
            with products if defers else contextlib.nullcontext():
                out = self.layers(cache)
        return [*out, *cache.buffers]

    def layers(self, cache: PreallocatedCache) -> list[Tensor]:
        out: list[Tensor] = []
        visible, causal = self.visible.clone(), torch.arange(SLOTS, device=self.device) <= cache.position
        bias = None
        for number in range(LAYERS):
            before = (cache.position + 3) * 2  # which only the first layer reads
            if bias is None:
                far = (torch.arange(SLOTS, device=self.device) - before).abs() % SLOTS
                bias = F.embedding(far, self.table).permute(1, 0)[None, :, None]
            keys, values = cache.update(*self.new[number], number)
            mask = torch.where(causal[None, None, None], bias, LEAST).contiguous()
            out.append(F.scaled_dot_product_attention(self.new[number][1], keys, values, attn_mask=mask, scale=0.2))
            mask = torch.where(visible, torch.zeros_like(bias), LEAST).contiguous()
            out.append(F.scaled_dot_product_attention(out[-1], *self.heard[number], attn_mask=mask, scale=0.2))
            self.between(bias, visible)
        return out


def check(step: Step) -> None:
    for ours, exact in zip(step.run(True), step.run(False), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_a_mask_of_all_layers_is_made_once(device: torch.device, kernels: list[str]) -> None:
    step = Step(device)
    check(step)
    assert kernels.count("masked_attention") == 2 * LAYERS
    made = [place for place, kernel in enumerate(kernels) if kernel == "chain"]
    second = [place for place, kernel in enumerate(kernels) if kernel == "masked_attention"][3]
    assert made
    assert max(made) < second, kernels  # the second layer's own mask is made of a bias that is there by then


def fills(bias: Tensor, visible: Tensor) -> None:
    bias.copy_(bias.roll(3, -1))


def multiplies(bias: Tensor, visible: Tensor) -> None:
    bias *= -0.5


def hides(bias: Tensor, visible: Tensor) -> None:
    visible[..., :24] = ~visible[..., :24]


def hides_by_a_function(bias: Tensor, visible: Tensor) -> None:
    torch.logical_not(visible, out=visible)


@pytest.mark.parametrize("between", [fills, multiplies, hides, hides_by_a_function])
def test_a_mask_is_made_anew_where_somebody_wrote(
    between: Callable[[Tensor, Tensor], object], device: torch.device
) -> None:
    step = Step(device)
    step.between = between
    check(step)
