"""Experts of MXFP4 on the matrix units: every code at every place, every exponent, and sums against fp64."""

from __future__ import annotations

import one_warp
import pytest
import torch
import triton
import triton.language as tl
from block_weights import SILU, SWISH, blocks, by_definition, mixture
from conftest import INTERPRETED
from torch import Tensor

from hf_rewrite_runtime.core import backend
from hf_rewrite_runtime.launching.launch import HIP, Target, chip_of
from hf_rewrite_runtime.linear.blocks import FOURS, Blocks, _reference
from hf_rewrite_runtime.linear.mma_fp4 import CROSSED, STRAIGHT, UP, exponent_scales, four_words, in_pairs, own_sums
from hf_rewrite_runtime.moe import block_experts, mxfp4_experts
from hf_rewrite_runtime.moe.experts import REASONS
from hf_rewrite_runtime.moe.form import ExpertsForm, gated, gating
from hf_rewrite_runtime.moe.mxfp4_experts import launch_down, launch_gate_up, launch_mxfp4_experts, rule, takes

pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HIP, reason="by NVIDIA's matrix instructions that sum up for each thread"),
]


@triton.jit
def _one_step(  # type: ignore[no-untyped-def]
    x_ptr,
    values_ptr,
    scale_ptr,
    out_ptr,
    WRONG: tl.constexpr,
    CROSS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Sums of 16 rows of 4 groups, `[16, 4]`; of two inputs with CROSS."""
    thread = tl.arange(0, 32)
    row, quad = thread // 4, thread % 4
    says = row // 2 == quad if CROSS else row == 2 * quad
    word = tl.arange(0, 4)[None, :]
    x_ptr += (quad + (row % 2 * 4 if CROSS else 0))[:, None] * 16 + word
    x = ()
    for i in tl.static_range(4):
        x += (in_pairs(four_words(tl.load(x_ptr + 4 * i)), says, PTX),)
    at = values_ptr + (row * 4 + quad)[:, None] * 4 + word
    s, t = own_sums(tl.load(at), tl.load(at + 8 * 16), x, (thread + WRONG) % 32, CROSS, PTX)
    tl.store(out_ptr + thread, s * exponent_scales(tl.load(scale_ptr + thread)))
    tl.store(out_ptr + 32 + thread, t * exponent_scales(tl.load(scale_ptr + 32 + thread)))


def one_step(weight: Blocks, x: Tensor, wrong: int = 0) -> Tensor:
    out = torch.full((16, 4), torch.nan, device=x.device)
    words = weight.values.view(torch.int32)
    _one_step[(1,)](
        x.view(torch.int32), words, weight.scale, out, wrong, len(x) == 2, chip_of(x) is not None, num_warps=1
    )
    return out


@pytest.mark.parametrize("inputs", [1, 2])
def test_every_code_at_every_place_of_a_group(inputs: int, device: torch.device) -> None:
    """Each group of the input is another number at that place and zeros, so that nothing else may be in the sum."""
    for place in range(32):
        codes = torch.randint(0, 16, (16, 4, 32), dtype=torch.uint8)
        codes[:, :, place] = ((torch.arange(16) + place) % 16)[:, None]
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1).contiguous().to(device)
        weight = Blocks(packed, torch.full((16, 4), 127, dtype=torch.uint8, device=device), 1, 32)
        x = torch.zeros(inputs, 4, 32)
        x[:, :, place] = torch.arange(1, 4 * inputs + 1).view(inputs, 4) * (-2.0) ** (place - 16)
        x = x.bfloat16().flatten(1).to(device)
        wide = _reference(weight, torch.float64).view(16, 4, 32)[:, :, place]
        said = x.double().view(inputs, 4, 32)[:, :, place]
        wanted = torch.cat((wide[:8] * said[0], wide[8:] * said[-1]))
        assert torch.equal(one_step(weight, x).double(), wanted), place


def test_every_exponent_scales_a_group(device: torch.device) -> None:
    x = torch.zeros(1, 128, dtype=torch.bfloat16, device=device)
    x[:, ::32] = 1.0
    for first in range(0, 255, 64):
        exponents = torch.arange(first, first + 64).clamp(max=254).to(torch.uint8).view(16, 4)
        weight = Blocks(torch.full((16, 64), 0x22, dtype=torch.uint8, device=device), exponents.to(device), 1, 32)
        wanted = torch.ldexp(torch.ones(16, 4, dtype=torch.float64), exponents.int() - 127)
        assert torch.equal(one_step(weight, x).double().cpu(), wanted)


@pytest.mark.skipif(INTERPRETED, reason="an interpreter has no threads")
@pytest.mark.parametrize("inputs", [1, 2])
def test_threads_that_are_not_where_they_should_be_give_no_numbers(inputs: int, device: torch.device) -> None:
    weight, x = blocks(16, 128, device, "four"), torch.ones(inputs, 128, dtype=torch.bfloat16, device=device)
    assert one_step(weight, x).isfinite().all()
    assert one_step(weight, x, wrong=1).isnan().all()


@pytest.mark.parametrize("crossed", [False, True])
def test_the_instructions_of_a_warp(crossed: bool) -> None:
    """As an interpreter of them understands them, which knows who holds what of a matrix."""
    words = torch.randint(0, 1 << 32, (8, 32))
    lane = torch.arange(32)
    row, quad = lane // 4, lane % 4
    said = torch.randint(-8, 9, (32, 32)).bfloat16()  # of a thread, its columns
    says = row // 2 == quad if crossed else row == 2 * quad
    bits = (torch.where(says[:, None], said, 0) * UP).view(torch.int16).long() & 0xFFFF
    pairs = [bits[:, at] | bits[:, at + 4] << 16 for word in range(4) for at in range(8 * word, 8 * word + 4)]
    text = (CROSSED if crossed else STRAIGHT).value
    got = one_warp.run(text, 2, [*words, *pairs, lane])
    numbers = torch.tensor(FOURS, dtype=torch.float64)[words[:, :, None] >> 4 * torch.arange(8) & 15]
    halves = numbers.view(2, 4, 32, 8).transpose(1, 2).flatten(2)
    for i, half in enumerate(halves):
        of = 8 * quad + quad + (4 if crossed and i else 0)  # the thread that says this one's columns
        assert torch.equal(got[i], (half * said[of].double()).sum(1))
    wrong = one_warp.run(text, 2, [*words, *pairs, lane.roll(1)])
    assert all(part.isnan().all() for part in wrong)


def in_order(states: Tensor) -> Tensor:
    """Return states as the first kernel writes them, in order and in fp64."""
    *leading, size = states.shape
    return states.view(*leading, size // 8, 4, 2).transpose(-1, -2).reshape(*leading, size).double() / UP


def in_pairs_of(states: Tensor) -> Tensor:
    *leading, size = states.shape
    paired = states.view(*leading, size // 8, 2, 4).transpose(-1, -2).reshape(*leading, size)
    return (paired * UP).bfloat16().contiguous()


def index_of(tokens: int, top_k: int, device: torch.device) -> Tensor:
    return torch.stack([torch.randperm(3)[:top_k] for _ in range(tokens)]).to(device)


@pytest.mark.parametrize(
    ("form", "tile", "tokens"),
    [
        (SWISH, (1, 2, 1, 1), 2),
        (SILU, (2, 1, 1, 0), 1),
        (SWISH._replace(interleaved=False), (3, 1, 2, 1), 1),
        (ExpertsForm(None, 1.702, 0.5, 1.0, interleaved=True), (2, 1, 1, 1), 1),
    ],
    ids=["swish", "silu", "gates first", "low limit, no bias"],
)
def test_gate_and_up(
    form: ExpertsForm, tile: tuple[int, ...], tokens: int, device: torch.device, poisoned: None
) -> None:
    """The last step of a row and the last tile of rows begin in those before."""
    tiles, warps, unroll, _ = tile
    size = 32 * (4 * warps * unroll + 1)
    parts = mixture("four", form, device, size, 8 * tiles + 8)
    x, index = (torch.randn(tokens, size, device=device) * 0.3).bfloat16(), index_of(tokens, 2, device)
    how = gating(form)
    assert how is not None
    states = torch.full((tokens, 2, 8 * tiles + 8), torch.nan, device=device)
    launch_gate_up(x, index, parts.gate_up, parts.biases[0], states, how, tile)
    dense = _reference(parts.gate_up, torch.float64)[index]
    both = (dense @ x.double()[:, None, :, None]).squeeze(-1)
    if parts.biases[0] is not None:
        both = both + parts.biases[0].double()[index]
    halves = (both[..., ::2], both[..., 1::2]) if how.interleaved else both.chunk(2, -1)
    wanted = gated(*halves, how)
    assert (in_order(states) - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize(
    ("top_k", "tile", "whole"),
    [(1, (1, 2, 1, 1), True), (2, (2, 1, 1, 0), False), (3, (3, 2, 2, 0), True), (3, (1, 4, 1, 1), False)],
)
def test_down(top_k: int, tile: tuple[int, ...], whole: bool, device: torch.device, poisoned: None) -> None:
    """Some experts may be another process's; a third expert has no other beside it."""
    tiles, warps, unroll, _ = tile
    columns = 32 * (4 * warps * unroll // ((top_k + 1) // 2) + 1)
    parts = mixture("four", SWISH, device, 8 * tiles + 8, columns)
    states, index = (torch.randn(2, top_k, columns, device=device) * 0.3).bfloat16(), index_of(2, top_k, device)
    shares = torch.rand(2, top_k, device=device)
    size = parts.down.shape[1]
    residual, bias = (torch.randn(2, size, device=device), parts.biases[1]) if whole else (None, None)
    dense = (_reference(parts.down, torch.float64)[index] @ states.double().unsqueeze(-1)).squeeze(-1)
    if whole:
        assert bias is not None
        dense = dense + bias.double()[index]
    else:
        index[1, 0] = 3
        dense[1, 0] = 0.0
    wanted = 0.5 * (dense * shares.double()[..., None]).sum(1)
    wanted = wanted if residual is None else wanted + residual.double()
    out = torch.full((2, size), torch.nan, device=device)
    launch_down(in_pairs_of(states), index, shares, parts.down, bias, residual, out, 0.5, tile)
    assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()


def test_experts_in_bf16_are_theirs(device: torch.device, poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and output are rounded to bf16, by the interpreter towards zero."""
    parts = mixture("four", SWISH, device, 160, 128)
    x, index = (torch.randn(1, 160, device=device) * 0.3).bfloat16(), index_of(1, 2, device)
    shares, residual = (
        torch.rand(1, 2, device=device).bfloat16(),
        torch.randn(1, 160, device=device).bfloat16(),
    )
    parts = parts._replace(biases=tuple(bias.bfloat16() for bias in parts.biases if bias is not None))
    called = []
    launch = launch_mxfp4_experts
    monkeypatch.setattr(mxfp4_experts, "launch_mxfp4_experts", lambda *given: called.append(1) or launch(*given))
    how = gating(SWISH, 0.5)
    assert how is not None
    wanted = by_definition(x, index, shares, parts, how) + residual.double()
    got = block_experts.block_experts(x, parts, index, shares, residual, 0.5, many=False)
    assert called
    assert (got.double() - wanted).norm() <= 2**-7 * wanted.norm()


def test_experts_whose_threads_are_elsewhere_are_for_other_kernels(
    device: torch.device, poisoned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not numbers are noticed once, by the host, and counted each time; those of the input are nobody's fault."""
    parts = mixture("four", SWISH, device, 160, 128)
    x, index = (torch.randn(1, 160, device=device) * 0.3).bfloat16(), index_of(1, 2, device)
    shares = torch.rand(1, 2, device=device).bfloat16()
    parts = parts._replace(biases=tuple(bias.bfloat16() for bias in parts.biases if bias is not None))
    launched = []
    monkeypatch.setattr(mxfp4_experts, "_agrees", {})
    monkeypatch.setattr(
        mxfp4_experts, "launch_mxfp4_experts", lambda *given: launched.append(1) or given[7].fill_(torch.nan)
    )
    how = gating(SWISH)
    assert how is not None
    backend.reset_fallbacks()
    assert block_experts.block_experts(x * torch.nan, parts, index, shares, None, 1.0, many=False).isnan().all()
    assert not backend.fallbacks()
    wanted = by_definition(x, index, shares, parts, how)
    for count in (1, 2):
        got = block_experts.block_experts(x, parts, index, shares, None, 1.0, many=False)
        assert (got.double() - wanted).norm() <= 2**-7 * wanted.norm()
        assert backend.fallbacks() == {("fused_experts", "threads_elsewhere"): count}
    assert len(launched) == 2
    assert "threads_elsewhere" in REASONS


def test_which_experts_are_theirs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(size: int, kind: str = "four") -> tuple[Blocks, Blocks]:
        return blocks(256, size, device, kind, (2,)), blocks(size, 128, device, kind, (2,))

    x = torch.zeros(2, 160, dtype=torch.bfloat16, device=device)
    assert takes(x, *weights(160))
    assert not takes(x.half(), *weights(160))
    assert not takes(x, *weights(160, "eight"))
    assert not takes(x[:, :96], *weights(96)), "four threads have a group each"
    assert not takes(torch.zeros(321, dtype=x.dtype, device=device)[1:].view(2, 160), *weights(160)), "not in words"
    for chip, taken in (
        (Target("hip", "gfx950"), False),
        (Target("cuda", "sm_75"), False),
        (Target("cuda", "sm_80"), True),
    ):
        monkeypatch.setattr(mxfp4_experts, "chip_of", lambda tensor, chip=chip: chip)
        assert takes(x, *weights(160)) == taken


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("hidden_size", "size"), [(128, 128), (2880, 2880), (160, 4096)])
def test_tiles_fit(hidden_size: int, size: int, top_k: int) -> None:
    """A program's first load is inside a row; its warps are a power of two, and each two experts' the same."""
    for (tiles, warps, steps, _), columns, pairs in zip(
        rule(hidden_size, size, top_k), (hidden_size, size), (1, max(1, (top_k + 1) // 2)), strict=True
    ):
        assert warps % pairs == 0
        assert warps & warps - 1 == 0
        assert 4 * warps // pairs * steps <= columns // 32
        assert 8 * tiles <= min(hidden_size, size)
