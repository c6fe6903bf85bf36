"""Attention of one token a row inside what a file does with its heads: gates, norms and scales behind it stay there.

B rows, H heads, Dv head_dim of the values.
"""

from __future__ import annotations

from torch import Tensor

from ..cache.preallocated import PreallocatedCache
from ..core import prefill_context
from .decode_attention import decode_attention


def attend_step(
    query: Tensor,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return what `decode_attention` does, heads apart, as attention functions do: `[B, 1, H, Dv]`.

    Args:
        query: `[B, H, 1, D]`.
        past_key_values: a stepping cache that holds the token's own key and value.
        layer_idx: of its layer.
        scaling: of the scores.
        sliding_window: number of slots a token sees, itself included; None for all.
        softcap: bound of the scores; None for none.
        sinks: `[H]` logits that take part in the softmax and have no value; None for none.

    Raises:
        NoPromptForm: if a prompt is being read: behind its last layer a single row is left, which no gate would know.
    """
    prefill_context.refuse(past_key_values, "attend_step")
    attended = decode_attention(
        query, past_key_values, layer_idx, scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=sinks
    )
    return attended.unflatten(-1, (query.shape[1], -1))
