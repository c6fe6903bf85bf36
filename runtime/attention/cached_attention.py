"""An attention function of transformers where keys and values may be the buffers of a preallocated cache.

B rows, H and Hk heads, S capacity, D and Dv head_dim of keys and values. In a decode step `cache.update` and
`qkv_rope_cache` give back buffers of which the slots up to the token's own are valid, and a model makes no mask. Then
attention is `decode_attention`, which reads those slots alone. Keys or values that something else was made of are
attended to by the function itself, with a mask that hides the other slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.preallocated import PreallocatedCache, is_decode_step
from ..core import prefill_context
from .decode_attention import decode_attention
from .grouped_query import is_sdpa

Attention = Callable[..., tuple[Tensor, Tensor | None]]

_CHANGES = ("position_bias", "cache", "head_mask")
"""Keywords that would change what attention computes, and that the step's does not know."""


def cached_attention(
    interface: Attention, cache: Any, layer_idx: int, *, sliding_window: int | None = None
) -> Attention:
    """Return the attention function to call in place of `interface`, with the same arguments and results.

    Args:
        interface: one of transformers' attention functions, or the file's own.
        cache: that holds the keys and values.
        layer_idx: of its layer.
        sliding_window: of the mask, where the call is not told it: number of slots a token sees, itself included.
    """
    if not is_decode_step(cache):
        return interface
    return partial(_attend, interface, cache, layer_idx, sliding_window)


def _attend(
    interface: Attention,
    cache: PreallocatedCache,
    layer_idx: int,
    window: int | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    layer = cache.layers[layer_idx]
    window = kwargs.get("sliding_window") if window is None else window
    is_whole = (
        key is layer.keys and value is layer.values and not any(kwargs.get(name) is not None for name in _CHANGES)
    )
    if attention_mask is None and is_whole and not kwargs.get("dropout"):
        scaling = kwargs.get("scaling")
        known = not is_sdpa(interface)  # which leaves them out
        prompt = prefill_context.of(cache)
        tokens = query.shape[2]
        if prompt is not None and prompt.is_last(layer_idx):  # behind it, only the last token's row is read
            query = prompt.of_last(query, 2)
        attended = decode_attention(
            query, cache, layer_idx, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=window, softcap=kwargs.get("softcap") if known else None,
            sinks=kwargs.get("s_aux") if known else None,
        )  # fmt: skip
        return attended.unflatten(-1, (query.shape[1], -1)).expand(-1, tokens, -1, -1), None
    if attention_mask is None and prefill_context.of(cache) is None:
        attention_mask = _mask(cache, key.shape[2], window, query.dtype)
    return interface(module, query, key, value, attention_mask, **kwargs)


def _mask(cache: PreallocatedCache, slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of a token `[B, 1, 1, S]`: nothing where its slot is one that it may see."""
    slot = torch.arange(slots, device=cache.position.device)
    seen = (slot <= cache.position) & (slot >= cache.starts[:, None])
    if window is not None:
        seen = seen & (slot > cache.position - window)
    hidden = torch.finfo(dtype).min
    return torch.where(seen, 0.0, hidden).to(dtype)[:, None, None]
