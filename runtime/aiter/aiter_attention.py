"""aiter's flash attention, which takes and returns `[B, S, H, D]`: nothing is copied before the output projection.

B batch, S query length, T key length, H query heads, Hk key/value heads, D and Dv head_dim of keys and values, W
window. Causal attention is aligned with the last key (`bottom right`): query i sees keys up to T - S + i, and with a
window the last W of these. torch's `is_causal` is aligned with the first key (`top left`), which is the same where S
equals T, or once the keys are cut to the first S.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import aiter_calls
from .aiter_norms import DTYPES

MAX_HEAD_DIM = 256
LEAST = 0.01
"""Error against fp32 that aiter's own tests allow at least."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, causal: bool, window: int | None = None
) -> Tensor | None:
    """Return attention without a mask by aiter; None, with a counted reason, where another form is to run.

    Args:
        query: `[B, H, S, D]`, a view of `[B, S, H, D]` or of anything whose last dimension is dense.
        key: `[B, Hk, T, D]`, likewise.
        value: `[B, Hk, T, Dv]`, likewise.
        scaling: of the scores; None for `D ** -0.5`.
        causal: bottom right; a single query sees every key either way.
        window: W, itself included; without `causal` as many after it as before it. None for all keys.

    Returns:
        `[B, S, H, Dv]`, contiguous.
    """
    if not aiter_calls.chosen("attention", query):
        return None
    reason = _refusal(query, key, value)
    if reason is not None:
        aiter_calls.refuse("attention", reason)
        return None
    keywords = ("dropout_p", "softmax_scale", "causal", "window_size")
    function = aiter_calls.function("attention", "flash_attn_func", ("q", "k", "v"), keywords)
    if function is None:
        return None
    causal = causal and query.shape[2] > 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5

    def call(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor | None:
        sizes = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
        out: Any = function(
            *(x.transpose(1, 2) for x in (q, k, v)),
            dropout_p=0.0, softmax_scale=scale, causal=causal, window_size=sizes,
        )  # fmt: skip
        out = out[0] if isinstance(out, (tuple, list)) else out
        shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        return out.contiguous() if aiter_calls.is_result(out, shape, q) else None

    def proof() -> bool:
        return all(_holds(call, states, scale, causal, window) for states in _states_like(query, key, value))

    groups = query.shape[1] // key.shape[1]
    regime = "decode" if query.shape[2] == 1 else "short" if query.shape[2] <= 128 else "long"
    dims = f"head_dim {query.shape[-1]}/{value.shape[-1]}"
    variant = (query.dtype, query.device, dims, groups, causal, window is not None, regime)
    return aiter_calls.run("attention", query, variant, lambda: call(query, key, value, window), proof)


def _refusal(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return "dtype"
    if not query.numel() or not key.numel() or not value.numel():
        return "empty"
    dims = (query.shape[-1], value.shape[-1])
    if any(dim > MAX_HEAD_DIM or dim % 8 for dim in dims) or key.shape[-1] != dims[0]:
        return "head_dim"
    alike = query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3]
    if not alike or query.shape[1] % key.shape[1]:
        return "heads"
    return None if all(_readable(x) for x in (query, key, value)) else "layout"


def _readable(tensor: Tensor) -> bool:
    """Return whether rows of a head are dense and 16-byte aligned."""
    return tensor.stride(-1) == 1 and not tensor.data_ptr() % 16 and all(not s % 8 for s in tensor.stride()[:-1])


def _states_like(query: Tensor, key: Tensor, value: Tensor) -> list[list[Tensor]]:
    """Return queries, keys and values to prove a variant with: as many keys as queries, and more."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    length = 1 if length == 1 else 70 if length <= 128 else 200
    found = []
    for keys in (length, length + 61):
        shapes = [(2, length, 2 * groups, query.shape[-1]), (2, keys, 2, key.shape[-1]), (2, keys, 2, value.shape[-1])]
        found.append([x.transpose(1, 2) for x in aiter_calls.samples(query, *shapes)])
    return found


def _holds(call: Any, states: list[Tensor], scale: float, causal: bool, window: int | None) -> bool:
    """Return whether the kernel is as near to fp32 as twice torch in the same dtype, or as aiter's own tests ask."""
    window = None if window is None else min(window, 33)
    got = call(*states, window)
    if got is None:
        return False
    mask = visible(states[0].shape[2], states[1].shape[2], causal, window, got.device)
    groups = states[0].shape[1] // states[1].shape[1]
    query, key, value = states[0], *(x.repeat_interleave(groups, 1) for x in states[1:])
    scores = (query.float() @ key.float().transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    exact = (scores.softmax(-1) @ value.float()).transpose(1, 2)
    torchs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale).transpose(1, 2)
    own = (torchs.float() - exact).abs().max()
    error = (got.float() - exact).abs().max()
    return bool(torch.isfinite(got).all() & (error <= torch.clamp(2 * own, min=LEAST)))


def visible(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return `[queries, keys]`: whether a query sees a key, bottom right."""
    last = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= last
    return seen if window is None else seen & (key > last - window) & (key < last + window)
