"""The first half of attention in a decode step: norm, projections, query and key norms, rotary embedding, cache write.

B rows of one token, H and Hk heads, D head_dim, I hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from .cache import PreallocatedCache
from .packing import packed_linear
from .rotary import rotary


def qkv_step(
    hidden_states: Tensor,
    projections: Sequence[nn.Module],
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    head_dim: int,
    num_key_value_heads: int | None = None,
    norm: nn.Module | None = None,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
    interleaved: bool = False,
    half_table: bool = False,
    in_fp32: bool = False,
    keep_dtype: bool = False,
) -> Tensor:
    """Project one token a row, write its key and value at `past_key_values.position`, return its rotated query.

    Args:
        hidden_states: `[B, 1, I]`.
        projections: `(q, k, v)`, or one whose output is all queries, then all keys, then all values.
        position_embeddings: cos and sin, each `[B or 1, 1, R]`, as `rotary` takes them; None for no rotation.
        past_key_values: a stepping cache.
        layer_idx: of its layer.
        head_dim: D.
        num_key_value_heads: Hk; needed with one projection.
        norm: of the hidden states.
        q_norm: of the queries before rotation, over each head or over all of them, as its weight says.
        k_norm: of the keys, likewise.
        interleaved, half_table, in_fp32, keep_dtype: see `rotary`.

    Returns:
        `[B, H, 1, D]`.
    """
    if norm is not None:
        hidden_states = norm(hidden_states)
    if len(projections) == 1:
        if num_key_value_heads is None:
            raise TypeError("one projection for queries, keys and values needs num_key_value_heads")
        packed: Tensor = projections[0](hidden_states)
        kv_size = num_key_value_heads * head_dim
        q, k, v = packed.split([packed.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    else:
        q, k, v = packed_linear(hidden_states, *projections)
    query, key = _heads(q, q_norm, head_dim), _heads(k, k_norm, head_dim)
    if position_embeddings is not None:
        cos, sin = position_embeddings
        query, key = rotary(
            query,
            key,
            cos,
            sin,
            interleaved=interleaved,
            half_table=half_table,
            in_fp32=in_fp32,
            keep_dtype=keep_dtype,
        )
    past_key_values.update(key, _heads(v, None, head_dim), layer_idx)
    return query


def _heads(x: Tensor, norm: nn.Module | None, head_dim: int) -> Tensor:
    """Split `[B, 1, H D]` into `[B, H, 1, D]` and normalise over a head, or over all where the norm is that wide."""
    shape = (*x.shape[:-1], -1, head_dim)
    if norm is None:
        return x.view(shape).transpose(1, 2)
    weight = getattr(norm, "weight", None)
    over_all = isinstance(weight, Tensor) and weight.numel() == x.shape[-1]
    normed: Tensor = norm(x).view(shape) if over_all else norm(x.view(shape))
    return normed.transpose(1, 2)
