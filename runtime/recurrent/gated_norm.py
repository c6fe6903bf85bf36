"""RMSNorm of a mixer's output, over groups of its columns, with a gate before or behind it.

N is any leading shape, H the hidden size, which groups of G columns divide; `x32` is a tensor in fp32:

    Mamba 2       weight * cast(norm(x32 * act(gate32)))            gate_first=True
    delta rule    cast((weight * cast(norm(x32)))32 * act(gate32))
    Kimi          cast(weight32 * norm(x32) * act(gate32))          weight_in_fp32=True
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES, collapse, tile
from ..launching.launch import WAVE, Kernel, overlaps
from ..linear.gated_activation import activation_kind

CASES = """
def of_heads(rows, heads, size):
    packed = tensor(rows, 4 * heads * size)[:, : heads * size].reshape(rows * heads, size)
    return gated_norm(tensor(rows * heads, size), packed, tensor(size), EPS, "silu")

def of_groups(rows, columns, size):
    gate = tensor(rows, 1, 3 * columns)[..., :columns]
    return gated_norm(tensor(rows, 1, columns), gate, tensor(columns), EPS, "silu", size, gate_first=True)

case("Qwen3.5 2B", of_heads, 1, 16, 128)
case("Mamba2 1.3B", of_groups, 1, 4096, 4096)
case("Nemotron-H 8B", of_groups, 1, 8192, 1024)
case("Mamba2 1.3B, prompt", of_groups, PROMPT, 4096, 4096)
"""

_WIDEST = 16384
FEWEST = 8 * WAVE
"""Elements of a program, where there are as many: heads are narrow."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow
    from ..linear.gated_activation import _activate

    @triton.jit
    def _opened(x, gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what passes a gate; all fp32."""
        if ACTIVATION == "sigmoid":  # noqa: SIM108
            y = x / (1.0 + tl.exp(-gate))
        else:  # not after a `return`: what follows one is compiled too
            y = x * _activate(gate, ACTIVATION)
        return y

    @triton.jit(do_not_specialize=["row_count"])
    def _gated_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        gate_ptr,
        weight_ptr,
        out_ptr,
        row_count,
        row_stride,
        inner,
        outer_stride,
        inner_stride,
        eps,
        G: tl.constexpr,
        GATED: tl.constexpr,
        ACTIVATION: tl.constexpr,
        GATE_FIRST: tl.constexpr,
        WEIGHT_IN_FP32: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Normalise one group of BLOCK_ROWS rows a program."""
        follow(OVERLAP)
        row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]).to(tl.int64)
        place = tl.arange(0, BLOCK_COLS)[None, :]
        col = tl.program_id(1) * G + place
        mask = (row < row_count) & (place < G)
        x_in = tl.load(x_ptr + row * row_stride + col, mask=mask, other=0.0)
        weight_in = tl.load(weight_ptr + col, mask=place < G, other=0.0)
        x, weight = x_in.to(tl.float32), weight_in.to(tl.float32)
        if GATED:
            gate_row = gate_ptr + (row // inner) * outer_stride + (row % inner) * inner_stride
            gate = tl.load(gate_row + col, mask=mask, other=0.0).to(tl.float32)
            if GATE_FIRST:
                x = _opened(x, gate, ACTIVATION)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / G + eps)
        if not WEIGHT_IN_FP32:
            y = y.to(x_in.dtype).to(tl.float32)
        y *= weight
        if GATED and not GATE_FIRST:
            if not WEIGHT_IN_FP32 and weight_in.dtype == x_in.dtype:
                y = y.to(x_in.dtype).to(tl.float32)
            y = _opened(y, gate, ACTIVATION)
        tl.store(out_ptr + row * row_stride + col, y.to(out_ptr.dtype.element_ty), mask=mask)

    gated_norm_kernel = Kernel(_gated_norm_kernel)


def gated_norm(
    hidden_states: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: str,
    group_size: int | None = None,
    *,
    gate_first: bool = False,
    weight_in_fp32: bool = False,
) -> Tensor | None:
    """Normalise each group of columns by its root mean square, and let a gate pass it.

    Args:
        hidden_states: `[N, H]`.
        gate: `[N, H]`; None for none, where it comes first.
        weight: `[H]`.
        eps: added to the mean square, in fp32.
        activation: a name of `ACT2FN`, of the gate.
        group_size: columns that have a mean of their own; None for all.
        gate_first: whether it is what has passed the gate that is normalised.
        weight_in_fp32: whether nothing is rounded before the end.

    Returns:
        `[N, H]`: in torch's promotion of input and weight where the gate comes first, else in the dtype of
        `hidden_states`. None where torch's own operators are to run instead.
    """
    size = group_size or hidden_states.shape[-1]
    kind = _kind(activation)
    if kind is None or not _fits(hidden_states, gate, weight, size):
        return None
    return _launch(hidden_states, gate, weight, (eps, size, kind), gate_first, weight_in_fp32)


def reference(
    hidden_states: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: str,
    group_size: int | None = None,
    *,
    gate_first: bool = False,
    weight_in_fp32: bool = False,
) -> Tensor:
    """Compute `gated_norm` in plain torch, rounding where the modeling files round."""
    dtype, x = hidden_states.dtype, hidden_states.float()
    if gate is not None and gate_first:
        x = x * ACT2FN[activation](gate.float())
    grouped = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    if gate_first:
        return weight * normed.to(dtype)
    normed = weight.float() * normed if weight_in_fp32 else weight * normed.to(dtype)
    return (normed if gate is None else normed * ACT2FN[activation](gate.float())).to(dtype)


def _kind(activation: str) -> str | None:
    """Return what the kernel calls an activation, None if it has none of it."""
    return "sigmoid" if activation == "sigmoid" else activation_kind(ACT2FN[activation])


def _fits(x: Tensor, gate: Tensor | None, weight: Tensor, size: int) -> bool:
    """Return whether the kernel takes these tensors: rows side by side, in whole groups."""
    given = [x, weight, *([] if gate is None else [gate])]
    return (
        x.dim() > 0
        and x.numel() > 0
        and x.is_contiguous()
        and 0 < size <= _WIDEST
        and x.shape[-1] % size == 0
        and weight.shape == x.shape[-1:]
        and weight.is_contiguous()
        and (gate is None or gate.shape == x.shape)
        and all(t.dtype in KERNEL_DTYPES and t.device == x.device for t in given)
        and backend.nothing_watches(x)
        and not backend.wants_gradient(*given)
        and backend.uses_triton(x)
    )


def _launch(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    how: tuple[float, int, str],
    gate_first: bool,
    weight_in_fp32: bool,
) -> Tensor:
    eps, size, kind = how
    columns = x.shape[-1]
    row_count = x.numel() // columns
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype) if gate_first else x.dtype)
    opened, inner, outer_stride, inner_stride = collapse(x if gate is None else gate)
    block_rows, block_cols, num_warps = tile(size, row_count)
    while block_rows * block_cols < FEWEST and block_rows < row_count:  # a thread takes 16 bytes
        block_rows *= 2
    overlap = overlaps(out)
    with backend.device_guard(out):
        gated_norm_kernel.launch(
            (-(-row_count // block_rows), columns // size, 1),
            num_warps,
            (x, opened, weight, out),
            (row_count,),
            (columns, inner, outer_stride, inner_stride),
            (eps,),
            (size, gate is not None, kind, gate_first, weight_in_fp32, block_rows, block_cols, overlap),
            overlap=overlap,
        )
    return out
