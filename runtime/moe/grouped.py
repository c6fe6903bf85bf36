"""The experts of many tokens, sorted by expert: each expert's weights are read once, and nothing is asked of the host.

N tokens, H hidden_size, E experts, K experts a token, M intermediate size, a *pair* is a token and one of its experts:

    gated[p] = activation(x[p // K] W_gateᵀ + b_gate) * (x[p // K] W_upᵀ + b_up)        [N K, M], sorted by expert
    y[n]     = Σ_k w(n, k) (gated[n K + k] W_downᵀ + b_down)                            [N, H]

A program multiplies a tile of pairs of one expert. How many tiles each expert has is not known to the host, so as
many programs run as there can be, each finds its expert by counting, and those that are left over end. The weights are
in 16 bits, in either order, or blocks with a scale each (`blocks`): e4m3 is multiplied as it is and the sum of a block
scaled, e2m1 with its exponent is exact in bf16. Sums are fp32.

It takes the place of `torch._grouped_mm`, which knows one format, and on ROCm copies the ends of groups to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import HIP, WAVE, Kernel
from ..linear.blocks import Blocks, as_read
from .form import Gating

CASES = """
def run(sizes, how, four=False, eight=False, tokens=512):
    tokens = many(tokens)
    x, chosen = tensor(tokens, sizes.hidden_size), int64(tokens, sizes.top_k)
    def weight(rows, cols):
        if four:
            codes = tensor(sizes.experts, rows, cols // 2, dtype=torch.uint8)
            return Blocks(codes, tensor(sizes.experts, rows, cols // 32, dtype=torch.uint8), 1, 32)
        if eight:
            scale = tensor(sizes.experts, -(-rows // 128), -(-cols // 128), dtype=torch.float32)
            return Blocks(tensor(sizes.experts, rows, cols, dtype=torch.float8_e4m3fn), scale, 128, 128)
        return tensor(sizes.experts, *((cols, rows) if how.transposed else (rows, cols)))
    gate_up = weight(2 * sizes.intermediate_size, sizes.hidden_size)
    down = weight(sizes.hidden_size, sizes.intermediate_size)
    return grouped_experts(x, chosen, tensor(tokens, sizes.top_k), gate_up, down, (None, None), how)

SWISH_OAI = Gating("swish", 1.7, 7.0, 1.0, interleaved=True, transposed=True)
case("Qwen3 30B-A3B, 16 bits", run, QWEN3_MOE, Gating())
case("Mixtral 8x7B, 16 bits", run, MIXTRAL, Gating(), tokens=32)
case("Qwen3 30B-A3B, 8 bits", run, QWEN3_MOE, Gating(), eight=True)
case("gpt-oss 20B, 16 bits", run, GPT_OSS, SWISH_OAI)
case("gpt-oss 20B, 4 bits", run, GPT_OSS, SWISH_OAI._replace(transposed=False), four=True)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.blocks import halves, narrowed, scaled_by, widened
    from .form import gate_experts

    @triton.jit
    def _tile(  # type: ignore[no-untyped-def]
        weight_ptr,
        scale_ptr,
        row,
        start,
        dtype: tl.constexpr,
        O: tl.constexpr,  # noqa: E741
        I: tl.constexpr,  # noqa: E741
        KIND: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        CUT: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Load columns of rows of an expert's weight, [rows, BLOCK_COLS], and the scale of each row's sum."""
        scale = tl.full(row.shape, 1.0, tl.float32)
        if KIND == "transposed":
            col = start + tl.arange(0, BLOCK_COLS)
            there = (col < I)[:, None] & (row < O)[None, :]
            weight = tl.trans(tl.load(weight_ptr + col[:, None] * O + row[None, :], mask=there, other=0.0))
        elif KIND == "plain":
            col = start + tl.arange(0, BLOCK_COLS)
            there = (row < O)[:, None] & (col < I)[None, :]
            weight = tl.load(weight_ptr + row[:, None] * I + col[None, :], mask=there, other=0.0)
        elif KIND == "eight":
            col = start + tl.arange(0, BLOCK_COLS)
            there = (row < O)[:, None] & (col < I)[None, :]
            loaded = tl.load(weight_ptr + row[:, None] * I + col[None, :], mask=there, other=0.0)
            weight = narrowed(widened(loaded, DECODE, False), dtype, CUT)
            at = row // ROWS * ((I + COLUMNS - 1) // COLUMNS) + start // COLUMNS
            scale = scaled_by(scale, tl.load(scale_ptr + at, mask=row < O, other=0), False, EXPONENTS)
        else:
            byte = start // 2 + tl.arange(0, BLOCK_COLS // 2)
            there = (row < O)[:, None] & (byte < I // 2)[None, :]
            loaded = tl.load(weight_ptr + row[:, None] * (I // 2) + byte[None, :], mask=there, other=0)
            at = row[:, None] // ROWS * (I // COLUMNS) + (byte * 2 // COLUMNS)[None, :]
            exponent = tl.load(scale_ptr + at, mask=there, other=0)
            low, high = halves(loaded)
            up: tl.constexpr = 18446744073709551616.0
            pair = tl.join(scaled_by(low * up, exponent, True, True), scaled_by(high * up, exponent, True, True))
            weight = tl.reshape(narrowed(pair, dtype, CUT), (row.shape[0], BLOCK_COLS))
        return weight, scale

    @triton.jit(do_not_specialize=["pairs"])
    def _grouped_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        order_ptr,
        starts_ptr,
        weight_ptr,
        scale_ptr,
        bias_ptr,
        shares_ptr,
        out_ptr,
        pairs,
        scaling,
        limit,
        offset,
        E: tl.constexpr,
        K: tl.constexpr,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        GATED: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BOUNDED: tl.constexpr,
        BIASED: tl.constexpr,
        KIND: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        CUT: tl.constexpr,
        BLOCK_E: tl.constexpr,
        BLOCK_PAIRS: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """GATED: rows of tokens to gated states, sorted; else gated states to each pair's part of its token."""
        number = tl.program_id(1)
        one = tl.arange(0, BLOCK_E)
        first = tl.load(starts_ptr + one, mask=one < E, other=0)
        last = tl.load(starts_ptr + one + 1, mask=one < E, other=0)
        tiles = (last - first + BLOCK_PAIRS - 1) // BLOCK_PAIRS
        before = tl.cumsum(tiles, 0)
        expert = tl.sum((before <= number).to(tl.int32), 0)
        if expert >= E:
            return
        chosen = one == expert
        tile = number - tl.sum(tl.where(chosen, before - tiles, 0), 0)
        begin = tl.sum(tl.where(chosen, first, 0), 0) + tile * BLOCK_PAIRS
        end = tl.sum(tl.where(chosen, last, 0), 0)
        place = begin + tl.arange(0, BLOCK_PAIRS)
        live = place < end
        pair = tl.load(order_ptr + place, mask=live, other=0)
        source = pair // K if GATED else place
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        expert = expert.to(tl.int64)
        MATRIX_ROWS: tl.constexpr = 2 * O if GATED else O
        matrix = weight_ptr + expert * MATRIX_ROWS * (I // 2 if KIND == "four" else I)
        scales = scale_ptr
        if KIND == "eight" or KIND == "four":
            scales += expert * ((MATRIX_ROWS + ROWS - 1) // ROWS) * ((I + COLUMNS - 1) // COLUMNS)
        gate_row = row
        up_row = row
        if GATED:
            gate_row = tl.where(row < O, 2 * row if INTERLEAVED else row, MATRIX_ROWS)
            up_row = tl.where(row < O, 2 * row + 1 if INTERLEAVED else row + O, MATRIX_ROWS)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        gate = tl.zeros((BLOCK_ROWS, BLOCK_PAIRS), tl.float32)
        up = tl.zeros((BLOCK_ROWS, BLOCK_PAIRS), tl.float32)
        for start in tl.range(0, I, BLOCK_COLS, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_COLS)
            x_at = source.to(tl.int64)[:, None] * I + col[None, :]
            x = tl.trans(tl.load(x_ptr + x_at, mask=live[:, None] & (col < I)[None, :], other=0.0))
            if KIND == "transposed" and GATED and INTERLEAVED:
                column = tl.program_id(0) * 2 * BLOCK_ROWS + tl.arange(0, 2 * BLOCK_ROWS)
                inside = (col < I)[:, None] & (column < MATRIX_ROWS)[None, :]
                pairs_of_rows = tl.load(matrix + col[:, None] * MATRIX_ROWS + column[None, :], mask=inside, other=0.0)
                gate_weight, up_weight = tl.split(tl.reshape(pairs_of_rows, (BLOCK_COLS, BLOCK_ROWS, 2)))
                gate = tl.dot(tl.trans(gate_weight), x, gate, input_precision="ieee")
                up = tl.dot(tl.trans(up_weight), x, up, input_precision="ieee")
            else:
                weight, scale = _tile(
                    matrix, scales, gate_row, start, dtype, MATRIX_ROWS, I, KIND, ROWS, COLUMNS, EXPONENTS, DECODE,
                    CUT, BLOCK_COLS,
                )  # fmt: skip
                if KIND == "eight":
                    gate += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
                else:
                    gate = tl.dot(weight, x, gate, input_precision="ieee")
                if GATED:
                    weight, scale = _tile(
                        matrix, scales, up_row, start, dtype, MATRIX_ROWS, I, KIND, ROWS, COLUMNS, EXPONENTS, DECODE,
                        CUT, BLOCK_COLS,
                    )  # fmt: skip
                    if KIND == "eight":
                        up += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
                    else:
                        up = tl.dot(weight, x, up, input_precision="ieee")
        there = live[None, :] & (row < O)[:, None]
        if BIASED:
            bias = bias_ptr + expert * MATRIX_ROWS
            gate += tl.load(bias + gate_row, mask=row < O, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIASED:
                up += tl.load(bias + up_row, mask=row < O, other=0.0).to(tl.float32)[:, None]
            y = gate_experts(gate, up, scaling, limit, offset, ACTIVATION, BOUNDED)
            target = place
        else:
            y = gate * (tl.load(shares_ptr + pair, mask=live, other=0.0).to(tl.float32) * scaling)[None, :]
            target = pair
        at = target.to(tl.int64)[None, :] * O + row[:, None]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=there)

    grouped_kernel = Kernel(_grouped_kernel, dot=True)


class _Tile(NamedTuple):
    pairs: int
    rows: int
    cols: int
    threads: int
    stages: int


def _tile_for(pairs: int, experts: int, kind: str) -> _Tile:
    """Return a tile for so many pairs: about as many as an expert has, as far as the units of 16 rows allow."""
    each = max(1, pairs // experts)
    height = 16 if each <= 16 else 32 if each <= 48 else 64
    cols = 128 if kind in ("four", "eight") else 64
    return _Tile(height, 64, cols, 256 if height == 64 else 128, 2 if HIP else 3)


def grouped_experts(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: Tensor | Blocks,
    down: Tensor | Blocks,
    biases: tuple[Tensor | None, Tensor | None],
    how: Gating,
) -> Tensor:
    """Return what experts make of `hidden_states` `[N, H]`, `[N, H]`.

    Args:
        hidden_states: contiguous, in 16 bits or fp32.
        index: `[N, K]`, integers; a number of E and beyond is no expert, and adds nothing.
        weights: `[N, K]`, of the experts.
        gate_up: `[E, 2 M, H]`, or `[E, H, 2 M]` where `how.transposed`.
        down: `[E, H, M]`, or `[E, M, H]`.
        biases: `[E, 2 M]` and `[E, H]`, or None for both.
        how: what is computed.
    """
    tokens, top_k = index.shape
    experts, size, hidden_size = _sizes(down, how)
    pairs = tokens * top_k
    ordered, order = index.reshape(-1).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=index.device, dtype=index.dtype))
    gated = hidden_states.new_empty(pairs, size)
    parts = torch.zeros(pairs, hidden_size, dtype=torch.float32, device=hidden_states.device)
    sorted_by = (order, starts, weights.reshape(-1).contiguous())
    _launch(hidden_states, sorted_by, gate_up, biases[0], gated, (experts, top_k, hidden_size, size), how, True)
    _launch(gated, sorted_by, down, biases[1], parts, (experts, top_k, size, hidden_size), how, False)
    return parts.view(tokens, top_k, hidden_size).sum(1).to(hidden_states.dtype)


def _sizes(down: Tensor | Blocks, how: Gating) -> tuple[int, int, int]:
    """Return E, M and H."""
    experts, rows, cols = down.shape
    return (experts, rows, cols) if how.transposed else (experts, cols, rows)


def _launch(
    x: Tensor,
    sorted_by: tuple[Tensor, Tensor, Tensor],
    weight: Tensor | Blocks,
    bias: Tensor | None,
    out: Tensor,
    sizes: tuple[int, int, int, int],
    how: Gating,
    gated: bool,
) -> None:
    order, starts, shares = sorted_by
    experts, top_k, cols, rows = sizes
    pairs = order.numel()
    if isinstance(weight, Blocks):
        kind = "four" if weight.four else "eight"
        values, scale, decode = as_read(weight)
        block = (weight.rows, weight.columns, weight.exponents, decode)
    else:
        kind = "transposed" if how.transposed else "plain"
        values, scale, block = weight, weight, (1, 1, False, False)
    tile = _tile_for(pairs, experts, kind)
    if kind == "eight":
        tile = tile._replace(cols=min(tile.cols, block[1] & -block[1]))
    programs = -(-pairs // tile.pairs) + min(experts, pairs)
    with backend.device_guard(x):
        grouped_kernel.launch(
            (-(-rows // tile.rows), programs, 1),
            tile.threads // WAVE,
            (x, order, starts, values, scale, values if bias is None else bias, shares, out),
            (pairs,),
            (),
            (how.alpha if gated else how.scaling, how.largest, how.shift),
            (
                experts, top_k, cols, rows, gated, how.interleaved, how.activation, how.bounded, bias is not None,
                kind, *block, HIP, 1 << (experts - 1).bit_length(), tile.pairs, tile.rows, tile.cols, tile.stages,
            ),
        )  # fmt: skip
