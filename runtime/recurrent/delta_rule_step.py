"""One token of the gated delta rule (linear attention whose state forgets, and corrects what it returns for a key).

B rows, n tokens, Hk key heads, Hv value heads, D head_dim of keys, Dv of values. For each value head the state
`S [D, Dv]` becomes `a S + k ((v - (a S)ᵀ k) b)ᵀ`, with `a = exp(g)`, and the output is `Sᵀ q / √D`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..guards.overwriting import overwrites, steps
from ..launching.launch import WAVE, Kernel, overlaps

CASES = """
def rule(key_heads, value_heads):
    keys, values = tensor(1, 1, key_heads, 128), tensor(1, 1, value_heads, 128)
    state = tensor(1, value_heads, 128, 128, dtype=torch.float32)
    gates = tensor(1, 1, value_heads, dtype=torch.float32), tensor(1, 1, value_heads)
    return delta_rule_step(keys, keys, values, *gates, state, True, True)

case("Qwen3.5 2B", rule, 16, 16)
case("Qwen3-Next 80B", rule, 16, 32)
"""

COLUMNS = 16
"""Columns of the state a program holds."""
_WIDEST = 256

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _delta_rule_step_kernel(  # type: ignore[no-untyped-def]
        query_ptr,
        key_ptr,
        value_ptr,
        decay_ptr,
        beta_ptr,
        state_ptr,
        out_ptr,
        next_ptr,
        query_row_stride,
        query_head_stride,
        key_row_stride,
        key_head_stride,
        value_row_stride,
        value_head_stride,
        decay_row_stride,
        beta_row_stride,
        scaling,
        eps,
        HEADS: tl.constexpr,
        GROUPS: tl.constexpr,
        D: tl.constexpr,
        DV: tl.constexpr,
        NORM: tl.constexpr,
        BLOCK_D: tl.constexpr,
        COLUMNS: tl.constexpr,
        AHEAD: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Step COLUMNS columns of the state of one value head of one row a program."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            if not AHEAD:
                tl.extra.cuda.gdc_wait()
        head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
        group = head // (HEADS // GROUPS)
        d = tl.arange(0, BLOCK_D)
        col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        place = (row * HEADS + head) * D * DV + d[:, None] * DV + col[None, :]
        live = (d[:, None] < D) & (col[None, :] < DV)
        state = tl.load(state_ptr + place, mask=live, other=0.0).to(tl.float32)
        if OVERLAP and AHEAD:
            tl.extra.cuda.gdc_wait()
        query = tl.load(query_ptr + row * query_row_stride + group * query_head_stride + d, mask=d < D, other=0.0).to(
            tl.float32
        )
        key = tl.load(key_ptr + row * key_row_stride + group * key_head_stride + d, mask=d < D, other=0.0).to(
            tl.float32
        )
        value = tl.load(
            value_ptr + row * value_row_stride + head * value_head_stride + col, mask=col < DV, other=0.0
        ).to(tl.float32)
        if NORM:
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + eps)
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + eps)
        decay = tl.exp(tl.load(decay_ptr + row * decay_row_stride + head).to(tl.float32))
        beta = tl.load(beta_ptr + row * beta_row_stride + head).to(tl.float32)
        state *= decay
        delta = (value - tl.sum(state * key[:, None], axis=0)) * beta
        state += key[:, None] * delta[None, :]
        out = tl.sum(state * (query * scaling)[:, None], axis=0)
        tl.store(next_ptr + place, state, mask=live)
        tl.store(out_ptr + (row * HEADS + head) * DV + col, out.to(out_ptr.dtype.element_ty), mask=col < DV)

    delta_rule_step_kernel = Kernel(_delta_rule_step_kernel)


def delta_rule_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Step the state of every value head by one token.

    Args:
        query: `[B, n, Hk, D]`.
        key: `[B, n, Hk, D]`.
        value: `[B, n, Hv, Dv]`.
        g: `[B, n, Hv]` logarithms of how much of the state stays.
        beta: `[B, n, Hv]` how much of the error is corrected.
        initial_state: `[B, Hv, D, Dv]`; None for zeros.
        output_final_state: whether the state is returned.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised to length 1.

    Returns:
        `[B, 1, Hv, Dv]` in the dtype of `query`, and the new state in fp32, in a step of the decode loop in the old
        one's memory; None where torch is to run.
    """
    if output_final_state and _fits(query, key, value, g, beta, initial_state):
        assert initial_state is not None
        return _launch(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel)
    return None


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `delta_rule_step` in plain torch, rounding where the modeling files round."""
    dtype = query.dtype
    rows, tokens, groups, width = key.shape
    heads, columns = value.shape[-2:]
    if groups != heads:
        query, key = (x.repeat_interleave(heads // groups, dim=2) for x in (query, key))
    query, key, value, beta, g = [
        x.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        for x in (query, key, value, beta, g)
    ]
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query / (query.shape[-1] ** 0.5)
    if initial_state is None:
        state = torch.zeros((rows, heads, width, columns), dtype=value.dtype, device=value.device)
    else:
        state = initial_state.to(value)
    out = torch.zeros_like(value)
    for i in range(tokens):
        state = state * g[:, :, i].exp()[..., None, None]
        found = (state * key[:, :, i].unsqueeze(-1)).sum(dim=-2)
        error = (value[:, :, i] - found) * beta[:, :, i].unsqueeze(-1)
        state = state + key[:, :, i].unsqueeze(-1) * error.unsqueeze(-2)
        out[:, :, i] = (state * query[:, :, i].unsqueeze(-1)).sum(dim=-2)
    return out.transpose(1, 2).contiguous().to(dtype), state if output_final_state else None


def _fits(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> bool:
    """Return whether the kernel takes these tensors: one token, a state in fp32, heads without gaps inside."""
    if state is None or query.dim() != 4 or value.dim() != 4 or query.shape[1] != 1 or query.shape != key.shape:
        return False
    rows, _, heads, columns = value.shape
    return (
        state.shape == (rows, heads, query.shape[3], columns)
        and g.shape == beta.shape == value.shape[:3]
        and heads % query.shape[2] == 0
        and query.shape[3] <= _WIDEST
        and state.dtype == torch.float32
        and state.is_contiguous()
        and all(t.stride(-1) == 1 for t in (query, key, value, g, beta))
        and all(t.dtype in KERNEL_DTYPES and t.device == query.device for t in (query, key, value, g, beta, state))
        and backend.nothing_watches(query)
        and not backend.wants_gradient(query, key, value, g, beta, state)
        and backend.uses_triton(query)
    )


def _launch(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, norm: bool
) -> tuple[Tensor, Tensor]:
    rows, _, heads, columns = value.shape
    groups, width = query.shape[2:]
    out, after = query.new_empty(value.shape), state if overwrites(state) else torch.empty_like(state)
    overlap, ahead = overlaps(out), steps(state)
    with backend.device_guard(out):
        delta_rule_step_kernel.launch(
            (-(-columns // COLUMNS), heads, rows),
            128 // WAVE,
            (query, key, value, g, beta, state, out, after),
            (),
            (
                query.stride(0), query.stride(2), key.stride(0), key.stride(2), value.stride(0), value.stride(2),
                g.stride(0), beta.stride(0),
            ),
            (width**-0.5, 1e-6),
            (heads, groups, width, columns, norm, 1 << (width - 1).bit_length(), COLUMNS, ahead, overlap),
            overlap=overlap,
        )  # fmt: skip
    return out, after
