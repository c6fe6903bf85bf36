"""The experts of 2 to 32 tokens, where several tokens take the same: each expert's weights are read once.

Names as in `experts`, T tokens filled up to 16 or 32, as many as the tensor cores take at a time. There is a program
for each pair of a token and one of its experts; the first pair of an expert multiplies its weights with all tokens and
keeps the results of those that chose it, the others have nothing to do:

    gated(n, k) = activation(W_gate[e] x_n) * (W_up[e] x_n)          for all (n, k) with e(n, k) = e
    part(n, k)  = W_down[e] gated(n, k),    y_n = Σ_k p(n, k) part(n, k)  (+ residual_n)

Parts are fp32; the last program of a block of columns adds them up in the order of k, so the bits are the same on
every run. A tile of the first product has each row of the gate beside the row of up, as in `linear.skinny`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..device import row_tiles
from ..device.split_k_semaphores import arrivals
from ..launching.launch import Kernel, overlaps, wait_for_stores
from ..launching.tiles import STAGES
from ..linear.skinny import MOST_ROWS, height_for
from .form import Gating

CASES = """
def joined(sizes, tokens):
    x, index = tensor(tokens, sizes.hidden_size), int64(tokens, sizes.top_k)
    gate_up = tensor(sizes.experts, 2 * sizes.intermediate_size, sizes.hidden_size)
    down = tensor(sizes.experts, sizes.hidden_size, sizes.intermediate_size)
    return launch_joined(x, index, tensor(tokens, sizes.top_k), gate_up, down, x, tensor(*x.shape), Gating(), -1)

for sizes in (QWEN3_MOE, MIXTRAL):
    case(f"{sizes.name}, 8 tokens", joined, sizes, 8)
    case(f"{sizes.name}, 32 tokens", joined, sizes, 32)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
    from ..linear.skinny import halves, rows_of_tile
    from .form import gate_experts, load_tile

    @triton.jit
    def _taken(  # type: ignore[no-untyped-def]
        index_ptr, index_stride, token, slot, count, K: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr
    ):
        """Return a pair's expert, whether it is the first with it, which tokens take that, and in which place."""
        expert = tl.load(index_ptr + token * index_stride + slot).to(tl.int32)
        row = tl.arange(0, T)[:, None]
        k = tl.arange(0, BLOCK_K)[None, :]
        index = tl.load(index_ptr + row * index_stride + k, mask=(row < count) & (k < K), other=-1).to(tl.int32)
        same = ((index == expert) & (row < count) & (k < K)).to(tl.int32)
        before = (row * K + k < token * K + slot).to(tl.int32)
        return expert, tl.max(tl.max(same * before, 1), 0) == 0, tl.max(same, 1) > 0, tl.max(same * k, 1)

    @triton.jit(do_not_specialize=["count"])
    def _joined_gate_up_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        index_ptr,
        weight_ptr,
        out_ptr,
        count,
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
        FIRST: tl.constexpr,
        OVERLAP: tl.constexpr,
        T: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Compute BLOCK_ROWS / 2 columns of one expert for all of its tokens, if it is one of those that are here."""
        if OVERLAP:
            # In this order: once the next kernel runs, what came before this one, the experts' numbers, is there.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        slot = tl.program_id(1)
        token = tl.program_id(2)
        expert, is_first, takes, place = _taken(index_ptr, index_stride, token, slot, count, K, T, BLOCK_K)
        if FIRST >= 0:
            expert -= FIRST
        if not is_first or (expert < 0) or (expert >= E):
            return
        pairs = tl.program_id(0) * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        row = row // 2 + row % 2 * M
        y, _ = rows_of_tile(
            x_ptr, x_ptr, weight_ptr + expert.to(tl.int64) * (2 * M * H), row, 0, H, count, 0.0,
            H, 2 * M, False, False, 0, T, BLOCK_ROWS, BLOCK_COLS, STAGES,
        )  # fmt: skip
        gate, up = halves(y, BLOCK_ROWS, T)
        gated = gate_experts(gate, up, scaling, limit, offset, ACTIVATION, BOUNDED)
        out_row = out_ptr + (tl.arange(0, T) * K + place).to(tl.int64)[None, :] * M
        there = (pairs < M)[:, None] & takes[None, :]
        tl.store(out_row + pairs[:, None], gated.to(out_ptr.dtype.element_ty), mask=there)

    @triton.jit(do_not_specialize=["count"])
    def _joined_down_kernel(  # type: ignore[no-untyped-def]
        gated_ptr,
        index_ptr,
        weights_ptr,
        weight_ptr,
        residual_ptr,
        part_ptr,
        arrived_ptr,
        out_ptr,
        count,
        index_stride,
        weights_stride,
        residual_stride,
        scaling,
        E: tl.constexpr,
        K: tl.constexpr,
        H: tl.constexpr,
        M: tl.constexpr,
        FIRST: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        T: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """Compute BLOCK_ROWS columns of what one expert gives to its tokens; the last program adds up a token's."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        EVEN: tl.constexpr = H % BLOCK_ROWS == 0 and M % BLOCK_COLS == 0
        block = tl.program_id(0)
        slot = tl.program_id(1)
        token = tl.program_id(2)
        expert, is_first, takes, place = _taken(index_ptr, index_stride, token, slot, count, K, T, BLOCK_K)
        if FIRST >= 0:
            expert -= FIRST
        live = is_first & (expert >= 0) & (expert < E)
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        at = (tl.arange(0, T) * K + place).to(tl.int64)
        weight_row = weight_ptr + expert.to(tl.int64) * (H * M) + row.to(tl.int64)[:, None] * M
        gated_row = gated_ptr + at[:, None] * M
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if live:
            y = tl.zeros([BLOCK_ROWS, T], tl.float32)
            for start in tl.range(0, M, BLOCK_COLS, num_stages=STAGES):
                col = start + tl.arange(0, BLOCK_COLS)
                there = (row < H)[:, None] & (col < M)[None, :]
                weight = load_tile(weight_row + col[None, :], there, EVEN)
                gated = tl.load(gated_row + col[None, :], mask=takes[:, None] & (col < M)[None, :], other=0.0)
                y = tl.dot(weight, tl.trans(gated), y, input_precision="ieee")
            tl.store(part_ptr + at[None, :] * H + row[:, None], y, mask=(row < H)[:, None] & takes[None, :])
        publish(WAIT)
        programs = tl.num_programs(1) * tl.num_programs(2)
        if tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu") != programs - 1:
            return
        tl.store(arrived_ptr + block, 0)
        tokens = tl.arange(0, T)
        out = tl.zeros([BLOCK_ROWS, T], tl.float32)
        there = (row < H)[:, None] & (tokens < count)[None, :]
        slots = tl.arange(0, BLOCK_K)[None, :]
        seen = (tokens < count)[:, None] & (slots < K)
        all_chosen = tl.load(index_ptr + tokens[:, None] * index_stride + slots, mask=seen, other=-1).to(tl.int32)
        for k in tl.static_range(K):
            mine = tokens < count
            chosen = tl.load(index_ptr + tokens * index_stride + k, mask=mine, other=-1).to(tl.int32)
            place = tl.max((all_chosen == chosen[:, None]).to(tl.int32) * slots, 1)  # k, unless it is chosen twice
            if FIRST >= 0:
                chosen -= FIRST
            mine = mine & (chosen >= 0) & (chosen < E)  # nobody has written what others would give
            share = tl.load(weights_ptr + tokens * weights_stride + k, mask=mine, other=0.0).to(tl.float32)
            part = part_ptr + (tokens * K + place).to(tl.int64)[None, :] * H + row[:, None]
            more = tl.load(part, mask=(row < H)[:, None] & mine[None, :], other=0.0, cache_modifier=".cg")
            out += more * share[None, :]
        out *= scaling
        if RESIDUAL:
            added = residual_ptr + tokens.to(tl.int64)[None, :] * residual_stride + row[:, None]
            out += tl.load(added, mask=there, other=0.0).to(tl.float32)
        at = tokens.to(tl.int64)[None, :] * H + row[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=there)

    joined_gate_up_kernel = Kernel(_joined_gate_up_kernel, dot=True)
    joined_down_kernel = Kernel(_joined_down_kernel, dot=True)


class JoinedForm(NamedTuple):
    """How a product is divided."""

    block_rows: int
    """Rows of an expert's weight that a program takes."""
    block_cols: int
    """Columns of one tile."""
    num_warps: int
    stages: int
    """Tiles of a program in flight."""


GATE_UP_FORM = JoinedForm(64, 128, 4, min(4, STAGES))
DOWN_FORM = JoinedForm(64, 128, 4, min(4, STAGES))


MOST_DIFFERENT = 0.9
"""Of the pairs of a token and an expert the part that may have an expert of their own, on average: with more there is
little to read once. On an H100 (Triton 3.6, 2026-11-25) 4 tokens of Qwen3-30B-A3B (0.91) take 97.8 µs, and 95.4 with a
program for each pair; 8 tokens (0.81) 166 and 188, 2 of Mixtral 8x7B (0.88) 387 and 457."""


def are_joined(tokens: int, top_k: float, experts: int, dtype: torch.dtype) -> bool:
    """Return whether so many tokens share experts, and are few enough for these kernels: fp32 has no tensor cores.

    `top_k` is how many experts of a token are here on average.
    """
    if not 1 < tokens <= MOST_ROWS or dtype == torch.float32:
        return False
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens) <= MOST_DIFFERENT * tokens * top_k


def launch_joined(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    residual: Tensor | None,
    out: Tensor,
    how: Gating,
    first: int,
    forms: tuple[JoinedForm, JoinedForm] | None = None,
) -> None:
    """Run both kernels for up to `skinny.MOST_ROWS` tokens; arguments as `fused_experts` registers them.

    `first` is the number of the first expert that is here, -1 where all are.
    """
    tokens, top_k = index.shape
    experts, hidden_size, intermediate_size = down_proj.shape
    x = hidden_states.reshape(-1, hidden_size).contiguous()
    index, index_stride = row_tiles.flatten(index)
    weights, weights_stride = row_tiles.flatten(weights)
    added, added_stride = (x, hidden_size) if residual is None else row_tiles.flatten(residual)
    gated = x.new_empty(tokens, top_k, intermediate_size)
    part = x.new_empty(tokens, top_k, hidden_size, dtype=torch.float32)
    sizes = (experts, top_k, hidden_size, intermediate_size)
    overlap = overlaps(x)
    height, block_k = height_for(tokens), 1 << (top_k - 1).bit_length()
    gate_up_form, down_form = forms or (GATE_UP_FORM, DOWN_FORM)
    blocks = -(-hidden_size // down_form.block_rows)
    arrived = arrivals(x, blocks)
    with backend.device_guard(x):
        joined_gate_up_kernel.launch(
            (-(-2 * intermediate_size // gate_up_form.block_rows), top_k, tokens),
            gate_up_form.num_warps,
            (x, index, gate_up_proj, gated),
            (tokens,),
            (index_stride,),
            (how.alpha, how.largest, how.shift),
            (
                *sizes, how.activation, how.bounded, first, overlap, height, block_k,
                gate_up_form.block_rows, gate_up_form.block_cols, gate_up_form.stages,
            ),
            overlap=overlap,
        )  # fmt: skip
        joined_down_kernel.launch(
            (blocks, top_k, tokens),
            down_form.num_warps,
            (gated, index, weights, down_proj, added, part, arrived, out),
            (tokens,),
            (index_stride, weights_stride, added_stride),
            (how.scaling,),
            (
                *sizes, first, residual is not None, overlap, wait_for_stores(x), height, block_k,
                down_form.block_rows, down_form.block_cols, down_form.stages,
            ),
            overlap=overlap,
        )  # fmt: skip
