"""Residual add and RMSNorm in one pass over memory.

N is any leading shape, H the hidden size:

    summed = residual + hidden_states          rounded to torch's promotion of the two
    normed = rms_norm(summed, weight, eps)     of the rounded sum, as the unfused code has it
"""

from __future__ import annotations

from typing import Any

import torch

from ..aiter import aiter_norms
from ..core import backend, lazy_hooks
from ..device import row_tiles
from .rms_norm import launch_rms_norm, note_made, result_dtype, rms_norm
from .rms_norm import reference as norm_reference
from .rms_norm import refusal as norm_refusal
from .rms_norm_backward import refusal as backward_refusal
from .rms_norm_backward import rms_norm_backward

CASES = """
def added(size, **rounding):
    return add_rms_norm(tensor(1, size), tensor(1, size), tensor(size), EPS, **rounding)

for model in LLAMAS:
    case(f"{model.name}, adds", added, model.hidden_size)
case("Gemma 9B, adds", added, GEMMA_9B.hidden_size, offset=1.0, weight_in_fp32=True)
case("131072 columns, adds", added, 131072)
"""


def add_rms_norm(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    weight_in_fp32: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and normalise each row of the sum by its root mean square.

    Args:
        hidden_states: `[N, H]`, any strides.
        residual: `[N, H]`, any strides.
        weight: `[H]`, or None.
        eps: added to the mean square, in fp32.
        offset: added to the weight (1.0 for Gemma).
        weight_in_fp32: as in `rms_norm`.

    Returns:
        `(normed, summed)`, both `[N, H]`, new and laid out as the torch form lays them out. Differentiable, by a
        kernel (`rms_norm_backward`) or in the torch form, which runs where eps is no number, too.
    """
    if isinstance(eps, torch.Tensor):
        backend.count_fallback("add_rms_norm", "eps_is_a_tensor")
        return _reference(hidden_states, residual, weight, eps, offset, weight_in_fp32)
    if backend.composes():
        return _reference(hidden_states, residual, weight, eps, offset, weight_in_fp32)
    if backend.wants_gradient(hidden_states, residual, weight):
        reason = _not_learned(hidden_states, residual, weight)
        if reason is None:
            given = (hidden_states, residual, weight, eps, offset, weight_in_fp32)
            normed, summed = _AddRmsNorm.apply(*given)
            note_made(normed, summed, weight, (eps, offset, weight_in_fp32))
            return normed, summed
        backend.count_fallback("add_rms_norm", str(reason))
        return _reference(hidden_states, residual, weight, eps, offset, weight_in_fp32)
    if (summed := lazy_hooks.sum(hidden_states, residual)) is not None:
        return rms_norm(summed, weight, eps, offset=offset, weight_in_fp32=weight_in_fp32), summed
    return _op(hidden_states, residual, weight, eps, offset, weight_in_fp32)


class _AddRmsNorm(torch.autograd.Function):
    """Sum and norm, and their gradients from the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float,
        weight_in_fp32: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, summed = _launch(hidden_states, residual, weight, eps, offset, weight_in_fp32)
        ctx.save_for_backward(summed, weight)
        ctx.form = (eps, offset, weight_in_fp32)
        ctx.dtypes = (hidden_states.dtype, residual.dtype)
        ctx.set_materialize_grads(False)  # a model that normalises after each block reads no sum
        return normed, summed

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, after: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        summed, weight = ctx.saved_tensors
        eps, offset, weight_in_fp32 = ctx.form
        first, second, for_weight = ctx.needs_input_grad[:3]
        of_sum: torch.Tensor | None
        of_weight = None
        if gradient is None:
            of_sum = after
        elif torch.is_grad_enabled():
            reference = lambda x, w: norm_reference(x, w, *ctx.form)
            of_norm, of_weight = backend.again(reference, (summed, weight), (True, for_weight), [gradient])
            of_sum = of_norm if after is None or of_norm is None else of_norm + after
        else:
            of_sum, of_weight = rms_norm_backward(
                gradient, after, summed, weight, eps, for_weight, offset=offset, weight_in_fp32=weight_in_fp32
            )
        needed = zip((first, second), ctx.dtypes, strict=True)
        of_terms = [of_sum.to(dtype) if need and of_sum is not None else None for need, dtype in needed]
        return (*of_terms, of_weight, None, None, None)


def _not_learned(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    """Return why the torch form is differentiated, and not the kernel."""
    if not backend.learns(hidden_states, residual, weight):
        return "gradient_wanted"
    reason = norm_refusal(hidden_states, weight) or sum_refusal(hidden_states, residual)
    return reason or backward_refusal(hidden_states) or backward_refusal(residual)


def _reference(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = residual + hidden_states
    return norm_reference(summed, weight, eps, offset, weight_in_fp32), summed


def _forward(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    order = row_tiles.order(residual)
    if order == ():
        given = (hidden_states, residual, weight, eps, offset, weight_in_fp32)
        found = aiter_norms.add_rms_norm(*given, norm_reference)
        if found is not None:
            return found
    if backend.uses_triton(hidden_states):
        reason = norm_refusal(hidden_states, weight) or sum_refusal(hidden_states, residual)
        reason = reason or ("layout" if order is None else None)
        if reason is None and order is not None:
            x, y = (t.permute(order) if order else t for t in (hidden_states, residual))
            normed, summed = _launch(x, y, weight, eps, offset, weight_in_fp32)
            return row_tiles.restored(normed, order), row_tiles.restored(summed, order)
        backend.count_fallback("add_rms_norm", str(reason))
    return _reference(hidden_states, residual, weight, eps, offset, weight_in_fp32)


def sum_refusal(hidden_states: torch.Tensor, residual: torch.Tensor) -> str | None:
    """Return why a kernel does not add these two, or None if it does."""
    if residual.dtype not in row_tiles.KERNEL_DTYPES:
        return "dtype"
    if residual.shape != hidden_states.shape or residual.device != hidden_states.device:
        return "residual_shape_or_device"
    return None


def empty_sum(hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return memory for `residual + hidden_states`, contiguous."""
    if hidden_states.shape == residual.shape and hidden_states.dtype == residual.dtype:
        return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    shape = torch.broadcast_shapes(hidden_states.shape, residual.shape)
    dtype = torch.promote_types(hidden_states.dtype, residual.dtype)
    return torch.empty(shape, dtype=dtype, device=hidden_states.device)


def _launch(
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = empty_sum(hidden_states, residual)
    normed = torch.empty_like(summed, dtype=result_dtype(summed.dtype, weight, weight_in_fp32))
    return launch_rms_norm(hidden_states, weight, eps, offset, weight_in_fp32, normed, residual, summed), summed


_op = backend.register(
    "add_rms_norm",
    "(Tensor hidden_states, Tensor residual, Tensor? weight, float eps, float offset, bool weight_in_fp32)"
    " -> (Tensor, Tensor)",
    _forward,
    _reference,
)
