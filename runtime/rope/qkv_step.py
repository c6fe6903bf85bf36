"""The first half of attention in a decode step: norm, projections, query and key norms, rotary embedding, cache write.

B rows of one token, H and Hk heads, D head_dim, I hidden_size, p the position of the token:

    q, k, v = norm(x) [W_q; W_k; W_v]ᵀ + b
    query = rotate(q_norm(q))          keys[:, :, p] = rotate(k_norm(k))          values[:, :, p] = v

One row without query and key norms is one kernel, in which a program computes pairs of columns and rotates them; 2 to
32 rows are one likewise (`qkv_batch`). Everything else is the product and `rope_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..cache.fp8_layer import Fp8Layer
from ..cache.preallocated import PreallocatedCache
from ..core import backend, prefill_context
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import Kernel, overlaps
from ..launching.tiles import Tile
from ..linear import packing
from ..linear.block_linear import are_blocks, block_linear
from ..linear.linear import before, few_rows, is_one_row, takes_few_rows, tile_for
from ..linear.prologue import LayerNormPrologue, Norm, norm_arguments, several_rows_norm, shift_of
from ..norms.sum_norm import normed
from .head_norms import head_norms, over_one_head, split_heads
from .qkv_batch import form_for_rows, launch_qkv_rows
from .qkv_prefill import has_dense_rows, qkv_prompt
from .rope_cache import Rotation, rope_cache, turning, writable
from .rotary import rotary

CASES = """
def qkv(model, columns, norm=prologue, **form):
    weight = tensor((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden_size)
    table = columns // 2 if form.get("half_table") else columns
    rotation = Rotation(tensor(1, 1, table), tensor(1, 1, table), **form)
    tile = tile_for("qkv", model.head_dim // 2, model.hidden_size, weight)
    x = tensor(1, 1, model.hidden_size)
    return launch_qkv(x, weight, None, norm(model.hidden_size), *cache(model, 1, CONTEXT), int64(1), rotation, tile)

for model in LLAMAS:
    case(model.name, qkv, model, model.head_dim)
case("8B, LayerNorm", qkv, LLAMA_8B, 128, layer_norm)
case("1B, 32 columns", qkv, LLAMA_1B, 32, interleaved=True, half_table=True)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.gemv import normalised, scaled, statistics
    from .rope_cache import pair_columns, rotated, store_pairs

    @triton.jit(do_not_specialize=["capacity"])
    def _qkv_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        shift_ptr,
        weight_ptr,
        bias_ptr,
        cos_ptr,
        sin_ptr,
        position_ptr,
        query_ptr,
        keys_ptr,
        values_ptr,
        capacity,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        H: tl.constexpr,
        HK: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        CENTRED: tl.constexpr,
        SHIFT: tl.constexpr,
        BIAS: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        per_head: tl.constexpr = D // 2 // BLOCK_ROWS
        head = tl.program_id(0) // per_head
        pair = tl.program_id(0) % per_head * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column, other_column, turns = pair_columns(pair, R, D, INTERLEAVED)
        row = weight_ptr + (head * D + column).to(tl.int64)[:, None] * I
        other_row = weight_ptr + (head * D + other_column).to(tl.int64)[:, None] * I
        col = tl.arange(0, BLOCK_COLS)
        first = tl.load(row + col, mask=(col < I)[None, :], other=0.0, cache_modifier=".cg")
        second = tl.load(other_row + col, mask=(col < I)[None, :], other=0.0, cache_modifier=".cg")
        position = tl.load(position_ptr)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if CENTRED:
            mean, inverse = statistics(x_ptr, eps, I, BLOCK_COLS)
            x = normalised(x_ptr, norm_ptr, shift_ptr, col, col < I, offset, mean, inverse, NORM_WEIGHT, SHIFT)
        else:
            x, square = scaled(x_ptr, norm_ptr, col, col < I, offset, NORM, NORM_WEIGHT)
        firsts = first.to(tl.float32) * x
        seconds = second.to(tl.float32) * x
        for start in tl.static_range(BLOCK_COLS, I, BLOCK_COLS):
            col = start + tl.arange(0, BLOCK_COLS)
            first = tl.load(row + col, mask=(col < I)[None, :], other=0.0, cache_modifier=".cg")
            second = tl.load(other_row + col, mask=(col < I)[None, :], other=0.0, cache_modifier=".cg")
            if CENTRED:
                x = normalised(x_ptr, norm_ptr, shift_ptr, col, col < I, offset, mean, inverse, NORM_WEIGHT, SHIFT)
            else:
                x, more = scaled(x_ptr, norm_ptr, col, col < I, offset, NORM, NORM_WEIGHT)
                square += more
            firsts += first.to(tl.float32) * x
            seconds += second.to(tl.float32) * x
        a = tl.sum(firsts, 1)
        b = tl.sum(seconds, 1)
        if NORM and not CENTRED:
            inverse = tl.rsqrt(tl.sum(square, 0) / I + eps)
            a *= inverse
            b *= inverse
        if BIAS:
            a += tl.load(bias_ptr + head * D + column).to(tl.float32)
            b += tl.load(bias_ptr + head * D + other_column).to(tl.float32)
        if R > 0 and head < H + HK:
            a, b = rotated(a, b, cos_ptr, sin_ptr, pair, column, other_column, turns, HALF_TABLE)
        live = pair < D // 2
        if head < H:
            store_pairs(query_ptr + head * D, column, other_column, live, a, b)
        elif head < H + HK:
            target = keys_ptr + ((head - H).to(tl.int64) * capacity + position) * D
            store_pairs(target, column, other_column, live, a, b)
        else:
            target = values_ptr + ((head - H - HK).to(tl.int64) * capacity + position) * D
            store_pairs(target, column, other_column, live, a, b)

    qkv_kernel = Kernel(_qkv_kernel)


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
    chunked: bool = False,
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
        interleaved, half_table, in_fp32, keep_dtype, chunked: see `rotary`.

    Returns:
        `[B, H, 1, D]`.
    """
    layer = past_key_values.layers[layer_idx]
    rotation = None if position_embeddings is None else Rotation(*position_embeddings, interleaved, half_table)
    if prefill_context.of(past_key_values) is None and _kernels_take(
        hidden_states, layer.keys, layer.values, rotation, head_dim, in_fp32 or keep_dtype
    ):
        if are_blocks(projections):
            scaled = block_linear(hidden_states, projections, norm)
            if scaled is not None:
                return _norm_rope_cache(scaled, layer, past_key_values.position, rotation, q_norm, k_norm)
        few = takes_few_rows(hidden_states)
        x, prologue = before(hidden_states, norm if few else None)
        if norm is not None and not few:
            x = norm(x)
        parameters = packing.packed_parameters(x, projections)
        if isinstance(parameters, tuple) and parameters[0].dtype == x.dtype:
            weight, bias = parameters
            whole = True
            if isinstance(layer, Fp8Layer):
                whole = False  # a scale is of a head, of which a program of the product has a part
            if whole and few and is_one_row(x) and q_norm is None and k_norm is None:
                tile = tile_for("qkv", head_dim // 2, x.shape[-1], weight)
                if tile is not None:
                    return launch_qkv(
                        x, weight, bias, prologue, layer.keys, layer.values, past_key_values.position, rotation, tile
                    )
            elif whole and few and not is_one_row(x) and (heads := head_norms(q_norm, k_norm, head_dim)) is not None:
                form = form_for_rows(x, weight, head_dim, heads != (None, None))
                if form is not None:
                    norms = (several_rows_norm(prologue), *heads)
                    return launch_qkv_rows(
                        x, weight, bias, norms, layer.keys, layer.values, past_key_values.position, rotation, form
                    )
            product = few_rows(x, weight, bias, prologue, None) if few else None
            if product is None:
                product = F.linear(x if prologue is None or norm is None else norm(x), weight, bias)
            return _norm_rope_cache(product, layer, past_key_values.position, rotation, q_norm, k_norm)
        if isinstance(parameters, str):
            backend.count_fallback("qkv_step", parameters, projections[0])
    if norm is not None:
        hidden_states = normed(hidden_states, norm)
    if len(projections) == 1:
        if num_key_value_heads is None:
            raise TypeError("one projection for queries, keys and values needs num_key_value_heads")
        packed = projections[0](hidden_states)
        kv_size = num_key_value_heads * head_dim
        q, k, v = packed.split([packed.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    else:
        q, k, v = packing.packed_linear(hidden_states, *projections)
    return _split_step(
        (q, k, v), position_embeddings, past_key_values, layer_idx, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm,
        interleaved=interleaved, half_table=half_table, in_fp32=in_fp32, keep_dtype=keep_dtype, chunked=chunked,
    )  # fmt: skip


def projected_step(
    packed: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    head_dim: int,
    num_key_value_heads: int,
    q_norm: nn.Module | None = None,
    k_norm: nn.Module | None = None,
    interleaved: bool = False,
    half_table: bool = False,
    in_fp32: bool = False,
    keep_dtype: bool = False,
    chunked: bool = False,
) -> Tensor:
    """Do what `qkv_step` does after the product, whose result is `packed` `[B, 1, (H + 2 Hk) D]`."""
    layer = past_key_values.layers[layer_idx]
    rotation = None if position_embeddings is None else Rotation(*position_embeddings, interleaved, half_table)
    if prefill_context.of(past_key_values) is None and _kernels_take(
        packed, layer.keys, layer.values, rotation, head_dim, in_fp32 or keep_dtype
    ):
        return _norm_rope_cache(packed, layer, past_key_values.position, rotation, q_norm, k_norm)
    kv_size = num_key_value_heads * head_dim
    return _split_step(
        packed.split([packed.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1), position_embeddings,
        past_key_values, layer_idx, head_dim=head_dim, q_norm=q_norm, k_norm=k_norm, interleaved=interleaved,
        half_table=half_table, in_fp32=in_fp32, keep_dtype=keep_dtype, chunked=chunked,
    )  # fmt: skip


def _split_step(
    projected: Sequence[Tensor],
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    **options: Any,
) -> Tensor:
    """Return the rotated queries of a token or of a prompt."""
    prompt = prefill_context.of(past_key_values)
    query = None
    if prompt is not None:
        query = _prompt_step(projected, position_embeddings, past_key_values.layers[layer_idx], **options)
    if query is None:
        query = _plain_step(projected, position_embeddings, past_key_values, layer_idx, **options)
    if prompt is not None:
        prompt.written(layer_idx)
    return query


def _prompt_step(
    projected: Sequence[Tensor],
    position_embeddings: tuple[Tensor, Tensor] | None,
    layer: Any,
    *,
    head_dim: int,
    q_norm: nn.Module | None,
    k_norm: nn.Module | None,
    interleaved: bool,
    half_table: bool,
    in_fp32: bool,
    keep_dtype: bool,
    chunked: bool,
) -> Tensor | None:
    """Return the queries of a prompt by the kernel, which writes keys and values; None where it cannot."""
    q, k, v = projected
    rotation = None if position_embeddings is None else Rotation(*position_embeddings, interleaved, half_table)
    fits = rotation is None or rotation.fits(q.shape[0], head_dim, q.shape[1])
    if not fits or not has_dense_rows(q, k, v):
        return None
    if not _kernels_write(q, layer.keys, layer.values, rotation, head_dim, in_fp32 or keep_dtype):
        return None
    q, q_prologue = over_one_head(q, q_norm, head_dim)
    k, k_prologue = over_one_head(k, k_norm, head_dim)
    if isinstance(layer, Fp8Layer):
        shape = q.shape[0], k.shape[2] // head_dim, q.shape[1], head_dim
        keys, values = q.new_empty(shape), q.new_empty(shape)
        query = qkv_prompt(q, k, v, keys, values, rotation, q_prologue, k_prologue)
        layer.update(keys, values)
        return query
    return qkv_prompt(q, k, v, layer.keys, layer.values, rotation, q_prologue, k_prologue)


def _plain_step(
    projected: Sequence[Tensor],
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: PreallocatedCache,
    layer_idx: int,
    *,
    head_dim: int,
    q_norm: nn.Module | None,
    k_norm: nn.Module | None,
    **options: bool,
) -> Tensor:
    q, k, v = projected
    query, key = split_heads(q, q_norm, head_dim), split_heads(k, k_norm, head_dim)
    if position_embeddings is not None:
        cos, sin = position_embeddings
        query, key = rotary(query, key, cos, sin, partial=True, **options)
    past_key_values.update(key, split_heads(v, None, head_dim), layer_idx)
    return query


def _kernels_take(
    hidden_states: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    rotation: Rotation | None,
    head_dim: int,
    rounds_to_input: bool,
) -> bool:
    """Return whether the kernels of one token a row take these tensors."""
    fits = rotation is None or rotation.fits(hidden_states.shape[0], head_dim)
    return fits and _kernels_write(hidden_states, keys, values, rotation, head_dim, rounds_to_input)


def _kernels_write(
    hidden_states: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    rotation: Rotation | None,
    head_dim: int,
    rounds_to_input: bool,
) -> bool:
    if hidden_states.dtype not in KERNEL_DTYPES or not writable(keys, values, head_dim, hidden_states.dtype):
        return False
    if head_dim % 2 or not backend.nothing_watches(hidden_states) or backend.wants_gradient(hidden_states):
        return False
    if rotation is not None and rotation.cos.dtype != hidden_states.dtype and not rounds_to_input:
        return False
    return backend.uses_triton(hidden_states)


def _norm_rope_cache(
    packed: Tensor,
    layer: Any,
    position: Tensor,
    rotation: Rotation | None,
    q_norm: nn.Module | None,
    k_norm: nn.Module | None,
) -> Tensor:
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    kv_size = kv_heads * head_dim
    q, k, v = packed.split([packed.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
    q, q_prologue = over_one_head(q, q_norm, head_dim)
    k, k_prologue = over_one_head(k, k_norm, head_dim)
    slots: Any = None
    if isinstance(layer, Fp8Layer):
        slots = layer.slots
    return rope_cache(q, k, v, layer.keys, layer.values, position, rotation, q_prologue, k_prologue, slots)


def launch_qkv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prologue: Norm | None,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    rotation: Rotation | None,
    shape: Tile,
) -> Tensor:
    """Run the one kernel with a tile. Returns the query `[1, H, 1, D]`."""
    block_rows, block_cols, num_warps = shape
    _, kv_heads, capacity, head_dim = keys.shape
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    query = input.new_empty(1, heads, 1, head_dim)
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    shift = shift_of(prologue)
    tables, _, turns = turning(rotation, input)
    overlap = overlaps(input)
    with backend.device_guard(input):
        qkv_kernel.launch(
            ((heads + 2 * kv_heads) * (head_dim // 2 // block_rows), 1, 1),
            num_warps,
            (
                input.contiguous(), norm, input if shift is None else shift, weight, weight if bias is None else bias,
                *tables, position, query, keys, values,
            ),
            (capacity,),
            (),
            (eps, offset),
            (
                weight.shape[1], heads, kv_heads, head_dim, *turns, prologue is not None, has_weight,
                isinstance(prologue, LayerNormPrologue), shift is not None, bias is not None, overlap, block_rows,
                block_cols,
            ),
            overlap=overlap,
        )  # fmt: skip
    return query
