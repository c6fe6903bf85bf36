"""Attention of a step with its heads apart, for what a file does with them."""

from __future__ import annotations

import pytest
import torch

from hf_rewrite_runtime.attention.attend_step import attend_step
from hf_rewrite_runtime.attention.decode_attention import decode_attention
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache


@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("rule", [{}, {"sliding_window": 2}, {"softcap": 3.0}, {"sinks": torch.arange(4.0)}])
def test_heads_are_those_of_the_steps_attention(value_dim: int, rule: dict[str, object]) -> None:
    torch.manual_seed(0)
    cache = PreallocatedCache(1, 2, 6, "cpu")
    cache.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, value_dim), 0)
    query = torch.randn(2, 4, 1, 8)
    cache.position.fill_(3)
    with cache.step():
        cache.update(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, value_dim), 0)
        heads = attend_step(query, cache, 0, scaling=0.5, **rule)  # type: ignore[arg-type]
        whole = decode_attention(query, cache, 0, scaling=0.5, **rule)  # type: ignore[arg-type]
    assert heads.shape == (2, 1, 4, value_dim)
    assert torch.equal(heads.flatten(2), whole)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (cache.layers[0].keys, cache.layers[0].values))
    if not rule:
        weights = (query @ keys[:, :, :4].transpose(2, 3) * 0.5).softmax(-1)
        torch.testing.assert_close(heads, (weights @ values[:, :, :4]).transpose(1, 2))
