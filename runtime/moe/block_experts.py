"""Experts whose weights have a scale for each block (`blocks`): FP8 and MXFP4 checkpoints as they are published.

The letters are those of `experts`; rows of both weights lie behind each other, as `[E, 2 M, H]` and `[E, H, M]`.

    few tokens          two kernels that read the chosen experts' bytes
    many                sorted by expert, each is read once (`grouped`)
    without kernels     one expert after the other is dequantised, and torch multiplies
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend, rows
from ..core.launch import WAVE, Kernel, overlaps
from ..products.blocks import GROUP, Blocks, as_read, dequantized, reason_against
from .form import ExpertsForm, Gating, gated, gating
from .grouped import grouped_experts

CASES = """
def few(sizes, four, how):
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
    return launch_block_experts(x, int64(1, sizes.top_k), tensor(1, sizes.top_k), parts, None, x, how)

case("gpt-oss 20B, 4 bits", few, GPT_OSS, True, Gating("swish", 1.7, 7.0, 1.0, interleaved=True))
case("Qwen3 30B-A3B, 8 bits", few, QWEN3_MOE, False, Gating())
case("DeepSeek V3, 8 bits", few, DEEPSEEK_V3, False, Gating())
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..products.blocks import first_and_second, group_sums, scaled_by
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
        ROWS: tl.constexpr,
        GROUPS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BOUNDED: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        BIASED: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
        UNROLL: tl.constexpr,
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
        row_ptr = values_ptr + expert * (2 * M * BYTES) + row[:, None, None] * BYTES
        scales = scale_ptr + (expert * ((2 * M + ROWS - 1) // ROWS) + row // ROWS)[:, None] * scale_columns
        place = tl.arange(0, 16)[None, None, :]
        total = tl.zeros((2 * BLOCK_M, BLOCK_GROUPS), tl.float32)
        for outer in tl.range(0, BYTES // 16, UNROLL * BLOCK_GROUPS, num_stages=1):
            for inner in tl.static_range(UNROLL):
                group = outer + inner * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
                inside = group * 16 < BYTES
                there = live[:, None] & inside[None, :]
                loaded = tl.load(row_ptr + group[None, :, None] * 16 + place, mask=there[:, :, None], other=0.0)
                scale = tl.load(scales + (group // GROUPS)[None, :], mask=there, other=0)
                first, second = first_and_second(x_ptr + token * x_stride, group[:, None], inside[:, None], FOUR)
                sums = group_sums(loaded, first[None, :, :], second[None, :, :], 2, FOUR, DECODE)
                total += scaled_by(sums, scale, FOUR, EXPONENTS)
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
        ROWS: tl.constexpr,
        GROUPS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        BIASED: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_H: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
        UNROLL: tl.constexpr,
    ):
        """Compute BLOCK_H columns of one token's output, over all of its experts at once.

        The first block of the weights is loaded before the gated states are there; the experts' numbers were when the
        kernel before this one let it start.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        slot = tl.arange(0, BLOCK_K)
        chosen = slot < K
        expert = tl.load(index_ptr + token * index_stride + slot, mask=chosen, other=0).to(tl.int64)
        here = chosen & (expert >= 0) & (expert < E)  # another process has the others
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        scale_columns: tl.constexpr = (BYTES // 16 + GROUPS - 1) // GROUPS
        row_ptr = values_ptr + expert[:, None, None, None] * (H * BYTES) + row[None, :, None, None] * BYTES
        scales = scale_ptr + (expert[:, None] * ((H + ROWS - 1) // ROWS) + (row // ROWS)[None, :])[:, :, None] * (
            scale_columns
        )
        live = chosen[:, None, None] & (row < H)[None, :, None]
        gated_row = gated_ptr + (token * K + slot)[:, None, None] * M
        place = tl.arange(0, 16)[None, None, None, :]
        group = tl.arange(0, BLOCK_GROUPS)
        there = live & (group * 16 < BYTES)[None, None, :]
        loaded = tl.load(row_ptr + group[None, None, :, None] * 16 + place, mask=there[:, :, :, None], other=0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        total = tl.zeros((BLOCK_K, BLOCK_H, BLOCK_GROUPS), tl.float32)
        for outer in tl.range(0, BYTES // 16, UNROLL * BLOCK_GROUPS, num_stages=1):
            for inner in tl.static_range(UNROLL):
                group = outer + inner * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
                inside = group * 16 < BYTES
                there = live & inside[None, None, :]
                if inner > 0 or BYTES // 16 > UNROLL * BLOCK_GROUPS:
                    at = row_ptr + group[None, None, :, None] * 16 + place
                    loaded = tl.load(at, mask=there[:, :, :, None], other=0.0)
                scale = tl.load(scales + (group // GROUPS)[None, None, :], mask=there, other=0)
                known = chosen[:, None, None] & inside[None, :, None]
                first, second = first_and_second(gated_row, group[None, :, None], known, FOUR)
                sums = group_sums(loaded, first[:, None, :, :], second[:, None, :, :], 3, FOUR, DECODE)
                total += scaled_by(sums, scale, FOUR, EXPONENTS)
        each = tl.sum(total, 2)
        if BIASED:
            biases = bias_ptr + expert[:, None] * H + row[None, :]
            each += tl.load(biases, mask=chosen[:, None] & (row < H)[None, :], other=0.0).to(tl.float32)
        share = tl.load(shares_ptr + token * shares_stride + slot, mask=chosen, other=0.0).to(tl.float32) * scaling
        y = tl.sum(tl.where(here[:, None], each * share[:, None], 0.0), 0)
        if RESIDUAL:
            y += tl.load(residual_ptr + token * residual_stride + row, mask=row < H, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * H + row, y.to(out_ptr.dtype.element_ty), mask=row < H)

    block_gate_up_kernel = Kernel(_block_gate_up_kernel)
    block_down_kernel = Kernel(_block_down_kernel)


UNROLL = 4
"""Tiles that a program has in its registers at a time."""


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
            launch_block_experts(tokens, index, weights, parts, added, output, how)
        output = output.view(hidden_states.shape)
    else:
        output = _plainly(tokens, parts, index, weights).view(hidden_states.shape)
        output = output if scaling == 1.0 else output * scaling
    return output if residual is None else residual + output


def _kernels_take(
    tokens: Tensor, index: Tensor, weights: Tensor, parts: BlockExperts, residual: Tensor | None
) -> bool:
    others = [tensor for tensor in (*parts.biases, residual, weights) if tensor is not None]
    if not tokens.numel() or tokens.dtype not in rows.KERNEL_DTYPES:
        return False
    if any(t.device != tokens.device or t.dtype not in rows.KERNEL_DTYPES for t in others):
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
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None,
) -> None:
    """Write what the experts return for `x` `[N, H]`, plus `residual`, into `out`, by the kernels of few tokens."""
    (gate_up, down), (first_bias, second_bias) = parts[:2], parts.biases
    experts, hidden_size, size = down.shape
    tokens, top_k = index.shape
    x, x_stride = rows.flatten(x)
    index, index_stride = rows.flatten(index)
    weights, weights_stride = rows.flatten(weights)
    added, added_stride = (x, x_stride) if residual is None else rows.flatten(residual)
    states = torch.empty(tokens, top_k, size, dtype=x.dtype, device=x.device)
    (block_m, first_groups, first_threads), (block_h, second_groups, second_threads) = tiles or rule(parts, top_k)
    overlap = overlaps(x)
    (codes, scale, decode), (more, more_scale, _) = as_read(gate_up), as_read(down)
    with backend.device_guard(x):
        block_gate_up_kernel.launch(
            (-(-size // block_m), top_k, tokens),
            first_threads // WAVE,
            (x, index, codes, scale, codes if first_bias is None else first_bias, states),
            (),
            (x_stride, index_stride),
            (how.alpha, how.largest, how.shift),
            (
                experts, top_k, codes.shape[2], size, gate_up.four, gate_up.rows, _groups(gate_up), gate_up.exponents,
                decode, how.activation, how.bounded, how.interleaved, first_bias is not None, overlap, block_m,
                first_groups, min(UNROLL, -(-codes.shape[2] // (GROUP * first_groups))),
            ),
            overlap=overlap,
        )  # fmt: skip
        block_down_kernel.launch(
            (-(-hidden_size // block_h), tokens, 1),
            second_threads // WAVE,
            (
                states, index, weights, more, more_scale, more if second_bias is None else second_bias, added, out,
            ),
            (),
            (index_stride, weights_stride, added_stride),
            (how.scaling,),
            (
                experts, top_k, more.shape[2], hidden_size, size, down.four, down.rows, _groups(down), down.exponents,
                decode, second_bias is not None, residual is not None, overlap, 1 << (top_k - 1).bit_length(), block_h,
                second_groups, min(UNROLL, -(-more.shape[2] // (GROUP * second_groups))),
            ),
            overlap=overlap,
        )  # fmt: skip


def _groups(weight: Blocks) -> int:
    """Return how many groups of 16 bytes share a scale."""
    return (weight.columns // 2 if weight.four else weight.columns) // GROUP


def rule(parts: BlockExperts, top_k: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return rows, groups and threads of a program of either kernel."""
    block_k = 1 << (top_k - 1).bit_length()
    first = parts.gate_up.values.shape[2] // GROUP
    second = parts.down.values.shape[2] // GROUP
    groups = min(32 if parts.gate_up.four else 64, 1 << (first - 1).bit_length())
    more = min(max(128 // block_k, 8), 1 << (second - 1).bit_length())
    return (4, groups, 128), (2, more, 128)
