"""Experts whose weights have a scale for each block (`blocks`): FP8 and MXFP4 checkpoints as they are published.

The letters are those of `experts`; rows of both weights lie behind each other, as `[E, 2 M, H]` and `[E, H, M]`.

    few tokens          two kernels that read the chosen experts' bytes (of MXFP4 in bf16 on NVIDIA's chips,
                        `mxfp4_experts`)
    many                sorted by expert, each is read once (`grouped`)
    without kernels     one expert after the other is dequantised, and torch multiplies
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend
from ..device import row_tiles
from ..launching.launch import HIP, WAVE, Kernel, overlaps
from ..launching.tiles import Tile
from ..linear.block_groups import in_words
from ..linear.blocks import GROUP, Blocks, dequantized, reason_against
from . import mxfp4_experts
from .form import ExpertsForm, Gating, gated, gating
from .grouped import grouped_experts

CASES = """
def few(sizes, four, how, tiles=None):
    def weight(rows, cols):
        if four:
            codes = tensor(sizes.experts, rows, cols // 2, dtype=torch.uint8)
            return Blocks(codes, tensor(sizes.experts, rows, cols // 32, dtype=torch.uint8), 1, 32)
        scale = tensor(sizes.experts, -(-rows // 128), -(-cols // 128), dtype=torch.float32)
        return Blocks(tensor(sizes.experts, rows, cols, dtype=torch.float8_e4m3fn), scale, 128, 128)
    gate_up = weight(2 * sizes.intermediate_size, sizes.hidden_size)
    down = weight(sizes.hidden_size, sizes.intermediate_size)
    parts = BlockExperts(gate_up, down, (None, None), ExpertsForm())
    x = tensor(1, sizes.hidden_size)
    return launch_block_experts(x, int64(1, sizes.top_k), tensor(1, sizes.top_k), parts, None, x, how, tiles)

SWISH = Gating("swish", 1.7, 7.0, 1.0, interleaved=True)
case("gpt-oss 20B, 4 bits", few, GPT_OSS, True, SWISH)
case("gpt-oss 20B, in stages", few, GPT_OSS, True, SWISH, ((4, 32, max(WAVE, 32), 2), (4, 32, 128, 2)))
case("Qwen3 30B-A3B, 8 bits", few, QWEN3_MOE, False, Gating())
case("DeepSeek V3, 8 bits", few, DEEPSEEK_V3, False, Gating())
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.block_groups import block_scales, eight_sums, four_sums, octets, row_groups, sixteen
    from .form import gate_experts

    @triton.jit
    def _block_gate_up_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        index_ptr,
        values_ptr,
        scale_ptr,
        bias_ptr,
        out_ptr,
        x_stride,
        index_stride,
        scaling,
        limit,
        offset,
        E: tl.constexpr,
        K: tl.constexpr,
        BYTES: tl.constexpr,
        M: tl.constexpr,
        FOUR: tl.constexpr,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
        GROUPS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        PTX: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BOUNDED: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        BIASED: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
        AHEAD: tl.constexpr,
        STAGES: tl.constexpr,
        COPIES: tl.constexpr,
    ):
        """Compute BLOCK_M columns of one token's expert; BYTES has a row, GROUPS groups have one scale."""
        if OVERLAP:
            # In this order: once the next kernel runs, what came before this one, the experts' numbers, is there.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        slot = tl.program_id(1)
        token = tl.program_id(2).to(tl.int64)
        expert = tl.load(index_ptr + token * index_stride + slot).to(tl.int64)
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        both = tl.arange(0, 2 * BLOCK_M)
        column = tl.program_id(0) * BLOCK_M + both // 2
        row = column * 2 + both % 2 if INTERLEAVED else column + (both % 2) * M
        live = column < M
        scale_columns: tl.constexpr = (BYTES // 16 + GROUPS - 1) // GROUPS
        row_ptr = values_ptr + (expert * (2 * M) + row)[:, None] * (BYTES // 16 * SIZE)
        scale_row = scale_ptr + (expert * ((2 * M + ROWS - 1) // ROWS) + row // ROWS)[:, None] * scale_columns
        x_ptr += token * x_stride + tl.arange(0, COPIES)[:, None] * 0  # one for each part of the threads
        if STAGES == 1:
            following = row_groups(row_ptr, live[:, None], 0, BYTES // 16, SIZE, BLOCK_GROUPS)
        total = tl.zeros((2 * BLOCK_M, BLOCK_GROUPS), tl.float32)
        for start in tl.range(0, BYTES // 16, BLOCK_GROUPS, num_stages=STAGES):
            if AHEAD:
                loaded = following
                following = row_groups(row_ptr, live[:, None], start + BLOCK_GROUPS, BYTES // 16, SIZE, BLOCK_GROUPS)
            elif STAGES > 1 or BYTES // 16 > BLOCK_GROUPS:
                loaded = row_groups(row_ptr, live[:, None], start, BYTES // 16, SIZE, BLOCK_GROUPS)
            else:
                loaded = following
            scale = block_scales(scale_row, live[:, None], start, BYTES // 16, GROUPS, EXPONENTS, BLOCK_GROUPS)
            col = octets(start, FOUR, BLOCK_GROUPS)[None, :]
            inside = col < BYTES // 16 * (32 if FOUR else 16)
            if FOUR:
                total += four_sums(loaded, x_ptr + col, inside, BLOCK_GROUPS, PTX) * scale
            else:
                x = sixteen(x_ptr + col, inside, BLOCK_GROUPS)
                total += eight_sums(loaded, x, BLOCK_GROUPS, DECODE, PTX) * scale
        y = tl.sum(total, 1)
        if BIASED:
            y += tl.load(bias_ptr + expert * (2 * M) + row, mask=live, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(y, (BLOCK_M, 2)))
        gated = gate_experts(gate, up, scaling, limit, offset, ACTIVATION, BOUNDED)
        column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(out_ptr + (token * K + slot) * M + column, gated.to(out_ptr.dtype.element_ty), mask=column < M)

    @triton.jit
    def _block_down_kernel(  # type: ignore[no-untyped-def]
        gated_ptr,
        index_ptr,
        shares_ptr,
        values_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        index_stride,
        shares_stride,
        residual_stride,
        scaling,
        E: tl.constexpr,
        K: tl.constexpr,
        BYTES: tl.constexpr,
        H: tl.constexpr,
        M: tl.constexpr,
        FOUR: tl.constexpr,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
        GROUPS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        PTX: tl.constexpr,
        BIASED: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_H: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
        AHEAD: tl.constexpr,
        STAGES: tl.constexpr,
        COPIES: tl.constexpr,
    ):
        """Compute BLOCK_H columns of one token's output, over all of its experts at once.

        The first block of the weights is loaded before the gated states are there; the experts' numbers were when the
        kernel before this one let it start.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        # Rows of all experts, an expert's BLOCK_K apart: a thread has those of one, and of its states no other's.
        slot = tl.arange(0, BLOCK_H * BLOCK_K) % BLOCK_K
        chosen = slot < K
        expert = tl.load(index_ptr + token * index_stride + slot, mask=chosen, other=0).to(tl.int64)
        here = chosen & (expert >= 0) & (expert < E)  # another process has the others
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        every = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H * BLOCK_K) // BLOCK_K
        live = (chosen & (every < H))[:, None]
        scale_columns: tl.constexpr = (BYTES // 16 + GROUPS - 1) // GROUPS
        row_ptr = values_ptr + (expert * H + every)[:, None] * (BYTES // 16 * SIZE)
        scale_row = scale_ptr + (expert * ((H + ROWS - 1) // ROWS) + every // ROWS)[:, None] * scale_columns
        state = tl.arange(0, BLOCK_K * COPIES) % BLOCK_K
        states_ptr = gated_ptr + ((token * K + state) * M)[:, None]
        known = (state < K)[:, None]
        if STAGES == 1:
            following = row_groups(row_ptr, live, 0, BYTES // 16, SIZE, BLOCK_GROUPS)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        total = tl.zeros((BLOCK_H * BLOCK_K, BLOCK_GROUPS), tl.float32)
        for start in tl.range(0, BYTES // 16, BLOCK_GROUPS, num_stages=STAGES):
            if AHEAD:
                loaded = following
                following = row_groups(row_ptr, live, start + BLOCK_GROUPS, BYTES // 16, SIZE, BLOCK_GROUPS)
            elif STAGES > 1 or BYTES // 16 > BLOCK_GROUPS:
                loaded = row_groups(row_ptr, live, start, BYTES // 16, SIZE, BLOCK_GROUPS)
            else:
                loaded = following
            scale = block_scales(scale_row, live, start, BYTES // 16, GROUPS, EXPONENTS, BLOCK_GROUPS)
            col = octets(start, FOUR, BLOCK_GROUPS)[None, :]
            inside = known & (col < M)
            if FOUR:
                total += four_sums(loaded, states_ptr + col, inside, BLOCK_GROUPS, PTX) * scale
            else:
                x = sixteen(states_ptr + col, inside, BLOCK_GROUPS)
                total += eight_sums(loaded, x, BLOCK_GROUPS, DECODE, PTX) * scale
        each = tl.sum(total, 1)
        if BIASED:
            biases = bias_ptr + expert * H + every
            each += tl.load(biases, mask=chosen & (every < H), other=0.0).to(tl.float32)
        share = tl.load(shares_ptr + token * shares_stride + slot, mask=chosen, other=0.0).to(tl.float32) * scaling
        y = tl.sum(tl.reshape(tl.where(here, each * share, 0.0), (BLOCK_H, BLOCK_K)), 1)
        if RESIDUAL:
            y += tl.load(residual_ptr + token * residual_stride + row, mask=row < H, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * H + row, y.to(out_ptr.dtype.element_ty), mask=row < H)

    block_gate_up_kernel = Kernel(_block_gate_up_kernel)
    block_down_kernel = Kernel(_block_down_kernel)


class BlockExperts(NamedTuple):
    """Experts in blocks."""

    gate_up: Blocks
    """`[E, 2 M, H]`."""
    down: Blocks
    """`[E, H, M]`."""
    biases: tuple[Tensor | None, Tensor | None]
    form: ExpertsForm


def block_experts_of(experts: nn.Module) -> BlockExperts | None:
    """Return the parts of transformers' `FP8Experts`; None for any other, and for those that kernels do not read."""
    if not any(kind.__name__ == "FP8Experts" for kind in type(experts).__mro__):
        return None
    parts = _fp8_parts(experts)
    if parts is None or any(reason_against(weight) is not None for weight in (parts.gate_up, parts.down)):
        return None
    return parts


def _fp8_parts(experts: nn.Module) -> BlockExperts | None:
    given = {name: experts._parameters.get(name) for name in ("gate_up_proj", "down_proj")}
    scales = {name: experts._parameters.get(f"{name}_scale_inv") for name in given}
    tensors = [*given.values(), *scales.values()]
    if any(type(tensor) is not nn.Parameter or tensor.dim() != 3 for tensor in tensors):
        return None
    state: Any = experts
    odd = (getattr(state, name, None) is not None for name in ("gate_softcap", "up_softcap"))
    if any(odd) or getattr(state, "_is_expert_parallel", False) or not getattr(state, "has_gate", True):
        return None
    blocks = []
    for name, weight in given.items():
        assert weight is not None
        scale, four = scales[name], weight.dtype == torch.int8
        size = (1, 32) if four else state.block_size
        if size is None or (not four and weight.dtype != torch.float8_e4m3fn):
            return None
        values = weight.detach().view(torch.uint8) if four else weight.detach()
        blocks.append(Blocks(values, scale.detach(), *size))  # type: ignore[union-attr]
    alpha, limit = getattr(state, "swiglu_alpha", None), getattr(state, "swiglu_limit", None)
    form = ExpertsForm(state.act_fn, limit=limit)
    if alpha is not None:
        form = ExpertsForm(None, alpha, limit, 1.0)
    return BlockExperts(blocks[0], blocks[1], (None, None), form)


def block_experts(
    hidden_states: Tensor,
    parts: BlockExperts,
    index: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    scaling: float,
    many: bool,
) -> Tensor:
    """Return what `fused_experts` does; `many` says that sorting tokens is faster than reading experts for each."""
    how = gating(parts.form, scaling)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if how is not None and _kernels_take(tokens, index, weights, parts, residual):
        how, tokens = how._replace(transposed=False), tokens.contiguous()
        first, second = (None if bias is None else bias.contiguous() for bias in parts.biases)
        parts = parts._replace(biases=(first, second))
        if many:
            output = grouped_experts(tokens, index, weights, *parts[:2], parts.biases, how)
        else:
            output, added = torch.empty_like(tokens), None
            if residual is not None and residual.dtype == tokens.dtype and residual.shape == hidden_states.shape:
                added, residual = residual.reshape(tokens.shape), None
            if not mxfp4_experts.run(tokens, index, weights, *parts[:3], added, output, how):
                launch_block_experts(tokens, index, weights, parts, added, output, how)
                mxfp4_experts.judge(tokens, index, *parts[:2], output, how)
        output = output.view(hidden_states.shape)
    else:
        output = _plainly(tokens, parts, index, weights).view(hidden_states.shape)
        output = output if scaling == 1.0 else output * scaling
    return output if residual is None else residual + output


def _kernels_take(
    tokens: Tensor, index: Tensor, weights: Tensor, parts: BlockExperts, residual: Tensor | None
) -> bool:
    others = [tensor for tensor in (*parts.biases, residual, weights) if tensor is not None]
    if not tokens.numel() or tokens.dtype not in row_tiles.KERNEL_DTYPES:
        return False
    if any(t.device != tokens.device or t.dtype not in row_tiles.KERNEL_DTYPES for t in others):
        return False
    if any(t.device != tokens.device for t in (index, parts.gate_up.values, parts.down.values)):
        return False
    if any(reason_against(weight) is not None for weight in parts[:2]):  # replaced since they were loaded
        return False
    return (
        backend.nothing_watches(tokens) and not backend.wants_gradient(tokens, *others) and backend.uses_triton(tokens)
    )


def _plainly(tokens: Tensor, parts: BlockExperts, index: Tensor, weights: Tensor) -> Tensor:
    """Compute one hit expert after the other, each dequantised for it; their sum is taken in fp32."""
    output = torch.zeros_like(tokens, dtype=torch.promote_types(tokens.dtype, torch.float32))
    form = parts.form
    for expert in index.unique().tolist():
        if not 0 <= expert < parts.down.values.shape[0]:
            continue
        token, place = torch.where(index == expert)
        gate_up, down = (
            dequantized(weight._replace(values=weight.values[expert], scale=weight.scale[expert]), tokens.dtype)
            for weight in (parts.gate_up, parts.down)
        )
        first, second = (None if bias is None else bias[expert].to(tokens.dtype) for bias in parts.biases)
        both = F.linear(tokens[token], gate_up, first)
        gate, up = (both[:, ::2], both[:, 1::2]) if form.interleaved else both.chunk(2, dim=-1)
        part = F.linear(_gate(gate, up, form), down, second) * weights[token, place].unsqueeze(-1)
        output = output.index_add(0, token, part.to(output.dtype))
    return output.to(tokens.dtype)


def _gate(gate: Tensor, up: Tensor, form: ExpertsForm) -> Tensor:
    how = gating(form)
    if how is not None:
        return gated(gate, up, how)
    if form.activation is None or form.limit is not None:
        raise TypeError("experts with an activation that is none of a module or function")
    return form.activation(gate) * (up + form.shift)


def launch_block_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    parts: BlockExperts,
    residual: Tensor | None,
    out: Tensor,
    how: Gating,
    tiles: tuple[Tile, Tile] | None = None,
) -> None:
    """Write what the experts return for `x` `[N, H]`, plus `residual`, into `out`, by the kernels of few tokens."""
    (gate_up, down), (first_bias, second_bias) = parts[:2], parts.biases
    experts, hidden_size, size = down.shape
    tokens, top_k = index.shape
    x, x_stride = row_tiles.flatten(x)
    index, index_stride = row_tiles.flatten(index)
    weights, weights_stride = row_tiles.flatten(weights)
    added, added_stride = (x, x_stride) if residual is None else row_tiles.flatten(residual)
    states = torch.empty(tokens, top_k, size, dtype=x.dtype, device=x.device)
    first, second = tiles or rule(parts, top_k)
    block_k = 1 << (top_k - 1).bit_length()
    overlap = overlaps(x)
    one, other = in_words(gate_up), in_words(down)
    with backend.device_guard(x):
        block_gate_up_kernel.launch(
            (-(-size // first[0]), top_k, tokens),
            first[2] // WAVE,
            (x, index, one.values, one.scale, x if first_bias is None else first_bias, states),
            (),
            (x_stride, index_stride),
            (how.alpha, how.largest, how.shift),
            (
                experts, top_k, gate_up.values.shape[2], size, gate_up.four, one.size, gate_up.rows, _groups(gate_up),
                gate_up.exponents, one.decode, one.ptx, how.activation, how.bounded, how.interleaved,
                first_bias is not None, overlap, first[0], first[1], first[3] == 1,
                max(1, first[3]), _copies(first, 1, 2 * first[0]),
            ),
            overlap=overlap,
        )  # fmt: skip
        block_down_kernel.launch(
            (-(-hidden_size // second[0]), tokens, 1),
            second[2] // WAVE,
            (
                states, index, weights, other.values, other.scale, x if second_bias is None else second_bias, added,
                out,
            ),
            (),
            (index_stride, weights_stride, added_stride),
            (how.scaling,),
            (
                experts, top_k, down.values.shape[2], hidden_size, size, down.four, other.size, down.rows,
                _groups(down), down.exponents, other.decode, other.ptx, second_bias is not None, residual is not None,
                overlap, block_k, second[0], second[1], second[3] == 1, max(1, second[3]),
                _copies(second, block_k, second[0]),
            ),
            overlap=overlap,
        )  # fmt: skip


def _groups(weight: Blocks) -> int:
    """Return how many groups of 16 bytes share a scale."""
    return (weight.columns // 2 if weight.four else weight.columns) // GROUP


def _copies(tile: Tile, rows: int, most: int) -> int:
    """Return how often a program holds its rows of the input: threads that share a group would halve its octets."""
    _, groups, threads, _ = tile
    return max(1, min(threads // (groups * rows), most))


def rule(parts: BlockExperts, top_k: int) -> tuple[Tile, Tile]:
    """Return rows, groups and threads of a program of either kernel, and how many tiles it loads ahead.

    Those are none; 1, into registers; or one less than the 2 or more that are given, by asynchronous copies into
    shared memory, which take fewer registers (72, not 80, for sm_90) and as many instructions. The second kernel may
    load one before the first has ended. On gfx942 that takes 132 registers in place of 66: fewer waves.
    """
    block_k = 1 << (top_k - 1).bit_length()
    first, second = (min(32, 1 << (part.values.shape[2] // GROUP - 1).bit_length()) for part in parts[:2])
    rows = max(1, 16 // block_k)
    return (4, first, max(WAVE, 32), 0), (rows, second, 128, 0 if HIP else 1)
