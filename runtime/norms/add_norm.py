"""`residual = residual + hidden_states; hidden_states = norm(residual)`, for a norm known only at run time."""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_compiling

from ..core import backend
from ..device.launch_bound import is_launch_bound
from .add_layer_norm import add_layer_norm
from .add_rms_norm import add_rms_norm
from .norm_form import Prologue, norm_form


def add_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(norm(summed), summed)` with `summed = residual + hidden_states`, in one kernel if the norm allows it.

    A norm takes part if it is `torch.nn.LayerNorm`, or an RMSNorm over the last dimension as `norm_form` reads it:
    `torch.nn.RMSNorm` with an eps, or a class whose `forward` is a call of `rms_norm`. Any other norm, or one whose
    call is observed (`backend.observed`), is called as it stands and counted, and so it is for anything but two
    tensors of one shape.

    Args:
        hidden_states: `[N, H]`.
        residual: `[N, H]`.
        norm: the module that normalises the sum.
    """
    # A compiler fuses the sum with the norm and what is around both; of short calls the checks are the longest part.
    if (is_compiling() and backend.named_none()) or (type(norm) is nn.LayerNorm and is_launch_bound(hidden_states)):
        summed = residual + hidden_states
        return norm(summed), summed
    form = _form(hidden_states, residual, norm)
    if isinstance(form, str):
        backend.count_fallback("add_norm", form)
        summed = residual + hidden_states
        return norm(summed), summed
    if form is None:
        return add_layer_norm(hidden_states, residual, norm.weight, norm.bias, norm.eps)  # type: ignore[arg-type]
    weight, eps, offset, weight_in_fp32 = form
    return add_rms_norm(hidden_states, residual, weight, eps, offset=offset, weight_in_fp32=weight_in_fp32)


def _form(hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> Prologue | str | None:
    """Return the RMSNorm that a norm is, None for torch's LayerNorm, or why it has to be called."""
    if not (isinstance(hidden_states, torch.Tensor) and isinstance(residual, torch.Tensor)):
        return "no_tensors"
    if not isinstance(norm, nn.Module):
        return "no_module"
    if backend.observed(norm):
        return "norm_observed"
    kind = type(norm)
    if kind.__call__ is not nn.Module.__call__:
        return "call_replaced"
    if hidden_states.shape != residual.shape:
        return "shapes_differ"
    if kind is nn.LayerNorm:
        return None if norm.normalized_shape == hidden_states.shape[-1:] else "normalized_shape"
    if (form := norm_form(norm)) is None:
        return "other_norm"
    if isinstance(norm, nn.RMSNorm):
        if not (hidden_states.is_contiguous() and residual.is_contiguous()):
            return "layout"  # torch's result is dense, whatever its input is
        return form if norm.normalized_shape == hidden_states.shape[-1:] else "normalized_shape"
    return form
