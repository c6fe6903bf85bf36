"""Latent attention in a decode step (multi-head latent attention, DeepSeek-V2, 2024): the cache is never expanded.

B rows of one token, H heads, L latent_rank, N, R and V columns of a head (not rotated, rotated, of values), p the
position of the token, S capacity:

    q = query projections of norm(x)          [H, N + R]
    c, k = kv_a_proj(norm(x))                 [L], [R]
    cache[p] = kv_norm(c), rotate(k)
    scores[h, s] = (U_hᵀ q[h, :N]) · c[s] + rotate(q[h, N:]) · k[s], times the scaling
    out[h] = W_h (softmax(scores)[h] c)       [V]

`kv_b_proj` has the rows of U_h and W_h, head by head; the kernels read them as they lie. It is the attention over keys
`cat(U_h c, k)` and values `W_h c`, with its sums in another order. A few rows take five kernels: the projections of
the hidden states, `latent_query`, two of `latent_decode`, and the caller's output projection; a second projection of
queries is one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..aiter import latent as aiter_latent
from ..cache.preallocated import PreallocatedCache
from ..core import backend
from ..core.prefill_context import refuse
from ..device.row_tiles import KERNEL_DTYPES
from ..linear import packing
from ..linear.block_linear import ScaledLinear, are_blocks, block_linear, is_block_linear
from ..linear.linear import before, few_rows, linear, takes_few_rows
from ..linear.prologue import prologue_of
from ..norms.norm_form import Prologue
from ..rope.rope_cache import Rotation
from ..rope.rotary import rotary
from .latent_decode import divide, launch_latent_decode
from .latent_query import HeadDims, Latents, Turn, launch_latent_query

MOST_RANK = 512
"""Of the latents: a program holds a row of them for 16 heads."""
MOST_COLUMNS = 256
"""Of a head, rotated or not."""


def latent_attention(
    hidden_states: Tensor,
    queries: Sequence[nn.Module],
    latents: tuple[nn.Module, nn.Module, nn.Module],
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: PreallocatedCache,
    *,
    layer_idx: int,
    head_dims: tuple[int, int, int],
    scaling: float,
    norm: nn.Module | None = None,
    interleaved: bool = False,
    half_table: bool = False,
    deinterleave: bool = False,
    in_fp32: bool = False,
    keep_dtype: bool = False,
) -> Tensor:
    """Attend with one token a row, whose latent and key are written at `past_key_values.position`.

    Args:
        hidden_states: `[B, 1, I]`.
        queries: the projection of the queries, or one, a norm, and another one.
        latents: the projection to latents and key, the latents' norm, and `kv_b_proj`.
        position_embeddings: cos and sin, each `[B or 1, 1, R]`, as `rotary` takes them; None for no rotation.
        past_key_values: a stepping cache.
        layer_idx: of its layer.
        head_dims: N, R and V.
        scaling: of the scores.
        norm: of the hidden states.
        interleaved, half_table, deinterleave, in_fp32, keep_dtype: see `rotary`.

    Returns:
        `[B, 1, H V]`.
    """
    refuse(past_key_values, "latent_attention")
    sizes, (down, kv_norm, up) = HeadDims(*head_dims), latents
    q, compressed = _projected(hidden_states, queries[0], down, norm)
    if len(queries) > 1:
        q = linear(q, queries[2], norm=queries[1])
    layer = past_key_values.layers[layer_idx]
    turn = Turn(None, deinterleave)
    if position_embeddings is not None:
        turn = Turn(Rotation(*position_embeddings, interleaved, half_table), deinterleave)
    reason = _reason_against(q, up)
    weight = None if reason is not None else _weight(up, q.dtype)
    if weight is not None and up.bias is None:
        pages = aiter_latent.joined(layer.keys, layer.values)
        if pages is not None and backend.nothing_watches(q) and not backend.wants_gradient(q):
            options = {
                "interleaved": interleaved, "half_table": half_table, "deinterleave": deinterleave, "in_fp32": in_fp32,
                "keep_dtype": keep_dtype,
            }  # fmt: skip
            token = _Token(q, compressed, kv_norm, up, weight, turn, sizes, position_embeddings, options)
            return _joined_step(token, pages, past_key_values, layer_idx, scaling)
    if weight is not None and _kernels_take(q, compressed, up, weight, layer, turn, sizes, in_fp32 or keep_dtype):
        kept = Latents(layer.keys, layer.values)
        latent, key, prologue = _normed(compressed, kv_norm, sizes)
        position = past_key_values.position
        brought = launch_latent_query(q, (latent, key), weight, prologue, kept, position, turn, sizes)
        division = divide(q.shape[0], brought[0].shape[1], kept.latents.shape[2], q.element_size())
        return launch_latent_decode(brought, kept, weight, position, past_key_values.starts, scaling, sizes, division)
    q, latent, key = _plainly(q, compressed, kv_norm, position_embeddings, sizes, {
        "interleaved": interleaved, "half_table": half_table, "deinterleave": deinterleave, "in_fp32": in_fp32,
        "keep_dtype": keep_dtype,
    })  # fmt: skip
    past_key_values.update(latent, key, layer_idx)
    visible = _visible(past_key_values)
    kept = Latents(layer.keys, layer.values)
    if weight is not None and up.bias is None:
        return absorbed_attention(q, kept, weight, visible, scaling, sizes)
    if reason is not None:
        backend.count_fallback("latent_attention", reason, up)
    return expanded_attention(q, kept, up, visible, scaling, sizes)


class _Token(NamedTuple):
    """What a step is made of: `latent_attention` up to where it writes."""

    q: Tensor
    compressed: Tensor
    kv_norm: nn.Module
    up: nn.Module
    weight: Tensor
    turn: Turn
    sizes: HeadDims
    position_embeddings: tuple[Tensor, Tensor] | None
    options: dict[str, Any]

    def brought(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return absorbed and turned queries, `[B, H, L]` and `[B, H, R]`, and latent and key, `[B, 1, 1, …]`."""
        q, sizes = self.q, self.sizes
        own = q.new_empty(q.shape[0], 1, 1, self.weight.shape[1]), q.new_empty(q.shape[0], 1, 1, sizes.rope)
        rounds = self.options["in_fp32"] or self.options["keep_dtype"]
        alone = SimpleNamespace(keys=own[0], values=own[1])
        if _kernels_take(q, self.compressed, self.up, self.weight, alone, self.turn, sizes, rounds):
            latent, key, prologue = _normed(self.compressed, self.kv_norm, sizes)
            first = torch.zeros(1, dtype=torch.int64, device=q.device)
            kept = Latents(*own)
            return launch_latent_query(q, (latent, key), self.weight, prologue, kept, first, self.turn, sizes), own
        q, *own_plain = _plainly(q, self.compressed, self.kv_norm, self.position_embeddings, sizes, self.options)
        ups = self.weight.view(-1, sizes.nope + sizes.value, self.weight.shape[1])[:, : sizes.nope]
        nope, rope = q.split([sizes.nope, sizes.rope], -1)
        return (torch.matmul(nope.transpose(0, 1), ups).transpose(0, 1), rope), (own_plain[0], own_plain[1])


def _joined_step(
    token: _Token, pages: Tensor, past_key_values: PreallocatedCache, layer_idx: int, scaling: float
) -> Tensor:
    """Attend where latents and keys lie in one memory: by aiter, else by torch's operators."""
    queries, written = token.brought()
    past_key_values.update(*written, layer_idx)
    mixed = aiter_latent.attend(queries, pages, past_key_values.position, past_key_values.starts, scaling)
    if mixed is None:
        mixed = aiter_latent.reference(*queries, pages, _visible(past_key_values), scaling)
    sizes, weight = token.sizes, token.weight
    values = weight.view(-1, sizes.nope + sizes.value, weight.shape[1])[:, sizes.nope :]
    return torch.matmul(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).reshape(mixed.shape[0], 1, -1)


def _reason_against(q: Tensor, up: nn.Module) -> str | None:
    """Return why the module has to be called for what it expands, a key of `packing.REASONS`."""
    if is_block_linear(up):
        return "observed" if backend.observed(up) else "gradient" if backend.wants_gradient(q) else None
    return packing.unsafe(q, (up,))


def _weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return a projection's weight; one with a scale for each block is dequantised for the call."""
    if isinstance(linear, ScaledLinear) and linear.is_intact():
        return linear.dense(dtype)
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight


def absorbed_attention(
    q: Tensor, kept: Latents, weight: Tensor, visible: Tensor, scaling: float, sizes: HeadDims
) -> Tensor:
    """Attend among latents.

    Args:
        q: `[B, H, N + R]`, rotated.
        kept: of the layer.
        weight: of `kv_b_proj`.
        visible: `[B, S]`, the slots that each row reads.
        scaling: of the scores.
        sizes: of a head.
    """
    ups, values = weight.view(-1, sizes.nope + sizes.value, weight.shape[1]).split([sizes.nope, sizes.value], 1)
    latents, keys = kept.latents.squeeze(1), kept.keys.squeeze(1)
    nope, rope = q.split([sizes.nope, sizes.rope], -1)
    absorbed = torch.matmul(nope.transpose(0, 1), ups).transpose(0, 1)
    scores = torch.matmul(absorbed, latents.transpose(1, 2)) + torch.matmul(rope, keys.transpose(1, 2))
    weights = _softmax(scores * scaling, visible[:, None])
    mixed = torch.matmul(weights.to(latents.dtype), _valid(latents, visible))
    return torch.matmul(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1).reshape(q.shape[0], 1, -1)


def expanded_attention(
    q: Tensor, kept: Latents, up: nn.Module, visible: Tensor, scaling: float, sizes: HeadDims
) -> Tensor:
    """Do what `absorbed_attention` does by a call of the module, whatever that is: keys and values of every slot."""
    latents, keys = _valid(kept.latents.squeeze(1), visible), kept.keys
    expanded = up(latents).view(*latents.shape[:2], -1, sizes.nope + sizes.value).transpose(1, 2)
    nope, values = expanded.split([sizes.nope, sizes.value], -1)
    own = torch.cat((nope, keys.expand(-1, nope.shape[1], -1, -1)), dim=-1)
    scores = torch.matmul(q.unsqueeze(2), own.transpose(2, 3)) * scaling
    weights = _softmax(scores, visible[:, None, None])
    return torch.matmul(weights.to(values.dtype), values).transpose(1, 2).reshape(q.shape[0], 1, -1)


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)


def _visible(cache: PreallocatedCache) -> Tensor:
    slots = torch.arange(cache.capacity, device=cache.position.device)
    return (slots <= cache.position) & (slots >= cache.starts[:, None])


def _valid(latents: Tensor, visible: Tensor) -> Tensor:
    """Return latents with zeros where nothing valid is: a slot that nothing has written may hold a NaN."""
    return latents.masked_fill(~visible.unsqueeze(-1), 0.0)


def _projected(
    hidden_states: Tensor, first: nn.Module, down: nn.Module, norm: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Return both projections of the normed hidden states, by one product where their weights can be one."""
    if are_blocks((first, down)):
        scaled = block_linear(hidden_states, (first, down), norm)
        if scaled is not None:
            q, compressed = scaled.split([part.out_features for part in (first, down)], -1)
            return q, compressed
    elif takes_few_rows(hidden_states):
        x, prologue = before(hidden_states, norm)
        parameters = packing.packed_parameters(x, (first, down))
        if isinstance(parameters, tuple) and parameters[0].dtype == x.dtype:
            weight, bias = parameters
            product = few_rows(x, weight, bias, prologue, None)
            if product is None:
                product = F.linear(x if prologue is None or norm is None else norm(x), weight, bias)
            rows = first.get_parameter("weight").shape[0]
            q, compressed = product.split([rows, product.shape[-1] - rows], -1)
            return q, compressed
    x = hidden_states if norm is None else norm(hidden_states)
    q, compressed = packing.packed_linear(x, first, down)
    return q, compressed


def _normed(compressed: Tensor, norm: nn.Module, sizes: HeadDims) -> tuple[Tensor, Tensor, Prologue | None]:
    """Return latents and key, and the latents' norm where the kernel computes it."""
    latent, key = compressed.split([compressed.shape[-1] - sizes.rope, sizes.rope], -1)
    prologue = prologue_of(norm)
    return (norm(latent), key, None) if prologue is None else (latent, key, prologue)


def _plainly(
    q: Tensor,
    compressed: Tensor,
    norm: nn.Module,
    position_embeddings: tuple[Tensor, Tensor] | None,
    sizes: HeadDims,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[B, H, N + R]`, latents `[B, 1, 1, L]` and keys `[B, 1, 1, R]` by torch's operators."""
    batch = q.shape[0]
    nope, rope = q.view(batch, 1, -1, sizes.nope + sizes.rope).transpose(1, 2).split([sizes.nope, sizes.rope], -1)
    latent, key = compressed.split([compressed.shape[-1] - sizes.rope, sizes.rope], -1)
    latent, key = norm(latent).view(batch, 1, 1, -1), key.view(batch, 1, 1, -1)
    if position_embeddings is not None:
        rope, key = rotary(rope, key, *position_embeddings, **options)
    return torch.cat((nope, rope), dim=-1).squeeze(2), latent, key


def _kernels_take(
    q: Tensor,
    compressed: Tensor,
    up: nn.Module,
    weight: Tensor,
    layer: Any,
    turn: Turn,
    sizes: HeadDims,
    rounds_to_input: bool,
) -> bool:
    latents, keys = layer.keys, layer.values
    if latents is None or up._parameters["bias"] is not None or q.dtype not in KERNEL_DTYPES:
        return False
    if not {compressed.dtype, latents.dtype, keys.dtype, weight.dtype} <= {q.dtype} or latents.shape[1] != 1:
        return False
    if not (latents.is_contiguous() and keys.is_contiguous() and weight.is_contiguous()):
        return False
    if latents.shape[3] > MOST_RANK or max(sizes) > MOST_COLUMNS or sizes.rope % 2:
        return False
    if q.stride(-1) != 1 or compressed.stride(-1) != 1 or not _turns(turn, q, sizes, rounds_to_input):
        return False
    return backend.nothing_watches(q) and not backend.wants_gradient(q) and backend.uses_triton(q)


def _turns(turn: Turn, q: Tensor, sizes: HeadDims, rounds_to_input: bool) -> bool:
    """Return whether the kernel reads these tables: one row or one a row of queries, all columns of the pairs."""
    rotation = turn.rotation
    if rotation is None:
        return True
    cos, sin = rotation.cos, rotation.sin
    alike = cos.shape == sin.shape and cos.stride() == sin.stride() and cos.dtype == sin.dtype
    of_rows = cos.dim() == 3 and cos.shape[1] == 1 and cos.shape[0] in (1, q.shape[0])
    return alike and of_rows and rotation.columns == sizes.rope and (cos.dtype == q.dtype or rounds_to_input)
