"""Modules that somebody watches run in the order in which transformers' files call them: tracers raise otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_rewrite_runtime.linear.linear import gated_linear
from hf_rewrite_runtime.rope.qkv_rope_cache import qkv_rope_cache

WIDTH, D = 32, 8


class Block(nn.Module):
    """The projections of a layer, with norms of heads."""

    def __init__(self):
        super().__init__()
        for name, width in (("gate", 48), ("up", 48), ("q", 4 * D), ("k", 2 * D), ("v", 2 * D)):
            setattr(self, name, nn.Linear(WIDTH, width, bias=False))
        self.act, self.q_norm, self.k_norm = nn.SiLU(), nn.RMSNorm(D), nn.RMSNorm(D)

    def mlp(self, x):
        return gated_linear(x, (self.gate, self.up), self.act)

    def attention(self, x, heads_first=False):
        return qkv_rope_cache(
            x, (self.q, self.k, self.v), None, None, 0,
            head_dim=D, q_norm=self.q_norm, k_norm=self.k_norm, heads_first=heads_first,
        )  # fmt: skip


def order(block, run, watched):
    seen = []
    for name in watched:
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    with torch.no_grad():
        return seen, run(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("watched", ["gate", "up", "act"])
def test_of_a_gated_product(watched):
    block = Block()
    _, wanted = order(block, block.mlp, [])
    seen, found = order(block, block.mlp, {watched, "gate", "act", "up"})
    assert seen == ["gate", "act", "up"]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("heads_first", "wanted"),
    [(False, ["q", "q_norm", "k", "k_norm", "v"]), (True, ["q", "k", "v", "q_norm", "k_norm"])],
)
def test_of_queries_keys_and_values(heads_first, wanted):
    block = Block()
    _, plain = order(block, lambda x: block.attention(x, heads_first), [])
    seen, found = order(block, lambda x: block.attention(x, heads_first), wanted)
    assert seen == wanted
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_a_forward_of_the_instance_watches():
    block, seen = Block(), []
    forward = block.up.forward
    block.up.forward = lambda x: (seen.append("up"), forward(x))[1]
    block.act.register_forward_hook(lambda *_: seen.append("act"))
    with torch.no_grad():
        block.mlp(torch.randn(2, 5, WIDTH))
    assert seen == ["act", "up"]
