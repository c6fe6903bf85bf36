"""Residual add and `torch.nn.LayerNorm` in one pass over memory.

N is any leading shape, H the hidden size:

    summed = residual + hidden_states                       rounded to torch's promotion of the two
    normed = F.layer_norm(summed, (H,), weight, bias, eps)  fp32 inside, one rounding; under autocast none
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..core import backend, lazy_hooks, output_layout
from ..device import row_tiles
from .add_rms_norm import empty_sum, sum_refusal
from .layer_norm import launch_layer_norm, layer_norm
from .layer_norm import refusal as norm_refusal
from .layer_norm_backward import layer_norm_backward
from .layer_norm_backward import refusal as backward_refusal

CASES = """
for size in (4096, 131072):
    rows = tensor(1, size)
    case(f"{size} columns, adds", add_layer_norm, rows, rows, tensor(size), tensor(size), EPS)
"""


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
        torch lays out a sum. Differentiable, by a kernel (`layer_norm_backward`) or in the torch form. Under autocast
        `normed` is in fp32 on a GPU, as `F.layer_norm` makes it, and the torch form runs where nothing is
        differentiated.
    """
    if backend.composes():
        return _reference(hidden_states, residual, weight, bias, eps)
    reason = None
    if backend.wants_gradient(hidden_states, residual, weight, bias):
        reason = _not_learned(hidden_states, residual, weight, bias)
        if reason is None:
            both: tuple[torch.Tensor, torch.Tensor] = _AddLayerNorm.apply(hidden_states, residual, weight, bias, eps)
            return both
    elif backend.autocasts(hidden_states.device.type):
        reason = "autocast"
    if reason is not None:
        backend.count_fallback("add_layer_norm", reason)
        return _reference(hidden_states, residual, weight, bias, eps)
    if (summed := lazy_hooks.sum(hidden_states, residual)) is not None:
        return layer_norm(summed, weight, bias, eps), summed
    return _op(hidden_states, residual, weight, bias, eps)


class _AddLayerNorm(torch.autograd.Function):
    """Sum and norm, and their gradients from the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float32 if _widens(hidden_states) else None
        normed, summed = _launch(hidden_states, residual, weight, bias, eps, dtype)
        ctx.save_for_backward(summed, weight, bias)
        ctx.eps = eps
        ctx.dtypes, ctx.dtype = (hidden_states.dtype, residual.dtype), normed.dtype
        ctx.set_materialize_grads(False)  # a model that normalises after each block reads no sum
        return normed, summed

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, after: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        summed, weight, bias = ctx.saved_tensors
        first, second, for_weight, for_bias = ctx.needs_input_grad[:4]
        of_sum: torch.Tensor | None
        of_weight = of_bias = None
        if gradient is None:
            of_sum = after
        elif torch.is_grad_enabled():
            needed = (True, for_weight, for_bias)
            reference = lambda x, weight, bias: _norm(x, weight, bias, ctx.eps, ctx.dtype)
            of_norm, of_weight, of_bias = backend.again(reference, ctx.saved_tensors, needed, [gradient])
            of_sum = of_norm if after is None or of_norm is None else of_norm + after
        else:
            of_sum, of_weight, of_bias = layer_norm_backward(
                gradient, after, summed, weight, bias, ctx.eps, (for_weight, for_bias)
            )
        needs = zip((first, second), ctx.dtypes, strict=True)
        of_terms = [of_sum.to(dtype) if need and of_sum is not None else None for need, dtype in needs]
        return (*of_terms, of_weight, of_bias, None)


def _norm(
    summed: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (weight, bias))
    return F.layer_norm(summed.to(dtype), summed.shape[-1:], weight, bias, eps)


def _not_learned(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> str | None:
    """Return why the torch form is differentiated, and not the kernel."""
    if not backend.learns(hidden_states, residual, weight, bias):
        return "gradient_wanted"
    if backend.autocasts(hidden_states.device.type) and not _widens(hidden_states):
        return "autocast"
    reason = sum_refusal(hidden_states, residual) or _parameter_refusal(hidden_states, residual, weight, bias)
    return reason or backward_refusal(hidden_states) or backward_refusal(residual)


def _widens(tensor: torch.Tensor) -> bool:
    """Return whether autocast runs `F.layer_norm` in fp32: on a GPU, and not on a CPU (torch 2.14)."""
    return tensor.is_cuda and torch.is_autocast_enabled("cuda")


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
        if output_layout.is_free():
            hidden_states, residual = hidden_states.contiguous(), residual.contiguous()
        reason = sum_refusal(hidden_states, residual) or _parameter_refusal(hidden_states, residual, weight, bias)
        reason = reason or (None if row_tiles.order(residual) == () else "layout")
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
    any_dtype = _widens(hidden_states)
    for parameter in (weight, bias):
        if parameter is not None and ((parameter.dtype != dtype and not any_dtype) or parameter.ndim != 1):
            return "weight_dtype_or_shape"  # torch's own LayerNorm decides what mixed dtypes mean
    return None


def _launch(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = empty_sum(hidden_states, residual)
    normed = torch.empty_like(summed, dtype=dtype)
    return launch_layer_norm(hidden_states, weight, bias, eps, normed, residual, summed), summed


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
