"""Attention of steps whose loops turn more often than a pipeline's ring in LDS has slots, beside fp64.

Where such a loop counts in int64, Triton 3.8 for gfx950 writes behind the ring's end, from 71 tokens on (docs/amd.md).
"""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_as_exact_as
from torch import Tensor

from hf_rewrite_runtime.attention.decode_attention import ScoreRule, Split, launch
from hf_rewrite_runtime.attention.latent_decode import Division, launch_latent_decode
from hf_rewrite_runtime.attention.latent_query import HeadDims, Latents

CAPACITY, SLOTS = 512, 16
POSITIONS = pytest.mark.parametrize("position", [70, 401])
"""In 5 and 26 turns; rings have 2 or 3 slots."""
DTYPE = torch.bfloat16


def attended(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Return attention of `[B, H, D]` to `[B, H, n, D]`, in the dtype of both with a softmax in fp32 or more."""
    scores = (queries.unsqueeze(2) @ keys.mT * scaling).to(torch.promote_types(queries.dtype, torch.float32))
    return (scores.softmax(-1).to(values.dtype) @ values).squeeze(2)


@POSITIONS
@pytest.mark.parametrize("dot", [True, False])
def test_decode_attention(position: int, dot: bool, device: torch.device) -> None:
    heads, kv_heads, head_dim = 4, 1, 64
    query = torch.randn(1, heads, 1, head_dim, device=device).to(DTYPE)
    keys, values = (torch.randn(1, kv_heads, CAPACITY, head_dim, device=device).to(DTYPE) for _ in range(2))
    starts, arrived = (
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(heads, dtype=torch.int32, device=device),
    )
    rule = ScoreRule(head_dim**-0.5, None, None, None)
    got = launch(
        query, keys, values, torch.tensor([position], device=device), starts, arrived, rule, Split(4, 1, SLOTS, dot, 2)
    )
    held = [kept[:, :, : position + 1].expand(-1, heads, -1, -1) for kept in (keys, values)]
    plain = attended(query[:, :, 0], *held, head_dim**-0.5)
    exact = attended(query[:, :, 0].double(), *(kept.double() for kept in held), head_dim**-0.5)
    assert_as_exact_as(plain, got.reshape(plain.shape), exact, torch.finfo(DTYPE).eps)


@POSITIONS
@pytest.mark.parametrize("stages", [2, 3])
def test_latent_attention(position: int, stages: int, device: torch.device) -> None:
    heads, rank, sizes = 2, 32, HeadDims(12, 16, 20)
    queries = tuple(torch.randn(1, heads, width, device=device).to(DTYPE) for width in (rank, sizes.rope))
    kept = Latents(*(torch.randn(1, 1, CAPACITY, width, device=device).to(DTYPE) for width in (rank, sizes.rope)))
    weight = (torch.randn(heads * (sizes.nope + sizes.value), rank, device=device) * rank**-0.5).to(DTYPE)
    place, starts = torch.tensor([position], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    got = launch_latent_decode(queries, kept, weight, place, starts, 0.1, sizes, Division(16, SLOTS, 1, stages))
    up = weight.view(heads, sizes.nope + sizes.value, rank)[:, sizes.nope :]

    def of(kind: torch.dtype) -> Tensor:
        latents, keys = (one[:, :, : position + 1].expand(-1, heads, -1, -1).to(kind) for one in kept)
        mixed = attended(torch.cat(queries, -1).to(kind), torch.cat((latents, keys), -1), latents, 0.1)
        return (mixed.unsqueeze(2) @ up.to(kind).mT).squeeze(2)

    plain = of(DTYPE)
    assert_as_exact_as(plain, got.reshape(plain.shape), of(torch.float64), torch.finfo(DTYPE).eps)
