"""transformers' `flash_attention_2` by aiter, for calls that its dense kernel can take: windows and longer keys too.

What the modeling file passes is what flash-attn would get: no mask where nothing is padded, the window as a number,
and causality aligned with the last key. Padding, packed sequences, sinks, caps and paged caches are for transformers'
own function.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations import flash_attention

from ..core import backend
from ..guards.tensor_version import version_of
from . import aiter_attention, aiter_calls

_NOT_DENSE = ("cu_seq_lens_q", "cu_seq_lens_k", "block_table", "k_cache", "cache")
_in_order: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.wraps(flash_attention.flash_attention_forward)
def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with `[B, H, S, D]` views; the result is `[B, S, H, D]`."""
    reason = _refusal(query, key, value, attention_mask, dropout, {**kwargs, "softcap": softcap})
    if reason is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        window = sliding_window if sliding_window is not None and key.shape[2] > sliding_window else None
        out = aiter_attention.attend(query, key, value, scaling=scaling, causal=causal, window=window)
        if out is not None:
            return out, None
    else:
        aiter_calls.refuse("attention", reason)
    return flash_attention.flash_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        is_causal=is_causal,
        **kwargs,
    )


def _refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    if torch.compiler.is_compiling():
        return "compiled"
    if mask is not None:
        return "mask"
    if dropout:
        return "dropout"
    if backend.wants_gradient(query, key, value):
        return "gradient_wanted"
    if any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        return "softcap"
    if any(kwargs.get(name) is not None for name in _NOT_DENSE) or _packed(query, kwargs.get("position_ids")):
        return "packed_sequences"
    return None


def _packed(query: Tensor, position_ids: Tensor | None) -> bool:
    """Return whether one row may hold several sequences, whose positions start anew.

    transformers asks the device in every layer; here it is asked once for a tensor, and not during a capture.
    """
    if position_ids is None or query.shape[0] != 1 or position_ids.shape[-1] == 1:
        return False
    version = version_of(position_ids)
    known = _in_order.get(position_ids)
    if known is not None and version is not None and known[0] == version:
        return not known[1]
    if aiter_calls.capturing():
        return True
    in_order = bool((position_ids[..., 1:] - position_ids[..., :-1] == 1).all())
    _in_order[position_ids] = (version, in_order)
    return not in_order
