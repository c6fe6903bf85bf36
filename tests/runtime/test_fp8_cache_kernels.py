"""Keys and values in 8 bits: their bytes by the definition, and attention among them as among the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from rounded_cache import rounded
from tolerances import IN_AN_EXPONENT, assert_as_exact_as
from torch import Tensor

from hf_rewrite_runtime.attention.decode_attention import ScoreRule, Split, _reference, decode_attention, launch
from hf_rewrite_runtime.cache.fp8_layer import Fp8Layer
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.norms.norm_form import Prologue
from hf_rewrite_runtime.rope.rope_cache import Rotation, rope_cache

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
dtypes = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


def cache_of(batch: int, capacity: int, device: torch.device) -> tuple[PreallocatedCache, Fp8Layer]:
    cache = PreallocatedCache(1, batch, capacity, device)
    layer = Fp8Layer(cache)
    cache.layers[0] = layer
    return cache, layer


def outlying(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of many sizes, some with a channel that is far larger than the others, as of real keys."""
    x = torch.randn(shape, device=device) * torch.logspace(-3, 2, shape[-2], device=device)[:, None]
    x[..., 3] *= 50.0
    return x.to(dtype)


@dtypes
@pytest.mark.parametrize("start", [0, 5])
def test_bytes_of_a_prompt(start: int, dtype: torch.dtype, device: torch.device, poisoned: None) -> None:
    batch, heads, tokens, head_dim, value_dim = 2, 3, 37, 24, 40
    cache, layer = cache_of(batch, 64, device)
    keys = outlying(batch, tokens, heads, head_dim, dtype=dtype, device=device).transpose(1, 2)
    values = outlying(batch, heads, tokens, value_dim, dtype=dtype, device=device)
    keys[0, 1, 4] = 0.0
    cache.rewind(start)
    layer.update(keys, values)
    assert not backend.fallbacks()
    assert layer.length == start + tokens
    for kept, new in zip(layer.read(start + tokens, start), (keys, values), strict=True):
        assert kept.dtype == dtype
        assert torch.equal(kept, rounded(new))
    assert not any(buffer[:, :, :start].any() or buffer[:, :, start + tokens :].any() for buffer in layer.buffers)
    plain_cache, plain = cache_of(batch, 64, device)
    plain_cache.rewind(start)
    with backend.use_backend("reference"):
        plain.update(keys, values)
    for ours, theirs in zip(layer.buffers, plain.buffers, strict=True):
        assert torch.equal(ours, theirs)


@dtypes
def test_what_is_no_number_shows(dtype: torch.dtype, device: torch.device) -> None:
    _, layer = cache_of(1, 8, device)
    new = torch.ones(1, 1, 3, 16, device=device, dtype=dtype)
    new[0, 0, 0, 5], new[0, 0, 1, 6] = torch.inf, torch.nan
    layer.update(new, new)
    keys, values = layer.read(3)
    assert keys[0, 0, :2].isnan().all()
    assert values[0, 0, :2].isnan().all()
    assert (keys[0, 0, 2] == 1).all()


@dtypes
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [24, 64])
def test_bytes_of_a_step(
    head_dim: int, normed: bool, dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    batch, heads, kv_heads, capacity = 3, 4, 2, 16
    cache, layer = cache_of(batch, capacity, device)
    layer.allocate(kv_heads, head_dim, head_dim, dtype, device)
    cache.position.fill_(7)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = torch.split((torch.randn(batch, 1, sum(sizes), device=device) * 30).to(dtype), sizes, -1)
    rotation = Rotation(*(torch.randn(batch, 1, head_dim, device=device).to(dtype) for _ in range(2)))
    norm = Prologue((torch.rand(head_dim, device=device) + 0.5).to(dtype), 1e-5) if normed else None
    whole = [torch.zeros(batch, kv_heads, capacity, head_dim, device=device, dtype=dtype) for _ in range(2)]
    wanted = rope_cache(q, k, v, *whole, cache.position, rotation, norm, norm)
    query = rope_cache(q, k, v, layer.keys, layer.values, cache.position, rotation, norm, norm, layer.slots)
    assert torch.equal(query, wanted)
    for kept, plain in zip(layer.read(capacity), whole, strict=True):
        assert torch.equal(kept, rounded(plain))
        assert kept[:, :, 7].any()


RULES: list[dict[str, Any]] = [{}, {"sliding_window": 20}, {"softcap": 3.0, "sinks": True}]


@dtypes
@pytest.mark.parametrize("rule", RULES, ids=["all", "window", "capped, sinks"])
@pytest.mark.parametrize("position", [0, 16, 70])
def test_attention_is_that_among_the_same_numbers(
    position: int, rule: dict[str, Any], dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    batch, heads, kv_heads, head_dim, value_dim, capacity = 2, 6, 2, 24, 40, 96
    cache, layer = cache_of(batch, capacity, device)
    cache.starts.copy_(torch.tensor([0, position // 2]))
    filled = position + 1
    layer.update(
        outlying(batch, kv_heads, filled, head_dim, dtype=dtype, device=device) * 0.01,
        outlying(batch, kv_heads, filled, value_dim, dtype=dtype, device=device),
    )
    cache.position.fill_(position)
    keys, values = layer.read(capacity)
    layer.spoil(filled, torch.nan)
    layer.scales[:, :, filled:] = torch.nan
    sizes = torch.tensor([1e-3, 30.0] * 3, device=device)[:, None, None]
    query = (torch.randn(batch, heads, 1, head_dim, device=device) * sizes).to(dtype)
    given = ScoreRule(0.2, **rule)
    if given.sinks is not None:
        given = given._replace(sinks=torch.randn(heads, device=device).to(dtype))

    def plain(kind: torch.dtype) -> Tensor:
        rule = given._replace(sinks=None if given.sinks is None else given.sinks.to(kind))
        return _reference(*(t.to(kind) for t in (query, keys, values)), cache.position, cache.starts, rule)

    wanted, exact = plain(dtype), plain(torch.float64)
    for split in (Split(3, 4, 16, True, 1), Split(1, 8, 16, False, 1), Split(3, 1, 32, True, 1)):
        got = launch(
            query, layer.keys, layer.values, cache.position, cache.starts, cache.arrived(12), given, split, layer.slots
        )
        assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps, IN_AN_EXPONENT)
    options = {name: getattr(given, name) for name in ("sliding_window", "softcap", "sinks")}
    with cache.step():
        got = decode_attention(query, cache, 0, scaling=0.2, **options)
        assert not backend.fallbacks()
        with backend.use_backend("reference"):
            assert torch.equal(decode_attention(query, cache, 0, scaling=0.2, **options), wanted)
    assert_as_exact_as(wanted, got, exact, torch.finfo(dtype).eps, IN_AN_EXPONENT)


@dtypes
def test_values_that_are_all_zero_or_tiny_weigh_what_they_weigh(dtype: torch.dtype, device: torch.device) -> None:
    """Their scale is in the exponent of a weight, and its inverse in the sum of weights."""
    cache, layer = cache_of(1, 32, device)
    keys = torch.zeros(1, 1, 20, 16, device=device, dtype=dtype)
    values = torch.zeros(1, 1, 20, 16, device=device, dtype=dtype)
    values[0, 0, ::4] = 1.0
    values[0, 0, 1::4] = 2.0**-24
    layer.update(keys, values)
    cache.position.fill_(19)
    query = torch.ones(1, 2, 1, 16, device=device, dtype=dtype)
    with cache.step():
        got = decode_attention(query, cache, 0, scaling=1.0)
    torch.testing.assert_close(got, torch.full_like(got, 0.25))


def test_queries_beyond_the_range_of_fp16(device: torch.device) -> None:
    cache, layer = cache_of(1, 32, device)
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    keys, values = (torch.randn(1, 1, 20, 16, device=device).to(dtype) for _ in range(2))
    layer.update(keys, values)
    cache.position.fill_(19)
    large = 6e4 if INTERPRETED else 1e30
    query = (torch.rand(1, 2, 1, 16, device=device) * large).to(dtype)
    with cache.step():
        got = decode_attention(query, cache, 0, scaling=1 / large)
    kept = [tensor.double() for tensor in layer.read(32)]
    exact = _reference(query.double(), *kept, cache.position, cache.starts, ScoreRule(1 / large))
    assert_as_exact_as(exact.to(dtype), got, exact, torch.finfo(dtype).eps, IN_AN_EXPONENT)
