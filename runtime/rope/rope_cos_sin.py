"""Cosines and sines of a decode step, read from tables that are computed once.

B rows, n tokens a row, S capacity of the cache, R columns of a table. A rotary module computes each row of its result
from that row's position alone, so the rows of all S positions, made by calling the module once, hold every later
result bit for bit. Two kinds of module look at the greatest position too (transformers' `dynamic_rope_update`):

    longrope   one set of frequencies up to the original context, another beyond it: both are kept, 2 S rows
    dynamic    frequencies change with every new greatest position beyond the original context: no table
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache.preallocated import PreallocatedCache
from ..core import backend, prefill_context
from ..launching.launch import WAVE, Kernel, grid, overlaps

CASES = """
case("8B", _op, int64(1, 1), tensor(CONTEXT, 128), tensor(CONTEXT, 128))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow

    @triton.jit(do_not_specialize=["row_count", "table_rows"])
    def _rotary_rows_kernel(  # type: ignore[no-untyped-def]
        position_ptr,
        cos_ptr,
        sin_ptr,
        cos_out_ptr,
        sin_out_ptr,
        row_count,
        table_rows,
        R: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Copy one row of each table a program; a position outside of the tables gives NaN."""
        follow(OVERLAP)
        row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
        if row >= row_count:
            return
        position = tl.load(position_ptr + row).to(tl.int64)
        # Not `inside & (col < R)`: to Triton 3.9's interpreter a mask made from a scalar is no mask.
        end = tl.where((position >= 0) & (position < table_rows), R, 0)
        col = tl.arange(0, BLOCK_COLS)
        source, target = position * R + col, row * R + col
        cos = tl.load(cos_ptr + source, mask=col < end, other=float("nan"))
        sin = tl.load(sin_ptr + source, mask=col < end, other=float("nan"))
        tl.store(cos_out_ptr + target, cos, mask=col < R)
        tl.store(sin_out_ptr + target, sin, mask=col < R)

    rotary_rows_kernel = Kernel(_rotary_rows_kernel)


def rotary_rows(
    rotary_emb: nn.Module,
    hidden_states: Tensor,
    position_ids: Tensor,
    past_key_values: object,
    layer_type: str | None = None,
) -> Any:
    """Return `rotary_emb(hidden_states, position_ids)`; in a step of a `PreallocatedCache`, and in a prompt that the
    functions of a step read, from its tables.

    The tables are made the first time they are asked for outside of a stream capture, by the prompt as a rule, and
    kept in the cache. Where
    there can be none the module is called; if that makes the host wait, `past_key_values.refusal` says so.

    Args:
        rotary_emb: returns cos and sin, each `[B, n, R]`.
        hidden_states: says dtype and device of the result.
        position_ids: `[B, n]`.
        past_key_values: any cache, or None.
        layer_type: the module's third argument, where it has one.

    Returns:
        cos and sin, each `[B, n, R]`.
    """
    if isinstance(past_key_values, PreallocatedCache):
        tables = _tables(rotary_emb, hidden_states, position_ids, past_key_values, layer_type)
        if tables is not None and (past_key_values.stepping or prefill_context.of(past_key_values) is not None):
            return _op(_rows_of(position_ids, tables[0], rotary_emb, past_key_values, layer_type), *tables)
    return _call(rotary_emb, hidden_states, position_ids, layer_type)


def reference(position_ids: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Gather rows `position_ids` `[B, n]` of tables `[S, R]`: two tensors `[B, n, R]`."""
    return cos[position_ids], sin[position_ids]


def _call(rotary_emb: nn.Module, hidden_states: Tensor, position_ids: Tensor, layer_type: str | None) -> Any:
    if layer_type is None:
        return rotary_emb(hidden_states, position_ids)
    return rotary_emb(hidden_states, position_ids, layer_type)


def _tables(
    rotary_emb: nn.Module,
    hidden_states: Tensor,
    position_ids: Tensor,
    cache: PreallocatedCache,
    layer_type: str | None,
) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin of every position, or None where the module has to be called."""
    if position_ids.dim() != 2 or backend.observed(rotary_emb):
        backend.count_fallback("rotary_rows", "positions_of_axes" if position_ids.dim() != 2 else "observed")
        return None
    if position_ids.dtype not in (torch.int64, torch.int32):
        backend.count_fallback("rotary_rows", "positions_are_no_indices", rotary_emb)
        return None
    key = (rotary_emb, layer_type, hidden_states.dtype)
    if key not in cache.tables and not is_capturing(position_ids):
        cache.tables[key] = _compute(rotary_emb, hidden_states, position_ids, cache, layer_type)
    return cache.tables.get(key)


def _compute(
    rotary_emb: nn.Module,
    hidden_states: Tensor,
    position_ids: Tensor,
    cache: PreallocatedCache,
    layer_type: str | None,
) -> tuple[Tensor, Tensor] | None:
    limit = original_context(rotary_emb, layer_type)
    if limit is not None and limit < cache.capacity and _rope_type(rotary_emb, layer_type) != "longrope":
        cache.refusal = "rope_depends_on_length"
        backend.count_fallback("rotary_rows", "rope_depends_on_length", rotary_emb)
        return None
    lengths = [cache.capacity] if limit is None or limit >= cache.capacity else [limit, cache.capacity]
    with torch.inference_mode(False), torch.no_grad():
        # A dynamic module that has seen a longer text goes back to its original frequencies at a short one.
        lengths.insert(0, 1)
        results = [_call(rotary_emb, hidden_states, _positions(n, position_ids), layer_type) for n in lengths]
        if not all(_is_pair(result, length) for result, length in zip(results, lengths, strict=True)):
            backend.count_fallback("rotary_rows", "other_result", rotary_emb)
            return None
        cos, sin = (torch.cat([_padded(result[i][0], cache.capacity) for result in results[1:]]) for i in (0, 1))
        # Backwards: what depends on the positions beside it has other rows there.
        for probe in (_positions(lengths[-1], position_ids).flip(1), position_ids):
            expected = _call(rotary_emb, hidden_states, probe, layer_type)
            places = _rows_of(probe, cos, rotary_emb, cache, layer_type)
            if not _holds(places, cos) or not _are_equal(reference(places, cos, sin), expected):
                backend.count_fallback("rotary_rows", "other_bits", rotary_emb)
                return None
    cache.made_from(rotary_emb)
    return cos, sin


def _holds(places: Tensor, table: Tensor) -> bool:
    """Return whether a table has all these rows."""
    return places.numel() == 0 or bool((places.min() >= 0) & (places.max() < table.shape[0]))


def _are_equal(rows: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(row, other) for row, other in zip(rows, expected, strict=True))


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a graph is being captured on the current stream of the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def original_context(rotary_emb: nn.Module, layer_type: str | None) -> int | None:
    """Return the number of positions up to which the frequencies are constant, or None if they always are."""
    rope_type = _rope_type(rotary_emb, layer_type)
    if rope_type == "longrope":
        parameters: Any = rotary_emb.config.rope_parameters  # type: ignore[union-attr]
        parameters = parameters if layer_type is None else parameters[layer_type]
        return int(parameters["original_max_position_embeddings"])
    return int(rotary_emb.original_max_seq_len) if "dynamic" in rope_type else None  # type: ignore[arg-type]


def _rope_type(rotary_emb: nn.Module, layer_type: str | None) -> str:
    rope_type: Any = getattr(rotary_emb, "rope_type", "default")
    return str(rope_type[layer_type] if isinstance(rope_type, dict) else rope_type)


def _rows_of(
    position_ids: Tensor, cos: Tensor, rotary_emb: nn.Module, cache: PreallocatedCache, layer_type: str | None
) -> Tensor:
    """Return the rows of the tables that belong to `position_ids`: beyond the original context, the second half's."""
    limit = original_context(rotary_emb, layer_type)
    if limit is None or cos.shape[0] == cache.capacity:
        return position_ids
    return position_ids + (position_ids.max() >= limit) * cache.capacity


def _positions(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, dtype=like.dtype, device=like.device)[None]


def _is_pair(result: object, length: int) -> bool:
    """Return whether `result` is two equal tables `[1, length, R]`."""
    if not isinstance(result, tuple) or len(result) != 2 or not all(isinstance(part, Tensor) for part in result):
        return False
    return result[0].dim() == 3 and result[0].shape[:2] == (1, length) and result[1].shape == result[0].shape


def _padded(table: Tensor, capacity: int) -> Tensor:
    return torch.cat([table, table.new_zeros(capacity - table.shape[0], table.shape[1])])


def _forward(position_ids: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not backend.uses_triton(position_ids):
        cos, sin = reference(position_ids, cos, sin)
        return cos.contiguous(), sin.contiguous()
    outputs = _fake(position_ids, cos, sin)
    columns = cos.shape[1]
    if position_ids.numel() == 0:
        return outputs
    overlap = overlaps(cos)
    with backend.device_guard(cos):
        rotary_rows_kernel.launch(
            grid(1, position_ids.numel()),
            1 if columns <= 256 else 128 // WAVE,
            (position_ids.contiguous(), cos, sin, *outputs),
            (position_ids.numel(), cos.shape[0]),
            (),
            (),
            (columns, triton.next_power_of_2(columns), overlap),
            overlap=overlap,
        )
    return outputs


def _fake(position_ids: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*position_ids.shape, cos.shape[1])
    return (
        torch.empty(shape, dtype=cos.dtype, device=cos.device),
        torch.empty(shape, dtype=sin.dtype, device=sin.device),
    )


_op = backend.register(
    "rotary_rows", "(Tensor position_ids, Tensor cos, Tensor sin) -> (Tensor, Tensor)", _forward, _fake
)
