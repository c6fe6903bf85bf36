"""The first half of attention in a decode step with weights in 8 bits: `qkv_step`, its product as of `fp8_linear`.

Two kernels for up to 16 rows: norm and product; query and key norms, rotary embedding and cache write (`rope_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..cache.preallocated import PreallocatedCache
from ..core.prefill_context import refuse
from ..rope.qkv_step import projected_step, qkv_step
from .fp8_linear import fp8_affine
from .fp8_weights import quantized


def fp8_qkv_step(
    hidden_states: Tensor,
    projections: Sequence[nn.Module],
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    head_dim: int,
    num_key_value_heads: int | None = None,
    norm: nn.Module | None = None,
    **options: Any,
) -> Tensor:
    """Project one token a row with weights in 8 bits, write its key and value, return its rotated query.

    Arguments and result as of `qkv_step`, which runs where the weights cannot be quantised.
    """
    refuse(past_key_values, "fp8_qkv_step")  # whose weights in 8 bits are those of few rows
    found = quantized("fp8_qkv_step", hidden_states, projections, norm=norm)
    if found is None:
        return qkv_step(
            hidden_states, projections, position_embeddings, past_key_values, layer_idx, head_dim=head_dim,
            num_key_value_heads=num_key_value_heads, norm=norm, **options,
        )  # fmt: skip
    kv_heads = num_key_value_heads
    if len(projections) > 1:
        kv_heads = int(projections[1].out_features) // head_dim  # type: ignore[arg-type]
    if kv_heads is None:
        raise TypeError("one projection for queries, keys and values needs num_key_value_heads")
    packed = fp8_affine(hidden_states, *found, norm=norm)
    return projected_step(
        packed, position_embeddings, past_key_values, layer_idx, head_dim=head_dim, num_key_value_heads=kv_heads,
        **options,
    )  # fmt: skip
