"""Latent attention in a decode step: kernels and the absorbed form beside expanded keys and values in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import INTERPRETED, KERNEL_DTYPES
from test_step_kernels import Norm, projection
from tolerances import assert_as_exact_as
from torch import Tensor, nn

from hf_rewrite_runtime.attention.latent_attention import latent_attention
from hf_rewrite_runtime.attention.latent_decode import Division, launch_latent_decode
from hf_rewrite_runtime.attention.latent_query import HeadDims, Latents
from hf_rewrite_runtime.cache.preallocated import PreallocatedCache
from hf_rewrite_runtime.core import backend

CAPACITY, HIDDEN, RANK, SIZES = 96, 40, 24, HeadDims(12, 8, 20)
ROTATIONS: dict[str, dict[str, bool] | None] = {
    "halves": {},
    "neighbours apart": {"interleaved": True, "half_table": True, "deinterleave": True},
    "neighbours, in fp32": {"interleaved": True, "half_table": True, "in_fp32": True},
    "none": None,
}


class Wrapped(nn.Module):
    """A projection that something else has replaced: its weight alone is not what it computes."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Attention(nn.Module):
    """Modules and a filled cache, of which rows end in NaN."""

    def __init__(self, heads: int, batch: int, position: int, rotation: str, twice: bool, normed: bool = True):
        super().__init__()
        inner = 28
        width = heads * (SIZES.nope + SIZES.rope)
        first = projection(HIDDEN, inner if twice else width, True)
        self.queries = nn.ModuleList([first, Norm(inner), projection(inner, width, False)] if twice else [first])
        self.norm = Norm(HIDDEN)
        kv_norm = Norm(RANK) if normed else nn.LayerNorm(RANK)
        down = projection(HIDDEN, RANK + SIZES.rope, False)
        self.latents = nn.ModuleList([down, kv_norm, projection(RANK, heads * (SIZES.nope + SIZES.value), False)])
        self.requires_grad_(False)
        self.hidden = torch.randn(batch, 1, HIDDEN)
        self.kept = torch.randn(batch, 1, CAPACITY, RANK), torch.randn(batch, 1, CAPACITY, SIZES.rope)
        self.position, self.options = position, ROTATIONS[rotation]
        columns = SIZES.rope // 2 if self.options and "half_table" in self.options else SIZES.rope
        angle = torch.rand(1 if rotation == "halves" else batch, 1, columns)
        self.tables = angle.cos(), angle.sin()

    def forward(self, kind: torch.dtype, rounded: torch.dtype, device: torch.device) -> Tensor:
        """Run the operator on a cache in `kind` of what was drawn, rounded to `rounded`; return what it wrote too."""
        batch = self.hidden.shape[0]

        def of(x: Tensor) -> Tensor:
            return x.to(device, rounded).to(kind)

        cache = PreallocatedCache(1, batch, CAPACITY, device)
        layer: Any = cache.layers[0]
        layer.allocate(1, RANK, SIZES.rope, kind, device)
        for buffer, kept in zip((layer.keys, layer.values), self.kept, strict=True):
            buffer.copy_(of(kept))
            buffer[:, :, self.position :] = torch.nan
        cache.position.fill_(self.position)
        cache.pad(torch.arange(batch) % (self.position // 2 + 1))
        tables = tuple(t.to(device) if (self.options or {}).get("in_fp32") else of(t) for t in self.tables)
        with cache.step():
            out = latent_attention(
                of(self.hidden), tuple(self.queries), tuple(self.latents), None if self.options is None else tables,
                cache, layer_idx=0, head_dims=SIZES, scaling=0.3, norm=self.norm, **(self.options or {}),
            )  # fmt: skip
        written = [buffer[:, 0, self.position] for buffer in (layer.keys, layer.values)]
        assert buffer_is_untouched(layer, self.kept, of, self.position)
        return torch.cat([out[:, 0], *written], dim=-1)


def buffer_is_untouched(layer: Any, kept: tuple[Tensor, Tensor], of: Any, position: int) -> bool:
    return all(
        torch.equal(buffer[:, :, :position], of(before)[:, :, :position])
        and buffer[:, :, position + 1 :].isnan().all()
        for buffer, before in zip((layer.keys, layer.values), kept, strict=True)
    )


def exactly(attention: Attention, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Run with expanded keys and values in fp64."""
    own = attention.latents[2]
    attention.double()
    attention.latents[2] = Wrapped(own)
    with backend.use_backend("reference"):
        result = attention(torch.float64, dtype, device)
    assert backend.fallbacks() == {("latent_attention", "not_linear"): 1}
    attention.latents[2] = own
    attention.to(dtype)
    backend.reset_fallbacks()
    return result


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "batch", "position", "rotation", "twice", "normed"),
    [
        (3, 1, 70, "halves", True, True),
        (17, 1, 0, "neighbours apart", False, True),
        (2, 3, 40, "neighbours, in fp32", True, False),
        (1, 17, 20, "none", False, True),
    ],
)
def test_a_step(
    heads: int,
    batch: int,
    position: int,
    rotation: str,
    twice: bool,
    normed: bool,
    dtype: torch.dtype,
    device: torch.device,
    poisoned: None,
) -> None:
    attention = Attention(heads, batch, position, rotation, twice, normed).to(device, dtype)
    exact = exactly(attention, dtype, device)
    got = attention(dtype, dtype, device)
    assert not backend.fallbacks()
    with backend.use_backend("reference"):
        plain = attention(dtype, dtype, device)
    assert_as_exact_as(plain, got, exact, torch.finfo(dtype).eps)


@pytest.mark.parametrize("division", [Division(16, 16, 1, 2), Division(16, 16, 4, 1)], ids=str)
def test_every_division_is_one_attention(division: Division, device: torch.device, poisoned: None) -> None:
    queries = torch.randn(2, 2, RANK, device=device), torch.randn(2, 2, SIZES.rope, device=device)
    kept = Latents(*(torch.randn(2, 1, CAPACITY, width, device=device) for width in (RANK, SIZES.rope)))
    weight = torch.randn(2 * (SIZES.nope + SIZES.value), RANK, device=device)
    position, starts = torch.tensor([77], device=device), torch.tensor([0, 61], device=device)

    def run(division: Division) -> Tensor:
        return launch_latent_decode(queries, kept, weight, position, starts, 0.2, SIZES, division)

    one = run(Division(16, 64, 1, 1))
    torch.testing.assert_close(run(division), one, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="the plain form")
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("twice", [False, True])
def test_the_absorbed_form_is_the_expanded_one(rotation: str, twice: bool) -> None:
    device = torch.device("cpu")
    attention = Attention(5, 3, 30, rotation, twice)
    exact = exactly(attention.double(), torch.float64, device)
    got = attention.double()(torch.float64, torch.float64, device)
    assert not backend.fallbacks()
    torch.testing.assert_close(got, exact, rtol=1e-6 if rotation.endswith("fp32") else 1e-11, atol=1e-6)


@pytest.mark.skipif(INTERPRETED, reason="the plain form")
def test_a_bias_of_the_up_projection_is_expanded() -> None:
    device = torch.device("cpu")
    attention = Attention(5, 2, 30, "halves", False)
    attention.latents[2] = projection(RANK, 5 * (SIZES.nope + SIZES.value), True)
    exact = exactly(attention, torch.float32, device)
    torch.testing.assert_close(attention(torch.float32, torch.float32, device).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("twice", [False, True])
def test_projections_without_a_weight_are_called(twice: bool) -> None:
    """As those of AWQ and GPTQ checkpoints are."""
    torch.manual_seed(0)
    attention = Attention(3, 2, 20, "halves", twice).double()
    cpu = torch.device("cpu")
    with backend.use_backend("reference"):
        wanted = attention(torch.float64, torch.float64, cpu)
        attention.queries[0], attention.latents[0] = Wrapped(attention.queries[0]), Wrapped(attention.latents[0])
        got = attention(torch.float64, torch.float64, cpu)
    torch.testing.assert_close(got, wanted)
