"""The kernels of experts whose weights are `[E, H, 2 M]` and `[E, M, H]`: a program reads columns, row after row.

The letters are those of `experts`. There are few columns to share out, so programs share the rows of the second
product; the last one of a column adds up the parts in their order: the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device import row_tiles
from ..device.split_k_semaphores import arrivals
from ..launching.launch import WAVE, Kernel, overlaps, wait_for_stores
from .form import Gating

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
    from .form import gate_experts, load_tile

    @triton.jit
    def _transposed_gate_up_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        index_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        x_stride,
        index_stride,
        scaling,
        limit,
        offset,
        E: tl.constexpr,
        K: tl.constexpr,
        H: tl.constexpr,
        M: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BOUNDED: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        BIASED: tl.constexpr,
        FIRST: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        """Compute BLOCK_M columns of one token's expert, if it is one of those that are here."""
        if OVERLAP:
            # In this order: once the next kernel runs, what came before this one, the experts' numbers, is there.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        EVEN: tl.constexpr = H % BLOCK_H == 0 and M % BLOCK_M == 0
        slot = tl.program_id(1)
        token = tl.program_id(2).to(tl.int64)
        expert = tl.load(index_ptr + token * index_stride + slot).to(tl.int64)
        if FIRST >= 0:
            expert -= FIRST
            if (expert < 0) | (expert >= E):
                return
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        weight_rows = weight_ptr + expert * (2 * M * H)
        biases = bias_ptr + expert * (2 * M)
        if INTERLEAVED:
            both_col = tl.program_id(0) * (2 * BLOCK_M) + tl.arange(0, 2 * BLOCK_M)
            both = tl.zeros((BLOCK_H, 2 * BLOCK_M), tl.float32)
        else:
            col = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            gates = tl.zeros((BLOCK_H, BLOCK_M), tl.float32)
            ups = tl.zeros((BLOCK_H, BLOCK_M), tl.float32)
        for start in tl.range(0, H, BLOCK_H, num_stages=3):
            row = start + tl.arange(0, BLOCK_H)
            x = load_tile(x_ptr + token * x_stride + row, row < H, EVEN).to(tl.float32)
            if INTERLEAVED:
                there = (row < H)[:, None] & (both_col < 2 * M)[None, :]
                at = weight_rows + row[:, None] * (2 * M) + both_col[None, :]
                both += load_tile(at, there, EVEN).to(tl.float32) * x[:, None]
            else:
                there = (row < H)[:, None] & (col < M)[None, :]
                at = weight_rows + row[:, None] * (2 * M) + col[None, :]
                gates += load_tile(at, there, EVEN).to(tl.float32) * x[:, None]
                ups += load_tile(at + M, there, EVEN).to(tl.float32) * x[:, None]
        if INTERLEAVED:
            col = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            total = tl.sum(both, axis=0)
            if BIASED:
                total += tl.load(biases + both_col, mask=both_col < 2 * M, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(total, (BLOCK_M, 2)))
        else:
            gate, up = tl.sum(gates, axis=0), tl.sum(ups, axis=0)
            if BIASED:
                gate += tl.load(biases + col, mask=col < M, other=0.0).to(tl.float32)
                up += tl.load(biases + M + col, mask=col < M, other=0.0).to(tl.float32)
        gated = gate_experts(gate, up, scaling, limit, offset, ACTIVATION, BOUNDED)
        out_row = out_ptr + (token * K + slot) * M
        tl.store(out_row + col, gated.to(out_ptr.dtype.element_ty), mask=col < M)

    @triton.jit
    def _transposed_down_kernel(  # type: ignore[no-untyped-def]
        gated_ptr,
        index_ptr,
        weights_ptr,
        weight_ptr,
        bias_ptr,
        residual_ptr,
        part_ptr,
        arrived_ptr,
        out_ptr,
        index_stride,
        weights_stride,
        residual_stride,
        scaling,
        E: tl.constexpr,
        K: tl.constexpr,
        H: tl.constexpr,
        M: tl.constexpr,
        BIASED: tl.constexpr,
        FIRST: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        BLOCK_H: tl.constexpr,
        BLOCK_M: tl.constexpr,
        PARTS: tl.constexpr,
        BLOCK_PARTS: tl.constexpr,
    ):
        """Compute BLOCK_H columns of one token's output over one of PARTS parts of one expert's rows.

        The first rows of the weight are loaded before the gated states are there; the experts' numbers were when the
        kernel before this one let it start.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        SHARE: tl.constexpr = (M + PARTS * BLOCK_M - 1) // (PARTS * BLOCK_M) * BLOCK_M
        EVEN: tl.constexpr = FIRST < 0 and H % BLOCK_H == 0 and M == PARTS * SHARE
        tile = tl.program_id(1)
        token = tl.program_id(2).to(tl.int64)
        split = tl.program_id(0)
        slot = split // PARTS
        part = split % PARTS
        expert = tl.load(index_ptr + token * index_stride + slot).to(tl.int64)
        rows = M  # of this expert, here
        if FIRST >= 0:
            expert -= FIRST
            rows = tl.where((expert >= 0) & (expert < E), M, 0)
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        col = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        row = tl.arange(0, BLOCK_M)
        begin = part * SHARE
        weight_rows = weight_ptr + expert * (H * M) + col[None, :]
        gated_row = gated_ptr + (token * K + slot) * M
        first = begin + row
        there = (first < rows)[:, None] & (col < H)[None, :]
        weight = load_tile(weight_rows + first[:, None] * H, there, EVEN)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        total = weight.to(tl.float32) * load_tile(gated_row + first, first < rows, EVEN).to(tl.float32)[:, None]
        for start in tl.range(BLOCK_M, SHARE, BLOCK_M, num_stages=3):
            later = begin + start + row
            there = (later < rows)[:, None] & (col < H)[None, :]
            weight = load_tile(weight_rows + later[:, None] * H, there, EVEN)
            total += weight.to(tl.float32) * load_tile(gated_row + later, later < rows, EVEN).to(tl.float32)[:, None]
        y = tl.sum(total, axis=0)
        if BIASED:
            if part == 0:
                y += tl.load(bias_ptr + expert * H + col, mask=(col < H) & (rows > 0), other=0.0).to(tl.float32)
        y *= tl.load(weights_ptr + token * weights_stride + slot).to(tl.float32) * scaling
        SPLITS: tl.constexpr = K * PARTS
        if SPLITS > 1:
            number = token * tl.num_programs(1) + tile
            parts = part_ptr + number * SPLITS * BLOCK_H + tl.arange(0, BLOCK_H)
            tl.store(parts + split * BLOCK_H, y)
            publish(WAIT)
            if tl.atomic_add(arrived_ptr + number, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
                return
            tl.store(arrived_ptr + number, 0)
            one = tl.arange(0, BLOCK_PARTS)
            at = parts[None, :] + one[:, None] * BLOCK_H
            every = tl.load(at, mask=(one < SPLITS)[:, None], other=0.0, cache_modifier=".cg")
            y = tl.sum(every, axis=0)
        if RESIDUAL:
            y += tl.load(residual_ptr + token * residual_stride + col, mask=col < H, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * H + col, y.to(out_ptr.dtype.element_ty), mask=col < H)

    transposed_gate_up_kernel = Kernel(_transposed_gate_up_kernel)
    transposed_down_kernel = Kernel(_transposed_down_kernel)

COLUMNS, ROWS, THREADS = 64, 64, 128
"""Of a program's tile: 128 bytes of a row, as much as a cache line has."""
PROGRAMS = 304
"""As many are wanted at least: one for each compute unit of an MI300X, more than two of an H200's."""


def launch_transposed(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
    out: Tensor,
    how: Gating,
    first: int = -1,
) -> None:
    """Write what the experts return for `x`, plus `residual`, into `out`.

    Args:
        x: `[N, …, H]`.
        index: `[N, K]`.
        weights: `[N, K]`.
        weight: `[E, H, 2 M]` and `[E, M, H]`.
        bias: `[E, 2 M]` and `[E, H]`, or None for both.
        residual: shaped as `x`, or None.
        out: shaped as `x`, contiguous.
        how: what is computed.
        first: the number of the first expert, where some are here; -1 where all are.
    """
    gate_up, down = weight
    experts, size, hidden_size = down.shape
    tokens, top_k = index.shape
    x, x_stride = row_tiles.flatten(x)
    index, index_stride = row_tiles.flatten(index)
    weights, weights_stride = row_tiles.flatten(weights)
    added, added_stride = (x, x_stride) if residual is None else row_tiles.flatten(residual)
    gated = torch.empty(tokens, top_k, size, dtype=x.dtype, device=x.device)
    sizes = (experts, top_k, hidden_size, size)
    overlap = overlaps(x)
    biased = bias[0] is not None
    narrow = how.interleaved or -(-size // COLUMNS) * top_k * tokens < PROGRAMS
    block_m = COLUMNS // 2 if narrow else COLUMNS
    tiles, parts, block_parts = _split(tokens, top_k, hidden_size, size)
    splits = top_k * parts
    part = x.new_empty(tokens * tiles * splits * COLUMNS, dtype=torch.float32) if splits > 1 else out
    arrived = arrivals(x, tokens * tiles) if splits > 1 else out
    with backend.device_guard(x):
        transposed_gate_up_kernel.launch(
            (-(-size // block_m), top_k, tokens),
            THREADS // WAVE,
            (x, index, gate_up, gate_up if bias[0] is None else bias[0], gated),
            (),
            (x_stride, index_stride),
            (how.alpha, how.largest, how.shift),
            (
                *sizes, how.activation, how.bounded, how.interleaved, biased, first, overlap,
                block_m, ROWS,
            ),
            overlap=overlap,
        )  # fmt: skip
        transposed_down_kernel.launch(
            (splits, tiles, tokens),
            THREADS // WAVE,
            (gated, index, weights, down, down if bias[1] is None else bias[1], added, part, arrived, out),
            (),
            (index_stride, weights_stride, added_stride),
            (how.scaling,),
            (
                *sizes, biased, first, residual is not None, overlap,
                wait_for_stores(x) if splits > 1 else "", COLUMNS, ROWS, parts, block_parts,
            ),
            overlap=overlap,
        )  # fmt: skip


def _split(tokens: int, top_k: int, hidden_size: int, size: int) -> tuple[int, int, int]:
    """Return the tiles of the output, the parts of an expert's rows, and a power of two for all that are added."""
    tiles = -(-hidden_size // COLUMNS)
    wanted = -(-PROGRAMS // (tiles * top_k * tokens))
    parts = min(wanted, max(size // (4 * ROWS), 1))
    share = -(-size // (parts * ROWS)) * ROWS  # parts without a row of their own would never arrive
    parts = -(-size // share)
    return tiles, parts, 1 << (top_k * parts - 1).bit_length()
