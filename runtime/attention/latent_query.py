"""The first half of latent attention in a decode step: queries brought to the latents, the cache written.

B rows of one token, H heads, L latent_rank, N columns of a head without position, R rotated ones, V of its values, p
the position of the token. `kv_b_proj` has rows `[H, N + V]`, of which U_h are the N that make head h's keys:

    key of slot s          cat(U_h c[s], k[s])           c[s] the normed latent, k[s] rotated and of all heads
    q_h · key of slot s  = (U_hᵀ q_nope) · c[s] + rotate(q_rope) · k[s]

    absorbed[b, h] = U_hᵀ q_nope[b, h]                   [L]
    turned[b, h] = rotate(q_rope[b, h])                  [R]
    latents[b, 0, p] = norm(c[b])                        keys[b, 0, p] = rotate(k[b])

(DeepSeek-V2, 2024, section 2.1.2: the up-projection of the keys is absorbed by the queries.) A program multiplies some
columns of one head's U, read as it lies in `kv_b_proj`; one more writes the cache. Sums are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, overlaps
from ..launching.tiles import next_power
from ..linear.prologue import norm_arguments
from ..norms.norm_form import Prologue
from ..rope.rope_cache import Rotation

CASES = """
def bring(heads, rows):
    heads = many(heads)
    q, compressed = tensor(rows, 1, heads * 192), tensor(rows, 1, 576)
    kept = Latents(tensor(rows, 1, CONTEXT, 512), tensor(rows, 1, CONTEXT, 64))
    table = tensor(rows, 1, 32)
    turn = Turn(Rotation(table, table, interleaved=True, half_table=True), deinterleave=True)
    sizes = HeadDims(128, 64, 128)
    latent, key = compressed.split([512, 64], -1)
    return launch_latent_query(
        q, (latent, key), tensor(heads * 256, 512), prologue(512), kept, int64(1), turn, sizes
    )

case("DeepSeek V2-Lite", bring, 16, 1)
case("DeepSeek V2-Lite, 8 rows", bring, 16, 8)
case("DeepSeek V3", bring, 128, 1)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..rope.rope_cache import pair_columns

    @triton.jit
    def _turned(  # type: ignore[no-untyped-def]
        row_ptr,
        rows,
        row_stride,
        count,
        cos_ptr,
        sin_ptr,
        table_stride,
        column_stride,
        out_ptr,
        out_stride,
        R: tl.constexpr,
        TURNS: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        DEINTERLEAVE: tl.constexpr,
        BLOCK_PAIRS: tl.constexpr,
    ):
        """Rotate R columns of rows at `row_ptr` by those of the tables and store them at `out_ptr`."""
        pair = tl.arange(0, BLOCK_PAIRS)
        column, other_column, _inside = pair_columns(pair, R, R, INTERLEAVED)
        keep = (rows < count)[:, None] & (pair < R // 2)[None, :]
        source = row_ptr + rows.to(tl.int64)[:, None] * row_stride
        first = tl.load(source + column[None, :], mask=keep, other=0.0).to(tl.float32)
        second = tl.load(source + other_column[None, :], mask=keep, other=0.0).to(tl.float32)
        if TURNS:
            table = rows.to(tl.int64)[:, None] * table_stride
            at = (pair if HALF_TABLE else column)[None, :] * column_stride
            at_other = (pair if HALF_TABLE else other_column)[None, :] * column_stride
            cos = tl.load(cos_ptr + table + at, mask=keep, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + table + at, mask=keep, other=0.0).to(tl.float32)
            other_cos = tl.load(cos_ptr + table + at_other, mask=keep, other=1.0).to(tl.float32)
            other_sin = tl.load(sin_ptr + table + at_other, mask=keep, other=0.0).to(tl.float32)
            first, second = first * cos - second * sin, second * other_cos + first * other_sin
        if DEINTERLEAVE:
            column, other_column = pair, pair + R // 2
        target = out_ptr + rows.to(tl.int64)[:, None] * out_stride
        tl.store(target + column[None, :], first.to(out_ptr.dtype.element_ty), mask=keep)
        tl.store(target + other_column[None, :], second.to(out_ptr.dtype.element_ty), mask=keep)

    @triton.jit(do_not_specialize=["count", "capacity"])
    def _latent_query_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        latent_ptr,
        key_ptr,
        weight_ptr,
        norm_ptr,
        cos_ptr,
        sin_ptr,
        position_ptr,
        absorbed_ptr,
        turned_ptr,
        latents_ptr,
        keys_ptr,
        count,
        capacity,
        q_stride,
        latent_stride,
        key_stride,
        table_stride,
        column_stride,
        eps,
        offset,
        H: tl.constexpr,
        L: tl.constexpr,
        N: tl.constexpr,
        R: tl.constexpr,
        V: tl.constexpr,
        TURNS: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        DEINTERLEAVE: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        OVERLAP: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_L: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        BLOCK_PAIRS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        blocks: tl.constexpr = (L + BLOCK_COLS - 1) // BLOCK_COLS
        head = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        if head < H:
            row = tl.arange(0, BLOCK_N)
            col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            inside = (row < N)[:, None] & (col < L)[None, :]
            at = (head * (N + V) + row).to(tl.int64)[:, None] * L + col[None, :]
            weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            query = q_ptr + head * (N + R)
            if ROWS == 1:
                q = tl.load(query + rows.to(tl.int64)[:, None] * q_stride + row[None, :], mask=(row < N)[None, :])
                q = tl.where(row < N, tl.reshape(q, (BLOCK_N,)).to(tl.float32), 0.0)
                y = tl.sum(weight.to(tl.float32) * q[:, None], 0)[None, :]
            else:
                there = (rows < count)[:, None] & (row < N)[None, :]
                q = tl.load(query + rows.to(tl.int64)[:, None] * q_stride + row[None, :], mask=there, other=0.0)
                y = tl.dot(q.to(weight.dtype), weight, input_precision="ieee")
            target = absorbed_ptr + (rows.to(tl.int64)[:, None] * H + head) * L + col[None, :]
            keep = (rows < count)[:, None] & (col < L)[None, :]
            tl.store(target, y.to(absorbed_ptr.dtype.element_ty), mask=keep)
            if block == 0:
                _turned(
                    query + N, rows, q_stride, count, cos_ptr, sin_ptr, table_stride, column_stride,
                    turned_ptr + head * R, H * R, R, TURNS, INTERLEAVED, HALF_TABLE, DEINTERLEAVE, BLOCK_PAIRS,
                )  # fmt: skip
            return
        position = tl.load(position_ptr)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        col = tl.arange(0, BLOCK_L)
        keep = (rows < count)[:, None] & (col < L)[None, :]
        at = rows.to(tl.int64)[:, None] * latent_stride + col[None, :]
        latent = tl.load(latent_ptr + at, mask=keep, other=0.0).to(tl.float32)
        if NORM:
            latent *= tl.rsqrt(tl.sum(latent * latent, 1) / L + eps)[:, None]
            if NORM_WEIGHT:
                latent *= (tl.load(norm_ptr + col, mask=col < L, other=0.0).to(tl.float32) + offset)[None, :]
        target = latents_ptr + (rows.to(tl.int64)[:, None] * capacity + position) * L + col[None, :]
        tl.store(target, latent.to(latents_ptr.dtype.element_ty), mask=keep)
        _turned(
            key_ptr, rows, key_stride, count, cos_ptr, sin_ptr, table_stride, column_stride,
            keys_ptr + position * R, capacity * R, R, TURNS, INTERLEAVED, HALF_TABLE, DEINTERLEAVE, BLOCK_PAIRS,
        )  # fmt: skip

    latent_query_kernel = Kernel(_latent_query_kernel, dot=True)

COLUMNS = 64
"""Of the latents, of one head's part of the weight: 16 KB in bf16, where a head has 128 columns."""
TOGETHER = 16
"""Rows that share one read of the weight."""


class HeadDims(NamedTuple):
    """Sizes of a head."""

    nope: int
    """N, columns of queries and keys that are not rotated."""
    rope: int
    """R, those that are; keys have them in common."""
    value: int
    """V."""


class Latents(NamedTuple):
    """What the cache of a layer holds, contiguous."""

    latents: Tensor
    """`[B, 1, S, L]`."""
    keys: Tensor
    """`[B, 1, S, R]`."""


class Turn(NamedTuple):
    """How the last R columns are rotated."""

    rotation: Rotation | None
    """None where they are not."""
    deinterleave: bool = False
    """Whether the first columns of the pairs are written before the second ones; see `rotary`."""


def launch_latent_query(
    q: Tensor,
    compressed: tuple[Tensor, Tensor],
    weight: Tensor,
    norm: Prologue | None,
    kept: Latents,
    position: Tensor,
    turn: Turn,
    sizes: HeadDims,
) -> tuple[Tensor, Tensor]:
    """Run the kernel.

    Args:
        q: `[B, 1, H (N + R)]`, dense in its last dimension.
        compressed: latents `[B, 1, L]` before their norm, and keys `[B, 1, R]` before rotation; dense likewise.
        weight: of `kv_b_proj`, `[H (N + V), L]`, contiguous.
        norm: of the latents; None where they are normed.
        kept: the cache of the layer, which is written.
        position: `[1]`, int64.
        turn: the rotation.
        sizes: of a head.

    Returns:
        `[B, H, L]` and `[B, H, R]`.
    """
    latent, key = compressed
    batch, rank, heads = q.shape[0], weight.shape[1], weight.shape[0] // (sizes.nope + sizes.value)
    absorbed, turned = q.new_empty(batch, heads, rank), q.new_empty(batch, heads, sizes.rope)
    norm_weight, eps, offset, has_weight = norm_arguments(norm, q)
    rotation = turn.rotation
    cos, sin = (q, q) if rotation is None else (rotation.cos, rotation.sin)
    overlap = overlaps(q)
    rows = 1 if batch == 1 else TOGETHER
    with backend.device_guard(q):
        latent_query_kernel.launch(
            (heads * -(-rank // COLUMNS) + 1, -(-batch // rows), 1),
            (128 if rows == 1 else 256) // WAVE,
            (
                q, latent, key, weight, norm_weight, cos, sin, position, absorbed, turned, kept.latents, kept.keys,
            ),
            (batch, kept.latents.shape[2]),
            (
                q.stride(0), latent.stride(0), key.stride(0), cos.stride(0) if cos.shape[0] > 1 else 0,
                1 if rotation is None else cos.stride(-1),
            ),
            (eps, offset),
            (
                heads, rank, *sizes, rotation is not None, rotation is not None and rotation.interleaved,
                rotation is not None and rotation.half_table, turn.deinterleave, norm is not None, has_weight, overlap,
                rows, max(16, next_power(sizes.nope)), next_power(rank), COLUMNS, next_power(max(1, sizes.rope // 2)),
            ),
            overlap=overlap,
        )  # fmt: skip
    return absorbed, turned
