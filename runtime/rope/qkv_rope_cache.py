"""Queries, keys and values of attention: norm, projections, head norms, rotary embedding, cache.

B rows, S tokens, T tokens that attention may read, H and Hk heads, D head_dim, I hidden_size:

    q, k, v = norm(x) [W_q; W_k; W_v]ᵀ + b
    query = rotate(q_norm(q))          key, value = cache.update(rotate(k_norm(k)), v)

In a decode step that is one kernel or two (`qkv_step`), and in a prompt that is read in a graph likewise; everywhere
else these are the operators of the formula, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.preallocated import is_decode_step
from ..core import backend
from ..core.probe import asked
from ..linear.packing import packed_linear
from ..norms.sum_norm import normed
from .head_norms import split_heads
from .qkv_step import qkv_step
from .rotary import RotaryForm, rotary

Multiply = Callable[..., Sequence[Tensor]]
Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def qkv_rope_cache(
    hidden_states: Tensor,
    projections: Sequence[nn.Module],
    position_embeddings: tuple[Tensor, Tensor] | None,
    cache: Any,
    layer_idx: int,
    *,
    head_dim: int,
    num_key_value_heads: int | None = None,
    norm: nn.Module | None = None,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
    update: Mapping[str, Any] | None = None,
    rotate: Rotate = rotary,
    partial: bool = False,
    heads_first: bool = False,
    multiply: Multiply = packed_linear,
    step: Callable[..., Tensor] = qkv_step,
    **rotation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries, and the keys and values that they attend to.

    Args:
        hidden_states: `[B, S, I]`.
        projections: `(q, k, v)`, or one whose output is all queries, then all keys, then all values.
        position_embeddings: cos and sin, each `[B or 1, S, R]`, as `rotary` takes them; None for no rotation.
        cache: one of transformers' caches, or None: then the keys and values are those of the S tokens.
        layer_idx: of its layer.
        head_dim: D.
        num_key_value_heads: Hk; needed with one projection.
        norm: of the hidden states.
        q_norm: of the queries before rotation, over each head or over all of them, as its weight says.
        k_norm: of the keys, likewise.
        update: what the cache is given besides, by keyword.
        rotate: the file's function of `(query, key, cos, sin)`, heads before tokens.
        partial: whether it is given the first R columns alone.
        heads_first: whether the norms of queries and keys are given `[B, H, S, D]`.
        multiply: computes the products; `packed_linear`, or what reads weights in 8 bits.
        step: computes a decode step; likewise.
        rotation: without `rotate`, `interleaved`, `half_table`, `in_fp32`, `keep_dtype`, `chunked`: see `rotary`.

    Returns:
        `[B, H, S, D]`, and twice `[B, Hk, T, D]`. In a decode step those are the buffers of the cache, whose slots
        attention has to choose (`cached_attention`).
    """
    if is_decode_step(cache) and (form := _form(position_embeddings, rotate, rotation)) is not None:
        tables, options = form
        query = step(
            hidden_states, projections, tables, cache, layer_idx, head_dim=head_dim,
            num_key_value_heads=num_key_value_heads, norm=norm, q_norm=q_norm, k_norm=k_norm, **options,
        )  # fmt: skip
        layer = cache.layers[layer_idx]
        return query, layer.keys, layer.values
    if norm is not None:
        hidden_states = normed(hidden_states, norm)
    if len(projections) == 3 and not heads_first and backend.are_watched((*projections, q_norm, k_norm)):
        backend.count_fallback("packed_linear", "observed", projections[0])
        query, key, value = (
            split_heads(projection(hidden_states), head_norm, head_dim)
            for projection, head_norm in zip(projections, (q_norm, k_norm, None), strict=True)
        )
    else:
        q, k, v = _projected(hidden_states, projections, head_dim, num_key_value_heads, multiply)
        query, key, value = (
            split_heads(q, q_norm, head_dim, heads_first),
            split_heads(k, k_norm, head_dim, heads_first),
            split_heads(v, None, head_dim),
        )
    if position_embeddings is not None:
        query, key = _rotated(query, key, *position_embeddings, rotate, partial, rotation)
    if cache is not None:
        key, value = cache.update(key, value, layer_idx, **(update or {}))
    return query, key, value


def _form(
    tables: tuple[Tensor, Tensor] | None, rotate: Rotate, rotation: Mapping[str, bool]
) -> tuple[tuple[Tensor, Tensor] | None, Mapping[str, bool]] | None:
    """Return the tables and options of a rotation as `qkv_step` takes them; None where it does something else."""
    if tables is None or rotate is rotary:
        return tables, rotation
    found = asked(lambda one: rotate(one, one, *tables), RotaryForm)
    if found is None or found.options is None:
        return None
    return (found.cos, found.sin), found.options


def _rotated(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotate: Rotate,
    partial: bool,
    rotation: Mapping[str, bool],
) -> tuple[Tensor, Tensor]:
    if rotate is rotary:
        return rotary(query, key, cos, sin, partial=True, **rotation)
    if not partial:
        return rotate(query, key, cos, sin)
    columns = cos.shape[-1]
    turned = rotate(query[..., :columns], key[..., :columns], cos, sin)
    query, key = (torch.cat((t, x[..., columns:]), dim=-1) for t, x in zip(turned, (query, key), strict=True))
    return query, key


def _projected(
    hidden_states: Tensor,
    projections: Sequence[nn.Module],
    head_dim: int,
    num_key_value_heads: int | None,
    multiply: Multiply,
) -> Sequence[Tensor]:
    """Return queries, keys and values `[B, S, H D]` and twice `[B, S, Hk D]`."""
    if len(projections) > 1:
        return multiply(hidden_states, *projections)
    if num_key_value_heads is None:
        raise TypeError("one projection for queries, keys and values needs num_key_value_heads")
    packed = projections[0](hidden_states) if multiply is packed_linear else multiply(hidden_states, *projections)[0]
    kv_size = num_key_value_heads * head_dim
    parts: Sequence[Tensor] = packed.split([packed.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    return parts
