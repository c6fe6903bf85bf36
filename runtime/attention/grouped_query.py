"""Grouped-query attention without expanded keys and values (Ainslie et al., 2023).

B batch, S query length, T key length, H query heads, Hk key/value heads, G = H / Hk query heads a group, D head_dim.
Query head h reads key/value head h // G. transformers copies each key and value G times (`repeat_kv`) wherever a mask
is given; here the group moves into a dimension that the keys do not have:

    few queries      [B, Hk, G S, D] against [B, Hk, T, D]: the group becomes part of the query length
    one sequence     [G, Hk, S, D] against [1, Hk, T, D]: keys broadcast over the group with stride 0
    cuDNN            takes grouped keys and a mask as they are, and is the fastest where it runs

Without a mask, torch's own kernels share keys and values; on AMD's chips aiter's flash attention runs instead, where
it is installed. What was named or measured (`backends`) goes before all of these. Queries, keys and values come as
`[B, H, S, D]` views of `[B, S, H, D]`, which is how the result lies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..aiter import aiter_attention, aiter_calls
from ..aiter import flash as aiter_flash
from ..core import backend, lazy_hooks
from ..guards.provenance import is_intact
from . import backends
from .named_backends import is_named

Attention = Callable[..., tuple[Tensor, Tensor | None]]

FOLD_LENGTH = 64
_DEVICES = frozenset({"cpu", "cuda"})


def native_gqa(interface: Attention) -> Attention:
    """Return the attention function to call in place of `interface`.

    That is ours for transformers' own `sdpa_attention_forward`, with the same arguments and result, where that calls
    torch's own functions, and on an AMD GPU
    with aiter for `flash_attention_forward`; `interface` itself for anything else.
    """
    if interface is flash_attention.flash_attention_forward and aiter_calls.candidate("attention"):
        return aiter_flash.forward
    return _sdpa if interface is sdpa_attention_forward and is_intact(interface) else interface


def is_sdpa(interface: Attention) -> bool:
    """Return whether an attention function is transformers' of that name, or the one that stands for it here."""
    return interface is _sdpa or interface is sdpa_attention_forward


@functools.wraps(sdpa_attention_forward)
def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    groups = getattr(module, "num_key_value_groups", 1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (name := backends.choose(query, key, value, attention_mask, causal)) is not None:
        reason = "s_aux" if kwargs.get("s_aux") is not None else _refusal(groups, query, key, dropout, kwargs)
        if reason is None:
            return _by_name(name, query, key, value, attention_mask, scaling, causal), None
        backend.count_fallback("attention_backend", reason)
    if aiter_calls.candidate("attention"):
        reason = _aiter_refusal(query, key, value, attention_mask, dropout, kwargs)
        if reason is None:
            return _flash_op(query, key, value, scaling, causal and query.shape[2] > 1), None
        aiter_calls.refuse("attention", reason)
    if groups == 1 or (attention_mask is None and key.shape[-1] == value.shape[-1] <= 256) or backend.composes():
        reason = None  # transformers expands nothing here, or a compiler sees to it
    else:
        reason = _refusal(groups, query, key, dropout, kwargs)
        if reason is None:
            if backend.wants_gradient(query, key, value, attention_mask):
                return _grouped(query, key, value, attention_mask, scaling, causal), None
            return _op(query, key, value, attention_mask, scaling, causal), None
        backend.count_fallback("native_gqa", reason)
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def _refusal(groups: int, query: Tensor, key: Tensor, dropout: float, kwargs: dict[str, Any]) -> str | None:
    if dropout:
        return "dropout"
    for name in ("position_bias", "cache", "softcap", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            return name
    if query.device.type not in _DEVICES:
        return "device"
    if query.shape[0] != key.shape[0] or query.shape[1] != key.shape[1] * groups:
        return "shape"
    return None


def _aiter_refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> str | None:
    """Return why a call cannot go through the operator that asks aiter, a key of `aiter_calls.REASONS`."""
    if mask is not None:
        return "mask"
    if dropout:
        return "dropout"
    if backend.wants_gradient(query, key, value):
        return "gradient_wanted"
    if any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        return "softcap"
    if kwargs.get("cache") is not None or kwargs.get("output_attentions"):
        return "layout"
    heads = query.shape[1] % key.shape[1] or query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]
    if heads:
        return "heads"
    return "head_dim" if max(query.shape[-1], value.shape[-1]) > aiter_attention.MAX_HEAD_DIM else None


def _flash(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, is_causal: bool) -> Tensor:
    """Attend without a mask, by aiter or as torch does; `is_causal` as torch has it. The result is `[B, S, H, Dv]`."""
    if is_causal and key.shape[2] > query.shape[2]:  # what a prefill into an empty static cache sees
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    if is_causal and key.shape[2] < query.shape[2]:
        aiter_calls.refuse("attention", "more_queries_than_keys")
    elif query.shape[2] == 1 and backend.get_backend() == "auto":
        aiter_calls.refuse("attention", "single_query")
    else:
        out = aiter_attention.attend(query, key, value, scaling=scaling, causal=is_causal)
        if out is not None:
            return out
    if key.shape[-1] != value.shape[-1]:
        return _grouped(query, key, value, None, scaling, is_causal)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=is_causal, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def _by_name(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
) -> Tensor:
    """Attend by a backend of `backends`; the result is `[B, S, H, Dv]`."""
    if backend.wants_gradient(query, key, value, mask):
        return _named(query, key, value, mask, scaling, is_causal, name)
    attended: Tensor = _named_op(query, key, value, mask, scaling, is_causal, name)
    return attended


def _named(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    name: str,
) -> Tensor:
    out = backends.attend(name, query, key, value, mask, scaling, is_causal)
    if out is not None:
        return out.transpose(1, 2).contiguous()
    backend.count_fallback("attention_backend", f"{name}_refuses")
    if query.shape[1] != key.shape[1]:
        return _grouped(query, key, value, mask, scaling, is_causal)
    causal = is_causal and mask is None and query.shape[2] > 1
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=causal)
    return out.transpose(1, 2).contiguous()


def _grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
) -> Tensor:
    """Attend with `query` `[B, H, S, D]` to `key`, `value` `[B, Hk, T, D]`; the result is `[B, S, H, D]`.

    Several sequences of more than `FOLD_LENGTH` queries, where cuDNN does not take them, copy the keys after all: that
    beats every form without the copy (4 x 512 queries: 195 µs against 214 and more; H100, torch 2.11, cuDNN off).
    """
    batch, heads, length, _ = query.shape
    causal = length > 1 and mask is None and is_causal
    if causal and key.shape[2] > length:  # prefill into an empty static cache
        key, value = key[:, :, :length], value[:, :, :length]
    if _cudnn_takes(query, key, value, mask, causal):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, is_causal=causal, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()
    groups = heads // key.shape[1]
    if length == 1 or (length <= FOLD_LENGTH and batch > 1 and not causal):
        return _folded(query, key, value, mask, scaling, groups)
    if batch > 1:
        backend.count_fallback("native_gqa", "copying_is_faster")
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=causal)
        return out.transpose(1, 2).contiguous()
    if mask is not None and mask.shape[1] != 1:
        mask = mask[0].unflatten(0, (-1, groups)).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        query[0].unflatten(0, (-1, groups)).transpose(0, 1),
        key.expand(groups, -1, -1, -1),
        value.expand(groups, -1, -1, -1),
        attn_mask=mask,
        scale=scaling,
        is_causal=causal,
    )
    return out.permute(2, 1, 0, 3).flatten(1, 2).contiguous().unsqueeze(0)


def _folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    groups: int,
) -> Tensor:
    """Attend with the group as part of the query length: the mask is repeated, which is small for few queries."""
    batch, heads, length, _ = query.shape
    if mask is not None:
        if mask.shape[1] != 1:
            mask = mask.unflatten(1, (-1, groups)).flatten(2, 3)
        elif length > 1:
            mask = mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        query.unflatten(1, (-1, groups)).flatten(2, 3), key, value, attn_mask=mask, scale=scaling
    )
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2).contiguous()


def _cudnn_takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Return whether cuDNN attends to grouped keys with a mask: torch's other fused kernels refuse that pair.

    torch.compile cannot trace the question: it sees one operator, except where gradients are wanted.
    """
    if not query.is_cuda or torch.version.hip is not None or torch.compiler.is_compiling():
        return False
    parameters = torch.backends.cuda.SDPAParams(query, key, value, mask, 0.0, causal, True)
    return torch.backends.cuda.can_use_cudnn_attention(parameters, False)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


def _named_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    name: str,
) -> Tensor:
    return _fake(query, key, value, mask, scaling, is_causal)


def _flash_fake(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, is_causal: bool) -> Tensor:
    return _fake(query, key, value, None, scaling, is_causal)


_flash_op = backend.register(
    "flash_attention",
    "(Tensor query, Tensor key, Tensor value, float? scaling, bool is_causal) -> Tensor",
    _flash,
    _flash_fake,
)

_named_op = backend.register(
    "attention_by_name",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scaling, bool is_causal, str name) -> Tensor",
    _named,
    _named_fake,
)

_op = backend.register(
    "grouped_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scaling, bool is_causal) -> Tensor",
    _grouped,
    _fake,
)


def grouped_matmul(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Return `left @ repeat_kv(right, groups)` without the copy that `repeat_kv` makes.

    Args:
        left: `[B, H, S, K]`, with query head h reading `right` head h // groups.
        right: `[B, Hk, K, M]`, H = Hk groups.
        groups: how often each head of `right` is repeated.

    Returns:
        `[B, H, S, M]`. Differentiable; equal to the expanded product up to the order of the sums. Operands of other
        shapes, which torch may broadcast, are multiplied after the copy. A compiler is given the original's product.
    """
    if groups == 1:
        return torch.matmul(left, right)
    four = left.dim() == right.dim() == 4
    if not four or left.shape[0] != right.shape[0] or left.shape[1] != right.shape[1] * groups:
        backend.count_fallback("grouped_matmul", "shape")
        return torch.matmul(left, right.repeat_interleave(groups, dim=1))
    if backend.composes():
        if right.stride(-1) != 1:  # a view of keys: what is copied is what lies in memory
            return torch.matmul(left, _repeated_view(right.transpose(2, 3), groups).transpose(2, 3))
        return torch.matmul(left, _repeated_view(right, groups))
    batch, heads, length, inner = left.shape
    folded = left.reshape(batch, right.shape[1], groups * length, inner)
    return torch.matmul(folded, right).view(batch, heads, length, right.shape[-1])


def _repeated_view(tensor: Tensor, groups: int) -> Tensor:
    """Return `[B, H, N, M]` of `[B, Hk, N, M]`, by functions that a compiler takes into the product."""
    batch, kv_heads, rows, cols = tensor.shape
    return tensor[:, :, None].expand(batch, kv_heads, groups, rows, cols).reshape(batch, kv_heads * groups, rows, cols)


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    key_groups: int = 1,
    value_groups: int = 1,
) -> Tensor:
    """Return torch's `scaled_dot_product_attention` of keys and values with repeated heads, without repeating them.

    Args:
        query: `[B, H, S, D]`, with query head h reading head h // key_groups of `key`.
        key: `[B, Hk, T, D]`, H = Hk key_groups.
        value: `[B, Hv, T, Dv]`, H = Hv value_groups.
        attn_mask, dropout_p, is_causal, scale: as torch has them.
        key_groups, value_groups: how often each head of `key` and of `value` is repeated.

    Returns:
        `[B, H, S, Dv]`. Differentiable; equal to the expanded attention up to the order of the sums. Where heads
        cannot be shared, they are repeated; `explain` says why.
    """
    if key_groups == value_groups == 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if (
        key_groups == value_groups and lazy_hooks.defers() and not (dropout_p or is_causal)
    ):  # a step has a kernel for it
        return F.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale, enable_gqa=True)
    reason = _not_shared(query, key, value, attn_mask, dropout_p, is_causal, key_groups, value_groups)
    if reason is not None or (backend.composes() and not is_named()):
        if reason is not None:
            backend.count_fallback("grouped_attention", reason)
        key, value = _repeated(key, key_groups), _repeated(value, value_groups)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:2], query.shape[2], key.shape[2])
    if (name := backends.choose(query, key, value, attn_mask, is_causal)) is not None:
        return _by_name(name, query, key, value, attn_mask, scale, is_causal).transpose(1, 2)
    attend = _grouped if backend.wants_gradient(query, key, value, attn_mask) else _op
    attended: Tensor = attend(query, key, value, attn_mask, scale, is_causal)
    return attended.transpose(1, 2)


def _not_shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    key_groups: int,
    value_groups: int,
) -> str | None:
    """Return why an attention repeats heads after all."""
    if dropout:
        return "dropout"
    if key_groups != value_groups:
        return "groups"
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if any(tensor.dim() != 4 for tensor in tensors):
        return "shape"
    if query.device.type not in _DEVICES:
        return "device"
    if key.shape[:3] != value.shape[:3] or query.shape[:2] != (key.shape[0], key.shape[1] * key_groups):
        return "shape"
    if is_causal and (mask is not None or query.shape[2] == 1):  # an error, and a row that reads the first key alone
        return "is_causal"
    return None


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)
