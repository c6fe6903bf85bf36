"""The second half of latent attention in a decode step: softmax over the slots, all of it among latents.

B rows, H heads, S capacity, L latent_rank, R rotated columns, N and V as in `latent_query`, p the position of the
token:

    row b reads slots s with starts[b] <= s <= p
    scores[h, s] = (absorbed[h] · c[s] + turned[h] · k[s]) * scaling
    mixed[h] = softmax(scores)[h] c                      [L]
    out[h] = W_h mixed[h]                                [V], W_h the rows of `kv_b_proj` that make head h's values

Keys and values are one tensor, the latents, which a program reads once for 16 heads: the heads are the rows of its
products. Each program takes a part of a row's valid slots (split-KV); what it found is normalised and written with the
logarithm of its weight, and the programs of the second kernel, which multiply with W, add the parts up: one program
alone would read 0.5 MB for 16 heads and 32 parts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, overlaps
from ..launching.tiles import next_power
from .latent_query import HeadDims, Latents

CASES = """
def attend(heads, rows, capacity):
    heads = many(heads)
    kept = Latents(tensor(rows, 1, capacity, 512), tensor(rows, 1, capacity, 64))
    division = divide(rows, heads, capacity, 2)
    queries = tensor(rows, heads, 512), tensor(rows, heads, 64)
    return launch_latent_decode(
        queries, kept, tensor(heads * 256, 512), int64(1), int64(rows), 0.07, HeadDims(128, 64, 128), division
    )

case("DeepSeek V2-Lite", attend, 16, 1, CONTEXT)
case("DeepSeek V2-Lite, 8 rows", attend, 16, 8, CONTEXT)
case("DeepSeek V3", attend, 128, 1, CONTEXT)
case("DeepSeek V3, 32k", attend, 128, 1, LONG_CONTEXT)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _share(count, SPLITS: tl.constexpr, BLOCK_SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return how many slots a part has, and how many parts there are."""
        share = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_SLOTS) * BLOCK_SLOTS
        return share, tl.cdiv(count, share)

    @triton.jit
    def _rows(ptr, slot, end, column, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load the rows `slot` of latents or keys, zeros from slot `end` on."""
        keep = (slot < end)[:, None] & (column < WIDTH)[None, :]
        return tl.load(ptr + slot.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=keep, other=0.0)

    @triton.jit
    def _scores(absorbed, turned, latents, keys, slot, end, scaling):  # type: ignore[no-untyped-def]
        """Return `[heads, slots]` scores, -1e30 from slot `end` on."""
        scores = tl.dot(absorbed, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * scaling
        return tl.where((slot < end)[None, :], scores, -1e30)

    @triton.jit(do_not_specialize=["capacity"])
    def _latent_attention_kernel(  # type: ignore[no-untyped-def]
        absorbed_ptr,
        turned_ptr,
        latents_ptr,
        keys_ptr,
        position_ptr,
        starts_ptr,
        weight_ptr,
        part_ptr,
        capacity,
        scaling,
        H: tl.constexpr,
        L: tl.constexpr,
        R: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_L: tl.constexpr,
        BLOCK_R: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        SPLITS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0)
        part = tl.program_id(2)
        position = tl.load(position_ptr)
        low = tl.load(starts_ptr + row)
        count = (position + 1 - low).to(tl.int32)
        share, active = _share(count, SPLITS, BLOCK_SLOTS)
        if part >= active:
            return
        # Slots are int32: of loops that count in int64, AMD's compiler loses the pipeline's ring of slots in LDS.
        begin = (low + part * share).to(tl.int32)
        end = tl.minimum(begin + share, position.to(tl.int32) + 1)
        head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        column, turned_column = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
        latents_ptr += row.to(tl.int64) * capacity * L
        keys_ptr += row.to(tl.int64) * capacity * R
        # All slots but the newest were written by earlier steps, before this graph was launched.
        slot = begin + tl.arange(0, BLOCK_SLOTS)
        older = tl.minimum(end, position.to(tl.int32))
        latents = _rows(latents_ptr, slot, older, column, L)
        keys = _rows(keys_ptr, slot, older, turned_column, R)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        newest = ((slot == position) & (slot < end))[:, None]
        latent = tl.load(latents_ptr + position * L + column, mask=column < L, other=0.0)
        key = tl.load(keys_ptr + position * R + turned_column, mask=turned_column < R, other=0.0)
        latents, keys = tl.where(newest, latent[None, :], latents), tl.where(newest, key[None, :], keys)
        at = (row * H + head).to(tl.int64)[:, None]
        live = (head < H)[:, None]
        absorbed = tl.load(absorbed_ptr + at * L + column, mask=live & (column < L)[None, :], other=0.0)
        turned = tl.load(turned_ptr + at * R + turned_column, mask=live & (turned_column < R)[None, :], other=0.0)
        scores = _scores(absorbed, turned, latents, keys, slot, end, scaling)
        top = tl.max(scores, 1)
        weights = tl.exp(scores - top[:, None])
        total = tl.sum(weights, 1)
        mixed = tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")
        for first in tl.range(begin + BLOCK_SLOTS, end, BLOCK_SLOTS, num_stages=STAGES):
            slot = first + tl.arange(0, BLOCK_SLOTS)
            latents = _rows(latents_ptr, slot, end, column, L)
            keys = _rows(keys_ptr, slot, end, turned_column, R)
            scores = _scores(absorbed, turned, latents, keys, slot, end, scaling)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            mixed = tl.dot(weights.to(latents.dtype), latents, mixed * shrink[:, None], input_precision="ieee")
            top = higher
        out = (row * H + head).to(tl.int64) * SPLITS + part
        tl.store(weight_ptr + out, top + tl.log(total), mask=head < H)
        y = (mixed / total[:, None]).to(part_ptr.dtype.element_ty)
        tl.store(part_ptr + out[:, None] * L + column, y, mask=live & (column < L)[None, :])

    latent_attention_kernel = Kernel(_latent_attention_kernel, dot=True)

    @triton.jit
    def _latent_values_kernel(  # type: ignore[no-untyped-def]
        part_ptr,
        logarithm_ptr,
        position_ptr,
        starts_ptr,
        weight_ptr,
        out_ptr,
        H: tl.constexpr,
        L: tl.constexpr,
        N: tl.constexpr,
        V: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_L: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        SPLITS: tl.constexpr,
        PARTS: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        """Add up the parts of one head of a row, and multiply with BLOCKS times BLOCK_V rows of the weight."""
        head = tl.program_id(0)
        row = tl.program_id(2)
        first = tl.program_id(1) * BLOCK_V * BLOCKS
        column = tl.arange(0, BLOCK_L)
        number = first + tl.arange(0, BLOCK_V)
        rows = weight_ptr + (head * (N + V) + N).to(tl.int64) * L + column[None, :]
        inside = (number < V)[:, None] & (column < L)[None, :]
        weight = tl.load(rows + number[:, None] * L, mask=inside, other=0.0)
        count = (tl.load(position_ptr) + 1 - tl.load(starts_ptr + row)).to(tl.int32)
        _share_of_a_part, active = _share(count, SPLITS, BLOCK_SLOTS)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        at = (row * H + head).to(tl.int64)
        every = tl.arange(0, SPLITS)
        logarithms = tl.load(logarithm_ptr + at * SPLITS + every, mask=every < active, other=-1e30)
        top = tl.max(logarithms, 0)
        whole = tl.sum(tl.exp(logarithms - top), 0)
        mixed = tl.zeros([BLOCK_L], tl.float32)
        for begin in range(0, active, PARTS):
            some = begin + tl.arange(0, PARTS)
            scale = tl.exp(tl.load(logarithm_ptr + at * SPLITS + some, mask=some < active, other=-1e30) - top)
            keep = (some < active)[:, None] & (column < L)[None, :]
            parts = tl.load(part_ptr + (at * SPLITS + some)[:, None] * L + column, mask=keep, other=0.0)
            mixed += tl.sum(parts.to(tl.float32) * scale[:, None], 0)
        mixed /= whole
        if OVERLAP:  # not before: what follows brings its weights, and the parts would queue behind them
            tl.extra.cuda.gdc_launch_dependents()
        for block in tl.static_range(BLOCKS):
            if block > 0:
                number = first + block * BLOCK_V + tl.arange(0, BLOCK_V)
                inside = (number < V)[:, None] & (column < L)[None, :]
                weight = tl.load(rows + number[:, None] * L, mask=inside, other=0.0)
            y = tl.sum(weight.to(tl.float32) * mixed[None, :], 1)
            tl.store(out_ptr + at * V + number, y.to(out_ptr.dtype.element_ty), mask=number < V)

    latent_values_kernel = Kernel(_latent_values_kernel)


NUM_WARPS = 256 // WAVE
"""With half as many a thread of sm_90 spills 320 bytes (Triton 3.9), and one of gfx942 holds 363 registers (3.6)."""


class Division(NamedTuple):
    """How the work is divided."""

    heads: int
    """Heads of a program: rows of its products."""
    slots: int
    """Slots of a tile."""
    splits: int
    """Most parts of a row."""
    stages: int
    """Tiles of a program in flight."""


@functools.cache
def divide(batch: int, heads: int, capacity: int, element_size: int) -> Division:
    """Return how to divide the work: about 256 programs, tiles of 36 KB at the sizes of DeepSeek."""
    slots = 32 if element_size == 2 else 16
    wanted = max(1, 256 // (batch * -(-heads // 16)))
    splits = min(64, next_power(max(1, min(wanted, -(-capacity // slots)))))
    once = capacity <= splits * slots
    return Division(16, slots if once else 16, splits, 1 if once else 2)  # two tiles of 32 do not fit the registers


def launch_latent_decode(
    queries: tuple[Tensor, Tensor],
    kept: Latents,
    weight: Tensor,
    position: Tensor,
    starts: Tensor,
    scaling: float,
    sizes: HeadDims,
    division: Division,
) -> Tensor:
    """Run both kernels.

    Args:
        queries: `[B, H, L]` and `[B, H, R]`, of `launch_latent_query`.
        kept: the cache of the layer, the token's own slot included.
        weight: of `kv_b_proj`, `[H (N + V), L]`, contiguous.
        position: `[1]`, int64.
        starts: `[B]`, int64, the first slot of each row that is no padding.
        scaling: of the scores.
        sizes: of a head.
        division: of the work.

    Returns:
        `[B, 1, H V]`.
    """
    absorbed, turned = queries
    batch, heads, rank = absorbed.shape
    splits = division.splits
    parts = absorbed.new_empty(batch, heads, splits, rank)
    logarithms = absorbed.new_empty(batch, heads, splits, dtype=torch.float32)
    out = absorbed.new_empty(batch, 1, heads * sizes.value)
    overlap = overlaps(absorbed)
    block_v = min(16, next_power(sizes.value))
    blocks = max(1, min(-(-sizes.value // block_v), batch * heads * sizes.value // (block_v * 512)))
    with backend.device_guard(absorbed):
        latent_attention_kernel.launch(
            (batch, -(-heads // division.heads), splits),
            NUM_WARPS,
            (absorbed, turned, *kept, position, starts, logarithms, parts),
            (kept.latents.shape[2],),
            (),
            (scaling,),
            (
                heads, rank, sizes.rope, overlap, division.heads, max(16, next_power(rank)),
                max(16, next_power(sizes.rope)), division.slots, splits, division.stages,
            ),
            overlap=overlap,
        )  # fmt: skip
        latent_values_kernel.launch(
            (heads, -(-sizes.value // (block_v * blocks)), batch),
            128 // WAVE,
            (parts, logarithms, position, starts, weight, out),
            (),
            (),
            (),
            (
                heads, rank, sizes.nope, sizes.value, overlap, max(16, next_power(rank)), division.slots, splits,
                min(8, splits), block_v, blocks,
            ),
            overlap=overlap,
        )  # fmt: skip
    return out
