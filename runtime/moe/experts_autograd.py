"""Experts of a sparse mixture while they are trained: grouped products whose gradients are grouped products too.

N tokens, H hidden_size, E experts, K experts a token, S = N K pairs of a token and one of its experts sorted by the
expert, M intermediate size, x the token of a pair, p its weight, e its expert, g the gradient of its token's result:

    (gate, up) = W_gate_up[e] x            [S, 2 M]
    a          = activation(gate) * up     [S, M]
    y_n        = Σ_k p W_down[e] a         [N, H]

    b  = W_down[e]ᵀ g                      dp = a · b,   da = p b
    dW_down[e] = Σ_pairs g (p a)ᵀ          dW_gate_up[e] = Σ_pairs d(gate, up) xᵀ
    dx_n = Σ_k W_gate_up[e]ᵀ d(gate, up)

Torch keeps x, gate and up, activation(gate), a, and each expert's own result: for Qwen3-30B-A3B's layer and 8,192
tokens 940 MB in 16 bits. Here (gate, up) is kept, 201 MB; the rest is computed again in the time that reading it
takes.
Nothing is asked of the host, and every sum over a token's experts is taken in a fixed order: torch's own gradient of a
gather, which sorts once more, is not needed. The result of an expert is rounded, as torch's is; its share is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import backend
from ..device import row_tiles
from ..launching.launch import WAVE, Kernel, chip_of
from ..linear.gated_activation import launch_gated_activation, torch_form
from .form import Gating

CASES = """
def trained(sizes, activation, learned=True):
    tokens, weights = tensor(PROMPT, sizes.hidden_size), tensor(PROMPT, sizes.top_k)
    index = int64(PROMPT, sizes.top_k)
    pairs, inner = PROMPT * sizes.top_k, sizes.intermediate_size
    gradients_of_gates(tensor(pairs, inner), tensor(pairs, 2 * inner), weights, int64(pairs), activation)
    summed_over_experts(tensor(pairs, sizes.hidden_size), int64(pairs), weights)
    summed_over_experts(tensor(pairs, sizes.hidden_size), int64(pairs), None, sizes.top_k)

for sizes in (QWEN3_MOE, MIXTRAL):
    case(sizes.name, trained, sizes, "silu")
case("Qwen3 30B-A3B, GELU tanh", trained, QWEN3_MOE, "gelu_tanh")
"""

WIDEST = 4096
"""Columns of a block of gradients, for 512 threads: they hold more than a norm does, and 1,024 threads spilled."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.gated_activation import _activate, _slope

    @triton.jit(do_not_specialize=["pair_count"])
    def _experts_gradient_kernel(  # type: ignore[no-untyped-def]
        of_gated_ptr,
        both_ptr,
        weights_ptr,
        order_ptr,
        of_both_ptr,
        shared_ptr,
        of_weights_ptr,
        pair_count,
        M: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """From b of BLOCK_ROWS pairs the gradients of gate, up and the pair's weight, and what dW_down reads."""
        pair = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        live = pair < pair_count
        order = tl.load(order_ptr + pair, mask=live, other=0)
        share = tl.load(weights_ptr + order, mask=live, other=0.0).to(tl.float32)
        wide = pair.to(tl.int64) * M
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
        for start in range(0, M, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)[None, :]
            mask = live & (col < M)
            of_gated = tl.load(of_gated_ptr + wide + col, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(both_ptr + 2 * wide + col, mask=mask, other=0.0)
            up = tl.load(both_ptr + 2 * wide + M + col, mask=mask, other=0.0).to(tl.float32)
            activated = _activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
            gated = (activated * up).to(gate.dtype).to(tl.float32)
            total += of_gated * gated
            of_gated = of_gated * share
            of_gate = of_gated * up * _slope(gate.to(tl.float32), ACTIVATION)
            tl.store(of_both_ptr + 2 * wide + col, of_gate.to(of_both_ptr.dtype.element_ty), mask=mask)
            tl.store(
                of_both_ptr + 2 * wide + M + col, (of_gated * activated).to(of_both_ptr.dtype.element_ty), mask=mask
            )
            tl.store(shared_ptr + wide + col, (gated * share).to(shared_ptr.dtype.element_ty), mask=mask)
        of_share = tl.sum(total, axis=1, keep_dims=True)
        tl.store(of_weights_ptr + order, of_share.to(of_weights_ptr.dtype.element_ty), mask=live)

    experts_gradient_kernel = Kernel(_experts_gradient_kernel)

    @triton.jit
    def _sum_of_experts_kernel(  # type: ignore[no-untyped-def]
        parts_ptr,
        places_ptr,
        weights_ptr,
        out_ptr,
        H: tl.constexpr,
        K: tl.constexpr,
        WEIGHTED: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        """Sum what K experts made of a token, which lies at `places`, in the order of K."""
        token = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        mask = col < H
        total = tl.zeros((BLOCK_COLS,), tl.float32)
        for slot in range(K):
            place = tl.load(places_ptr + token * K + slot).to(tl.int64)
            part = tl.load(parts_ptr + place * H + col, mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                part = part * tl.load(weights_ptr + token * K + slot).to(tl.float32)
            total += part
        tl.store(out_ptr + token * H + col, total.to(out_ptr.dtype.element_ty), mask=mask)

    sum_of_experts_kernel = Kernel(_sum_of_experts_kernel)


def fits(tokens: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, how: Gating) -> bool:
    """Return whether these experts make their own gradients; else they are called, and torch differentiates that."""
    if backend.autocasts(tokens.device.type) or not backend.learns(tokens, weights, gate_up, down):
        return False
    if how.bounded or how.interleaved or how.transposed or how.activation not in KINDS:
        return False
    if not (tokens.dtype == gate_up.dtype == down.dtype) or tokens.dtype not in row_tiles.KERNEL_DTYPES:
        return False
    if any(tensor.device != tokens.device for tensor in (index, weights, gate_up, down)):
        return False
    wide = 16 // tokens.element_size()
    there = tokens.numel() and index.numel() and gate_up.shape[2] % wide == 0 and down.shape[2] % wide == 0
    return bool(there) and _has_grouped_products(tokens)


KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""Activations whose slope a kernel has."""


def _has_grouped_products(tokens: Tensor) -> bool:
    """Return whether torch multiplies groups of rows by matrices of their own, and differentiates that."""
    if not hasattr(F, "grouped_mm"):  # torch 2.10
        return False
    if chip_of(tokens) is None:
        return True
    return tokens.dtype == torch.bfloat16 and torch.cuda.get_device_capability(tokens.device) >= (8, 0)


def trained_experts(
    tokens: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, kind: str
) -> Tensor:
    """Return what experts make of `tokens` `[N, H]`, `[N, H]` in their dtype, differentiable by kernels.

    Args:
        tokens: in the weights' dtype.
        index: `[N, K]`, integers below E.
        weights: `[N, K]`, of the experts.
        gate_up: `[E, 2 M, H]`, gates first.
        down: `[E, H, M]`.
        kind: the activation's name in a kernel.
    """
    out: Tensor = _TrainedExperts.apply(tokens, index, weights, gate_up, down, kind)
    return out


class _TrainedExperts(torch.autograd.Function):
    """The sum over a token's experts, and its gradients from the tokens and what the first product made of them."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, kind: str
    ) -> Tensor:
        top_k = index.shape[1]
        ordered, order = index.reshape(-1).sort(stable=True)
        bounds = torch.arange(gate_up.shape[0], device=index.device, dtype=index.dtype)
        ends = torch.searchsorted(ordered, bounds, right=True, out_int32=True)
        both = grouped(tokens.index_select(0, order // top_k), gate_up.mT, ends)
        gate, up = both.chunk(2, -1)
        parts = grouped(launch_gated_activation(gate, up, kind), down.mT, ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        ctx.save_for_backward(tokens, weights, gate_up, down, both, order, places, ends)
        ctx.kind = kind
        return summed_over_experts(parts, places, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, gate_up, down, both, order, places, ends = ctx.saved_tensors
        for_tokens, _, for_weights, for_gate_up, for_down, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            needed = (for_tokens, for_weights, for_gate_up, for_down)
            sorted_by, kind = (order, places, ends), ctx.kind
            reference = lambda x, w, gate_up, down: _reference(x, w, gate_up, down, *sorted_by, kind)
            found = backend.again(reference, (tokens, weights, gate_up, down), needed, [gradient])
            return found[0], None, *found[1:], None
        of_token = order // weights.shape[1]
        spread = gradient.contiguous().index_select(0, of_token)
        of_both, shared, of_weights = gradients_of_gates(grouped(spread, down, ends), both, weights, order, ctx.kind)
        of_down = grouped(spread.mT, shared, ends) if for_down else None
        del spread, shared
        of_gate_up = grouped(of_both.mT, tokens.index_select(0, of_token), ends) if for_gate_up else None
        of_tokens = None
        if for_tokens:
            of_tokens = summed_over_experts(grouped(of_both, gate_up, ends), places, None, weights.shape[1])
        return of_tokens, None, of_weights if for_weights else None, of_gate_up, of_down, None


def grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply groups that end at `ends`: rows `[S, A]` by `[E, A, B]`, or columns `[A, S]` by rows `[S, B]`."""
    product: Tensor = F.grouped_mm(left, right, offs=ends)
    return product


def _reference(
    tokens: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    order: Tensor,
    places: Tensor,
    ends: Tensor,
    kind: str,
) -> Tensor:
    gate, up = grouped(tokens[order // weights.shape[1]], gate_up.mT, ends).chunk(2, -1)
    parts = grouped(torch_form(kind)(gate) * up, down.mT, ends)[places].view(*weights.shape, -1)
    return (parts * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def gradients_of_gates(
    of_gated: Tensor, both: Tensor, weights: Tensor, order: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up `[S, 2 M]`, what the second product read times `weights`, and theirs.

    Args:
        of_gated: `[S, M]`, the gradient of what the second product read, before the weight of the pair.
        both: `[S, 2 M]`, gate and up.
        weights: `[N, K]`.
        order: `[S]`, where a pair stands in `weights`.
        kind: the activation's name in a kernel.
    """
    pairs, size = of_gated.shape
    of_both, shared, of_weights = torch.empty_like(both), torch.empty_like(of_gated), torch.empty_like(weights)
    of_weights = of_weights if of_weights.is_contiguous() else of_weights.contiguous()
    block_rows, block_cols, num_warps = row_tiles.tile(size, pairs)
    if block_cols > WIDEST:
        block_cols, num_warps = WIDEST, 512 // WAVE
    with backend.device_guard(both):
        experts_gradient_kernel.launch(
            (-(-pairs // block_rows), 1, 1),
            num_warps,
            (of_gated, both, weights.contiguous(), order, of_both, shared, of_weights),
            (pairs,),
            (),
            (),
            (size, kind, block_rows, block_cols),
        )
    return of_both, shared, of_weights


def summed_over_experts(parts: Tensor, places: Tensor, weights: Tensor | None, top_k: int = 0) -> Tensor:
    """Return Σ_k of `parts` `[S, H]`, times `weights` `[N, K]` where they are given, `[N, H]` in the parts' dtype.

    Args:
        parts: one row a pair.
        places: `[S]`, the row of the k-th expert of token n at n K + k.
        weights: of the experts.
        top_k: K, where there are no weights.
    """
    top_k = top_k if weights is None else weights.shape[1]
    tokens, size = places.numel() // top_k, parts.shape[1]
    out = parts.new_empty(tokens, size)
    block_cols = min(1 << (size - 1).bit_length(), 2048)
    with backend.device_guard(parts):
        sum_of_experts_kernel.launch(
            (tokens, -(-size // block_cols), 1),
            max(1, block_cols // 16 // WAVE),
            (parts, places, parts if weights is None else weights.contiguous(), out),
            (),
            (),
            (),
            (size, top_k, weights is not None, block_cols),
        )
    return out
