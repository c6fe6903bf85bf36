"""Attention of a prompt to itself, without a mask.

B rows, N tokens, H and Hk heads, D head_dim:

    out[b, t, h] = softmax(scaling q[b, h, t] · k[b, h Hk // H, :t + 1]) v[b, h Hk // H, :t + 1]
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .grouped_query import native_gqa


def prompt_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend to the first slots of a layer's cache, which hold the prompt's own keys and values.

    Args:
        query: `[B, H, N, D]`.
        keys, values: `[B, Hk, S, D]`, `[B, Hk, S, Dv]`, S >= N.
        scaling: of the scores.

    Returns:
        `[B, N, H Dv]`.
    """
    tokens = query.shape[2]
    keys, values = keys[:, :, :tokens], values[:, :, :tokens].to(query.dtype)
    module: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1], is_causal=True)
    out, _ = native_gqa(sdpa_attention_forward)(module, query, keys, values, None, scaling=scaling)
    return out.flatten(2)
