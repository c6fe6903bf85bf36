"""`residual = residual + hidden_states; hidden_states = norm(residual)`, for a norm known only at run time."""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_compiling

from ..core import backend
from ..device.launch_bound import is_launch_bound
from ..guards.provenance import owner_of
from .add_layer_norm import add_layer_norm
from .add_rms_norm import add_rms_norm
from .torch_rms_norm import torch_rms_norm


def add_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(norm(summed), summed)` with `summed = residual + hidden_states`, in one kernel if the norm allows it.

    A norm takes part if it is `torch.nn.LayerNorm` or, with an eps, `torch.nn.RMSNorm` over the last dimension, or has
    a method `add_forward(hidden_states, residual) -> (normed, summed)` beside its `forward`, which rewritten RMSNorm
    classes have. Any other norm, or one whose call is observed (`backend.observed`), is called as it stands and
    counted, and so it is for anything but two tensors of one shape.

    Args:
        hidden_states: `[N, H]`.
        residual: `[N, H]`.
        norm: the module that normalises the sum.
    """
    # A compiler fuses the sum with the norm and what is around both; of short calls the checks are the longest part.
    if (is_compiling() and backend.named_none()) or (type(norm) is nn.LayerNorm and is_launch_bound(hidden_states)):
        summed = residual + hidden_states
        return norm(summed), summed
    reason = _refusal(hidden_states, residual, norm)
    if reason is not None:
        backend.count_fallback("add_norm", reason)
        summed = residual + hidden_states
        return norm(summed), summed
    if type(norm) is nn.LayerNorm:
        return add_layer_norm(hidden_states, residual, norm.weight, norm.bias, norm.eps)
    if (of_torch := torch_rms_norm(norm)) is not None:
        return add_rms_norm(hidden_states, residual, *of_torch, weight_in_fp32=True)
    return norm.add_forward(hidden_states, residual)  # type: ignore[operator]


def _refusal(hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> str | None:
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
    if torch_rms_norm(norm) is not None:
        if not (hidden_states.is_contiguous() and residual.is_contiguous()):
            return "layout"  # torch's result is dense, whatever its input is
        return None if norm.normalized_shape == hidden_states.shape[-1:] else "normalized_shape"
    if not hasattr(kind, "add_forward"):
        return "norm_without_add_forward"
    return None if _stand_together(kind) else "forward_replaced"


def _stand_together(kind: type) -> bool:
    """Whether `forward` and `add_forward` are of one class: a subclass may replace `forward` alone."""
    owner = owner_of(kind, "forward")
    return owner is not None and "add_forward" in owner.__dict__
