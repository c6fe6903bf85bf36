"""Attention of one new token a row to the valid slots of a preallocated cache.

B rows, H query heads, Hk key/value heads, G = H / Hk, S capacity, D and Dv head_dim of keys and values, p the position
of the token, W the window:

    row b reads slots s with starts[b] <= s <= p and, with a window, p - W < s
    scores = q kᵀ * scaling, then softcap * tanh(scores / softcap)
    weights = softmax over the slots, and over the sink logit of the head where there is one
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cache import PreallocatedCache


def decode_attention(
    query: Tensor,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the cache of one layer, which already holds the token's own key and value.

    Args:
        query: `[B, H, 1, D]`.
        past_key_values: a stepping cache.
        layer_idx: of its layer.
        scaling: of the scores.
        sliding_window: number of slots a token sees, itself included; None for all.
        softcap: bound of the scores; None for none.
        sinks: `[H]` logits that take part in the softmax and have no value; None for none.

    Returns:
        `[B, 1, H Dv]`.
    """
    layer = past_key_values.layers[layer_idx]
    return _reference(
        query, layer.keys, layer.values, past_key_values.position, past_key_values.starts, scaling,
        sliding_window, softcap, sinks,
    )  # fmt: skip


def _reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    starts: Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, _, _ = query.shape
    kv_heads, capacity = keys.shape[1:3]
    slots = torch.arange(capacity, device=keys.device)
    visible = (slots <= position) & (slots >= starts[:, None])
    if sliding_window is not None:
        visible = visible & (slots > position - sliding_window)
    visible = visible[:, None, None]
    grouped = query.view(batch, kv_heads, heads // kv_heads, -1)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf")).float()
    if sinks is not None:
        logits = sinks.view(1, kv_heads, -1, 1).expand(batch, -1, -1, -1).float()
        weights = torch.softmax(torch.cat([scores, logits], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    # A slot that nothing has written may hold anything, and 0 * NaN is NaN.
    values = values.masked_fill(~visible.squeeze(2).unsqueeze(-1), 0.0)
    return torch.matmul(weights.to(values.dtype), values).view(batch, 1, -1)
