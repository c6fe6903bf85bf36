"""Experts that are written as if every token took all of them, most with the weight zero: the others alone.

N tokens, E experts, K experts a token whose weight is not zero. A token times zero is zero, and so is what an expert
without biases makes of it, so that those rows need not be computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core import backend
from .experts import fused_experts, unsafe
from .form import form_of, gating


def chosen_experts(inputs: Tensor, experts: nn.Module, scores: Tensor, top_k: int) -> Tensor:
    """Return `experts(inputs)`, computed of the rows that are not zero where there are few tokens.

    Args:
        inputs: `[E N, H]`, the tokens times their weights for the first expert, then for the second, …
        experts: a module that computes the n-th N rows with its n-th expert, and whose class says so by `form()`.
        scores: `[N, E]`, of which at most K a row are not zero.
        top_k: K.
    """
    tokens = scores.shape[0]
    index = scores.new_empty(tokens * top_k, 1, dtype=torch.int64)
    whole = torch.ones(tokens * top_k, 1, dtype=inputs.dtype, device=inputs.device)
    form = form_of(experts)
    how = None if form is None else gating(form)
    reason = unsafe(inputs, experts, index, whole, None, form, how)
    if reason is not None or not backend.uses_triton(inputs):
        if reason is not None:
            backend.count_fallback("chosen_experts", reason, experts)
        output: Tensor = experts(inputs)
        return output
    index = scores.topk(top_k, dim=-1).indices
    rows = (index * tokens + torch.arange(tokens, device=index.device).unsqueeze(-1)).flatten()
    chosen = fused_experts(inputs.index_select(0, rows), experts, index.view(-1, 1), whole)
    return torch.zeros_like(inputs).index_copy(0, rows, chosen)
