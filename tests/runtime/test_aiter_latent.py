"""aiter's latent attention on the preallocated cache, where it is named: as its release wants it, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_aiter
import pytest
import torch
from aiter_cases import QUIET, reasons
from torch import Tensor, nn

from hf_rewrite_runtime.aiter import aiter_calls
from hf_rewrite_runtime.aiter import latent as aiter_latent
from hf_rewrite_runtime.attention.latent_attention import latent_attention
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend

pytestmark = [pytest.mark.filterwarnings(QUIET), pytest.mark.usefixtures("machine", "named")]

CAPACITY, HIDDEN, NOPE, VALUE = 64, 32, 16, 24
RANK, ROPE = aiter_latent.RANK, aiter_latent.ROPE


@pytest.fixture
def named(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(aiter_calls.NAMED, "mla_decode")


class Attention(nn.Module):
    """Modules, and what lay in the cache before."""

    def __init__(self, rows: int, position: int, heads: int = 16):
        super().__init__()
        sizes = (HIDDEN, heads * (NOPE + ROPE)), (HIDDEN, RANK + ROPE), (RANK, heads * (NOPE + VALUE))
        self.query, self.down, self.up = (nn.Linear(*size, bias=False) for size in sizes)
        self.norm = nn.LayerNorm(RANK)
        self.bfloat16().requires_grad_(False)
        self.hidden = torch.randn(rows, 1, HIDDEN).bfloat16()
        self.kept = [torch.randn(rows, 1, position, size).bfloat16() for size in (RANK, ROPE)]
        angle = torch.rand(1, 1, ROPE)
        self.tables = angle.cos().bfloat16(), angle.sin().bfloat16()

    def forward(self, cache: PreallocatedCache) -> Tensor:
        with cache.step():
            return latent_attention(
                self.hidden, [self.query], (self.down, self.norm, self.up), self.tables, cache, layer_idx=0,
                head_dims=(NOPE, ROPE, VALUE), scaling=0.1,
            )  # fmt: skip

    def cache(self) -> PreallocatedCache:
        rows, _, position, _ = self.kept[0].shape
        cache = PreallocatedCache(1, rows, CAPACITY, "cpu")
        cache.update(*self.kept, 0)
        cache.layers[0].spoil(position, 64.0)
        cache.position.fill_(position)
        cache.pad(torch.arange(rows) * 3)
        return cache

    def both(self) -> tuple[Tensor, Tensor]:
        """By aiter, and by the reference of a cache that lies as ever."""
        found = []
        for name in ("aiter", "reference"):
            with backend.use_backend(name):
                cache = self.cache()
                joined = aiter_latent.joined(cache.layers[0].keys, cache.layers[0].values)
                assert (joined is not None) == (name == "aiter")
                out = self(cache)
            layer, at = cache.layers[0], self.kept[0].shape[2]
            found.append(torch.cat([out, *(kept[:, 0, at : at + 1] for kept in (layer.keys, layer.values))], -1))
            assert (layer.values[:, :, at + 1 :] == 64.0).all()
        return found[0], found[1]


@pytest.mark.parametrize("tag", fake_aiter.RELEASES)
def test_a_step(install: fake_aiter.Install, tag: str) -> None:
    install(tag)
    for rows, position, heads in ((1, 20, 16), (3, 20, 16), (2, CAPACITY - 1, 16), (2, 30, 128)):
        got, wanted = Attention(rows, position, heads).both()
        assert got.shape == wanted.shape
        assert torch.equal(got[..., -RANK - ROPE :], wanted[..., -RANK - ROPE :]), "what is written"
        assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()
    assert fake_aiter.calls["mla_decode_fwd"] == 4 * (2 + 1), "two proofs of a variant, and a call"
    assert reasons("mla_decode") == {}


Lists = tuple[Tensor, Tensor]
right = aiter_latent.slot_lists
FAULTS: dict[str, Callable[[Tensor, Tensor, int], Lists]] = {
    "padding": lambda position, starts, capacity: right(position, starts * 0, capacity),
    "a token less": lambda position, starts, capacity: right(position - 1, starts, capacity),
    "rows as they lie": lambda position, starts, capacity: (
        torch.arange(len(starts) * capacity, dtype=torch.int32), right(position, starts, capacity)[1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*FAULTS, "unscaled", "raises"])
def test_a_wrong_step_is_found(install: fake_aiter.Install, machine: pytest.MonkeyPatch, fault: str) -> None:
    def body(release: Any, sm_scale: float, **others: Any) -> Any:
        if fault == "raises":
            raise RuntimeError("cannot get heuristic kernel")
        scale = 0.12 if fault == "unscaled" else sm_scale
        return fake_aiter.BODIES["mla_decode_fwd"](release, sm_scale=scale, **others)

    if fault in FAULTS:
        machine.setattr(aiter_latent, "slot_lists", FAULTS[fault])
    install(mla_decode_fwd=body)
    attention = Attention(3, 20)
    for _ in range(2):
        got, wanted = attention.both()
        assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max(), "torch's operators attend"
    assert reasons("mla_decode") in ({"raised": 2}, {"differs": 2})
    assert (reasons("mla_decode") == {"raised": 2}) == (fault == "raises")


def test_gates(install: fake_aiter.Install, machine: pytest.MonkeyPatch) -> None:
    install()
    got, wanted = Attention(2, 20, heads=8).both()
    assert (got - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert reasons("mla_decode") == {"latent_heads": 1}
    machine.delenv(aiter_calls.NAMED)
    with backend.use_backend("aiter"):
        layer = Attention(2, 20).cache().layers[0]
        assert layer.keys.is_contiguous()
        assert layer.values.is_contiguous()
        assert aiter_latent.joined(layer.keys, layer.values) is None
    assert not fake_aiter.calls
