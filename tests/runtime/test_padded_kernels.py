"""Heads that a file fills up with zeros for attention: attended to as they are, and filled up where somebody looks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETED
from torch import Tensor

from hf_rewrite_runtime.attention.padded_heads import HANDLERS
from hf_rewrite_runtime.attention.step_attention import StepAttention
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.lazy.pointwise_fusion import FUNCTIONS
from hf_rewrite_runtime.lazy.step_products import StepProducts

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
HEADS, SLOTS, DIM, COUNT, AT = 2, 40, 20, 4, 17
MASK = (torch.arange(SLOTS) <= AT)[None, None, None]


def filled(heads: Tensor) -> Tensor:
    return F.pad(heads, (0, COUNT))


def behind(out: Tensor) -> Tensor:
    return out.transpose(1, 2).contiguous()


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def cut(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As Moonshine does, which says the scale."""
    out = F.scaled_dot_product_attention(filled(query), filled(key), filled(value), attn_mask=mask, scale=0.3)
    return behind(out)[..., :-COUNT].reshape(1, 1, -1)


def cut_to_a_width(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(filled(query), filled(key), filled(value), attn_mask=mask)
    return behind(out)[..., :DIM].reshape(1, 1, -1)


def uncut(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return behind(F.scaled_dot_product_attention(filled(query), filled(key), filled(value), attn_mask=mask))


def cut_elsewhere(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(filled(query), filled(key), filled(value), attn_mask=mask)
    return behind(out)[..., 1:9]


def read_besides(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    heads = [filled(query), filled(key), filled(value)]
    out = F.scaled_dot_product_attention(*heads, attn_mask=mask)
    return torch.cat([behind(out)[..., :-COUNT].flatten(), *(one.flatten() for one in heads)])


def keys_with_more(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Zeros in front, numbers that are none, and values of another width."""
    query, key = (F.pad(F.pad(heads, (COUNT, 0)), (0, 2), value=1.0) for heads in (query, key))
    return F.scaled_dot_product_attention(query, key, filled(value), attn_mask=mask)


@pytest.mark.parametrize("of_encoder", [False, True])
@pytest.mark.parametrize(
    ("attend", "alone"),
    [(cut, True), (cut_to_a_width, True), (uncut, True), (cut_elsewhere, True), (read_besides, False),
     (keys_with_more, False)],
)  # fmt: skip
def test_zeros_behind_heads(
    attend: Attend, alone: bool, of_encoder: bool, device: torch.device, kernels: list[str]
) -> None:
    torch.manual_seed(0)
    new = [torch.randn(1, HEADS, 1, DIM, device=device) for _ in range(3)]
    kept = [torch.randn(1, HEADS, SLOTS, DIM, device=device) for _ in range(2)]
    results = []
    for defers in (True, False):
        cache = PreallocatedCache(1, 1, SLOTS, device)
        cache.attention_layers[0].allocate(HEADS, DIM, DIM, torch.float32, device)
        for buffer, contents in zip(cache.buffers, kept, strict=True):
            buffer.copy_(contents)
        cache.position.fill_(AT)
        with torch.no_grad(), cache.step():
            attention = StepAttention(cache, [(kept[0], kept[1])])
            products = StepProducts(
                {F.scaled_dot_product_attention: attention.plain}, {F.scaled_dot_product_attention: attention},
                poisons=True,
            )  # fmt: skip
            products.chains = {**FUNCTIONS, **HANDLERS}
            with products if defers else contextlib.nullcontext():
                keys, values = (kept[0], kept[1]) if of_encoder else cache.update(new[1], new[2], 0)
                out = attend(new[0], keys, values, MASK.to(device))
            if defers and alone:
                assert kernels == ["masked_attention"]
        results.append([out, *cache.buffers])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
