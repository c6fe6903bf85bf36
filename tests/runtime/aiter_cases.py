"""Calls of the operators that aiter has, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_rewrite_runtime.attention.grouped_query import native_gqa
from hf_rewrite_runtime.core import backend

DTYPES = [torch.bfloat16, torch.float16]
QUIET = "ignore:aiter"
"""A filter of warnings: what is said once a process is not said for each test."""


def reasons(operator: str) -> dict[str, int]:
    counted = backend.fallbacks().items()
    return {reason: times for (name, reason), times in counted if name == f"aiter.{operator}"}


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    """What the operator gives by aiter, and by its reference."""
    with backend.use_backend("aiter"):
        got = call()
    with backend.use_backend("reference"):
        return got, call()


def states(hidden_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Rows as a slice of something wider, and a weight."""
    return torch.randn(3, 5, hidden_size + 16, dtype=dtype)[..., :hidden_size], torch.rand(hidden_size).to(dtype) + 0.5


class Attention(nn.Module):
    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def qkv(
    batch: int, queries: int, keys: int, groups: int, head_dim: int = 16, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """`[B, H, S, D]` views of `[B, S, H, D]`; the keys as a cache has them."""
    query = torch.randn(batch, queries, 2 * groups, head_dim, dtype=dtype).transpose(1, 2)
    return [query, *torch.randn(2, batch, 2, keys, head_dim, dtype=dtype)]


def attended(*states: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    groups = states[0].shape[1] // states[1].shape[1]
    return native_gqa(sdpa_attention_forward)(Attention(groups), *states, mask, scaling=0.2, **options)[0]


def assert_attends_as(wanted: Tensor, got: Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0, atol=0.02)
