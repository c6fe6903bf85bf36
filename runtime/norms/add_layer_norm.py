"""Residual add and `torch.nn.LayerNorm` in one pass over memory.

N is any leading shape, H the hidden size:

    summed = residual + hidden_states                       rounded to torch's promotion of the two
    normed = F.layer_norm(summed, (H,), weight, bias, eps)  fp32 inside, one rounding
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ..core import backend, deferring, layout, rows
from ..core.launch import overlaps
from .add_rms_norm import empty_sum, sum_refusal
from .layer_norm import layer_norm
from .layer_norm import refusal as norm_refusal

CASES = """
for size in (4096, 131072):
    rows = tensor(1, size)
    case(f"{size} columns, adds", add_layer_norm, rows, rows, tensor(size), tensor(size), EPS)
"""

if backend.triton_installed():
    from .layer_norm import layer_norm_kernel


def add_layer_norm(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and apply torch's LayerNorm over the last dimension of the sum.

    Args:
        hidden_states: `[N, H]`, any strides.
        residual: `[N, H]`, any strides.
        weight: `[H]` or None.
        bias: `[H]` or None.
        eps: added to the variance.

    Returns:
        `(normed, summed)`, both `[N, H]` in the sum's dtype and new, the first contiguous, the second laid out as
        torch lays out a sum. Differentiable: where gradients are wanted the torch form runs. Under autocast, which
        runs `F.layer_norm` in fp32, it runs too.
    """
    reason = None
    if backend.composes() or backend.wants_gradient(hidden_states, residual, weight, bias):
        reason = "gradient_wanted"
    elif torch.is_autocast_enabled(hidden_states.device.type):
        reason = "autocast"
    if reason is not None:
        backend.count_fallback("add_layer_norm", reason)
        return _reference(hidden_states, residual, weight, bias, eps)
    if (summed := deferring.sum(hidden_states, residual)) is not None:
        return layer_norm(summed, weight, bias, eps), summed
    return _op(hidden_states, residual, weight, bias, eps)


def _reference(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = residual + hidden_states
    return F.layer_norm(summed, summed.shape[-1:], weight, bias, eps), summed


def _forward(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend.uses_triton(hidden_states):
        if layout.is_free():
            hidden_states, residual = hidden_states.contiguous(), residual.contiguous()
        reason = sum_refusal(hidden_states, residual) or _parameter_refusal(hidden_states, residual, weight, bias)
        reason = reason or (None if rows.order(residual) == () else "layout")
        if reason is None:
            return _launch(hidden_states, residual, weight, bias, eps)
        backend.count_fallback("add_layer_norm", reason)
    normed, summed = _reference(hidden_states, residual, weight, bias, eps)
    return normed.contiguous(), summed


def _parameter_refusal(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> str | None:
    reason = norm_refusal(hidden_states, weight, bias)
    if reason is not None:
        return reason
    dtype = torch.promote_types(hidden_states.dtype, residual.dtype)
    for parameter in (weight, bias):
        if parameter is not None and (parameter.dtype != dtype or parameter.ndim != 1):
            return "weight_dtype_or_shape"  # torch's own LayerNorm decides what mixed dtypes mean
    return None


def _launch(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = empty_sum(hidden_states, residual)
    normed = torch.empty_like(summed)
    if summed.numel() == 0:
        return normed, summed
    hidden_size = summed.shape[-1]
    row_count = summed.numel() // hidden_size
    x, stride = rows.flatten(hidden_states)
    residual, residual_stride = rows.flatten(residual)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    block_rows, block_cols, num_warps = rows.tile(hidden_size, row_count)
    overlap = overlaps(summed)
    with backend.device_guard(summed):
        layer_norm_kernel.launch(
            (-(-row_count // block_rows), 1, 1),
            num_warps,
            (x, residual, x if weight is None else weight, x if bias is None else bias, normed, summed),
            (row_count,),
            (1, stride, 0, residual_stride),
            (eps,),
            (hidden_size, 1, True, weight is not None, bias is not None, block_rows, block_cols, overlap),
            overlap=overlap,
        )
    return normed, summed


def _fake(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = residual + hidden_states
    return torch.empty_like(summed, memory_format=torch.contiguous_format), summed


_op = backend.register(
    "add_layer_norm",
    "(Tensor hidden_states, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    _forward,
    _fake,
)
