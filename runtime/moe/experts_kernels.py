"""The kernels of `fused_experts`: gates, and the sum over the chosen experts. The letters are those of `experts`."""

from __future__ import annotations

from ..core import backend
from ..launching.launch import Kernel

if backend.triton_installed():
    import triton
    import triton.language as tl

    from .form import gate_experts, load_tile

    @triton.jit
    def _experts_gate_up_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        index_ptr,
        weight_ptr,
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
        row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        gate_rows = weight_ptr + expert * (2 * M * H) + row[:, None] * H
        up_rows = gate_rows + M * H
        gate = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        for start in tl.range(0, H, BLOCK_H, num_stages=3):
            col = start + tl.arange(0, BLOCK_H)
            there = (row < M)[:, None] & (col < H)[None, :]
            x = load_tile(x_ptr + token * x_stride + col, col < H, EVEN).to(tl.float32)[None, :]
            gate += load_tile(gate_rows + col[None, :], there, EVEN).to(tl.float32) * x
            up += load_tile(up_rows + col[None, :], there, EVEN).to(tl.float32) * x
        gated = gate_experts(tl.sum(gate, axis=1), tl.sum(up, axis=1), scaling, limit, offset, ACTIVATION, BOUNDED)
        out_row = out_ptr + (token * K + slot) * M
        tl.store(out_row + row, gated.to(out_ptr.dtype.element_ty), mask=row < M)

    @triton.jit
    def _share(gated_row, col, share, mask, M: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load columns of every expert's gated states, times the expert's weight: `[BLOCK_K, 1, BLOCK_M]`."""
        gated = load_tile(gated_row + col[None, :], mask[:, None] & (col < M)[None, :], EVEN).to(tl.float32)
        return (gated * share[:, None])[:, None, :]

    @triton.jit
    def _experts_down_kernel(  # type: ignore[no-untyped-def]
        gated_ptr,
        index_ptr,
        weights_ptr,
        weight_ptr,
        residual_ptr,
        out_ptr,
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
        BLOCK_K: tl.constexpr,
        BLOCK_H: tl.constexpr,
        BLOCK_M: tl.constexpr,
    ):
        """Compute BLOCK_H columns of one token's output, over all of its experts at once.

        The first three blocks of the weights are loaded before the gated states are there; the experts' numbers were
        when the kernel before this one let it start.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        EVEN: tl.constexpr = FIRST < 0 and K == BLOCK_K and H % BLOCK_H == 0 and M % BLOCK_M == 0
        token = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        slot = tl.arange(0, BLOCK_K)
        live = slot < K
        expert = tl.load(index_ptr + token * index_stride + slot, mask=live, other=0).to(tl.int64)
        if FIRST >= 0:
            expert -= FIRST
            live = live & (expert >= 0) & (expert < E)
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        rows = weight_ptr + expert[:, None, None] * (H * M) + row[None, :, None] * M
        there = live[:, None, None] & (row < H)[None, :, None]
        col = tl.arange(0, BLOCK_M)
        weight = load_tile(rows + col[None, None, :], there & (col < M)[None, None, :], EVEN)
        if M > BLOCK_M:
            col_1 = col + BLOCK_M
            weight_1 = load_tile(rows + col_1[None, None, :], there & (col_1 < M)[None, None, :], EVEN)
        if M > 2 * BLOCK_M:
            col_2 = col + 2 * BLOCK_M
            weight_2 = load_tile(rows + col_2[None, None, :], there & (col_2 < M)[None, None, :], EVEN)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        share = tl.load(weights_ptr + token * weights_stride + slot, mask=live, other=0.0).to(tl.float32) * scaling
        gated_row = gated_ptr + (token * K + slot)[:, None] * M
        total = weight.to(tl.float32) * _share(gated_row, col, share, live, M, EVEN)
        if M > BLOCK_M:
            total += weight_1.to(tl.float32) * _share(gated_row, col_1, share, live, M, EVEN)
        if M > 2 * BLOCK_M:
            total += weight_2.to(tl.float32) * _share(gated_row, col_2, share, live, M, EVEN)
        for start in tl.range(3 * BLOCK_M, M, BLOCK_M, num_stages=3):
            later = start + col
            weight = load_tile(rows + later[None, None, :], there & (later < M)[None, None, :], EVEN)
            total += weight.to(tl.float32) * _share(gated_row, later, share, live, M, EVEN)
        out = tl.sum(tl.sum(total, axis=2), axis=0)
        if RESIDUAL:
            out += tl.load(residual_ptr + token * residual_stride + row, mask=row < H, other=0.0).to(tl.float32)
        tl.store(out_ptr + token * H + row, out.to(out_ptr.dtype.element_ty), mask=row < H)

    experts_gate_up_kernel = Kernel(_experts_gate_up_kernel)
    experts_down_kernel = Kernel(_experts_down_kernel)
