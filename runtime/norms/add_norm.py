"""`residual = residual + hidden_states; hidden_states = norm(residual)`, for a norm known only at run time."""

from __future__ import annotations

import torch
from torch import nn

from ..core import backend
from .add_layer_norm import add_layer_norm

OFFERS: dict[str, dict[str, str]] = {
    "add_norm": {
        "shapes": "[N, H], [N, H] -> ([N, H], [N, H])",
        "computes": """
def add_norm(hidden_states, residual, norm):
    summed = residual + hidden_states
    return norm(summed), summed
""",
        "fp8_rows": "fp8.fp8_add_norm",
    },
}


def add_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(norm(summed), summed)` with `summed = residual + hidden_states`, in one kernel if the norm allows it.

    A norm takes part if it is `torch.nn.LayerNorm` over one dimension or has a method
    `add_forward(hidden_states, residual) -> (normed, summed)`, which rewritten RMSNorm classes have. Any other norm,
    or one whose call is observed (`backend.observed`), is called as it stands and counted.

    Args:
        hidden_states: `[N, H]`.
        residual: `[N, H]`.
        norm: the module that normalises the sum.
    """
    reason = _refusal(hidden_states, residual, norm)
    if reason is not None:
        backend.count_fallback("add_norm", reason)
        summed = residual + hidden_states
        return norm(summed), summed
    if type(norm) is nn.LayerNorm:
        return add_layer_norm(hidden_states, residual, norm.weight, norm.bias, norm.eps)
    return norm.add_forward(hidden_states, residual)  # type: ignore[operator]


def _refusal(hidden_states: torch.Tensor, residual: torch.Tensor, norm: nn.Module) -> str | None:
    if backend.observed(norm):
        return "norm_observed"
    if hidden_states.shape != residual.shape:
        return "shapes_differ"
    if type(norm) is nn.LayerNorm:
        return None if len(norm.normalized_shape) == 1 else "normalized_shape"
    return None if hasattr(type(norm), "add_forward") else "norm_without_add_forward"
