"""The kernel that rotates a prompt's queries and keys and writes its cache, against fp64."""

from __future__ import annotations

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from tolerances import assert_as_exact_as
from torch import Tensor

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.norms.norm_form import Prologue
from hf_rewrite_runtime.norms.rms_norm import rms_norm
from hf_rewrite_runtime.rope.qkv_prefill import has_dense_rows, qkv_prompt
from hf_rewrite_runtime.rope.rope_cache import Rotation
from hf_rewrite_runtime.rope.rotary import rotary

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
ROTATIONS = [(16, False, False), (8, False, True), (8, True, False), (0, False, False)]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "interleaved", "half_table"), ROTATIONS)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "normed"), [(1, 9, 5, False), (2, 3, 66, True), (2, 1, 2, False)]
)
def test_queries_keys_and_values_of_every_token(
    batch: int,
    tokens: int,
    heads: int,
    normed: bool,
    columns: int,
    interleaved: bool,
    half_table: bool,
    dtype: torch.dtype,
    device: torch.device,
    poisoned: None,
) -> None:
    kv_heads, head_dim, capacity = 2, 16, 12
    sizes = [count * head_dim for count in (heads, kv_heads, kv_heads)]
    parts = torch.randn(batch, tokens, sum(sizes), device=device).to(dtype).split(sizes, -1)
    weights = [(torch.rand(head_dim, device=device) + 0.5).to(dtype) for _ in range(2)] if normed else [None, None]
    angle = torch.rand(batch, tokens, max(columns // 2 if half_table else columns, 1), device=device)
    tables = (angle.cos().to(dtype), angle.sin().to(dtype))
    rotation = Rotation(*tables, interleaved, half_table) if columns else None

    def written(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert not keys[:, :, tokens:].any()
        assert not values[:, :, tokens:].any()
        return torch.cat([query, keys[:, :, :tokens], values[:, :, :tokens]], 1).flatten(1)

    def caches(kind: torch.dtype) -> list[Tensor]:
        return [torch.zeros(batch, kv_heads, capacity, head_dim, device=device, dtype=kind) for _ in range(2)]

    def plain(kind: torch.dtype) -> Tensor:
        keys, values = caches(kind)
        query, key, value = (x.to(kind).view(batch, tokens, -1, head_dim).transpose(1, 2) for x in parts)
        if normed:
            query, key = (rms_norm(x, w.to(kind), 1e-5) for x, w in zip((query, key), weights, strict=True))
        if columns:
            cos, sin = (table.to(kind) for table in tables)
            query, key = rotary(query, key, cos, sin, partial=True, interleaved=interleaved, half_table=half_table)
        keys[:, :, :tokens], values[:, :, :tokens] = key, value
        return written(query, keys, values)

    keys, values = caches(dtype)
    norms = [None if weight is None else Prologue(weight, 1e-5) for weight in weights]
    assert has_dense_rows(*parts)
    assert rotation is None or rotation.fits(batch, head_dim, tokens)
    query = qkv_prompt(*parts, keys, values, rotation, *norms)
    assert query.transpose(1, 2).is_contiguous()
    with backend.use_backend("reference"):
        wanted, exact = plain(dtype), plain(torch.float64)
    assert_as_exact_as(wanted, written(query, keys, values), exact, torch.finfo(dtype).eps)


def test_what_the_kernel_does_not_read(device: torch.device) -> None:
    table = torch.ones(2, 5, 16, device=device)
    assert Rotation(table, table).fits(2, 16, 5)
    assert not Rotation(table, table).fits(2, 16, 4)
    assert not Rotation(table, table).fits(3, 16, 5)
    assert not Rotation(table, table).fits(2, 8, 5)
    assert not Rotation(table[..., ::2], table[..., ::2]).fits(2, 16, 5)
    assert not Rotation(table[..., :3], table[..., :3]).fits(2, 16, 5)
    assert has_dense_rows(table, table[:1, ::2], table[..., :4])
    assert not has_dense_rows(table, table[:, ::2])
    assert not has_dense_rows(table.transpose(1, 2))
