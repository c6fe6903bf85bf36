"""Query and key norms, rotary embedding and the cache write of one token a row, in one kernel.

B rows, H and Hk heads, D head_dim, R <= D rotated columns, p the position of the token:

    query[b, h] = rotate(q_norm(q[b, h]))
    keys[b, h, p] = rotate(k_norm(k[b, h]))
    values[b, h, p] = v[b, h]

`rotate` is that of `rotary`; norms are over one head. Everything is fp32 between the load and the store.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import WAVE, Kernel, overlaps
from ..norms.norm_form import Prologue

CASES = """
def write(model, normed):
    sizes = [model.heads * model.head_dim, *2 * [model.kv_heads * model.head_dim]]
    q, k, v = torch.split(tensor(8, 1, sum(sizes)), sizes, -1)
    rotation = Rotation(tensor(8, 1, model.head_dim), tensor(8, 1, model.head_dim))
    norm = prologue(model.head_dim) if normed else None
    return rope_cache(q, k, v, *cache(model, 8, CONTEXT), int64(1), rotation, norm, norm)

def write_in_8_bits(model, rows):
    sizes = [model.heads * model.head_dim, *2 * [model.kv_heads * model.head_dim]]
    q, k, v = torch.split(tensor(rows, 1, sum(sizes)), sizes, -1)
    rotation = Rotation(tensor(rows, 1, model.head_dim), tensor(rows, 1, model.head_dim))
    slots = fp8_cache(model, rows, CONTEXT)
    return rope_cache(q, k, v, slots.keys, slots.values, int64(1), rotation, None, None, slots)

case("8B, 8 rows", write, LLAMA_8B, normed=False)
case("8B, 8 bits", write_in_8_bits, LLAMA_8B, 1)
case("Gemma 9B, 8 bits", write_in_8_bits, GEMMA_9B, 8)
case("Qwen3 30B-A3B, 8 rows", write, QWEN3_30B, normed=True)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def pair_columns(pair, R: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the two columns of each of a head's D / 2 pairs; the last (D - R) / 2 pairs are not rotated."""
        turns = pair < R // 2
        if INTERLEAVED:
            first = tl.where(turns, 2 * pair, R // 2 + pair)
            second = tl.where(turns, 2 * pair + 1, D // 2 + pair)
        else:
            first = tl.where(turns, pair, R // 2 + pair)
            second = tl.where(turns, pair + R // 2, D // 2 + pair)
        return first, second, turns

    @triton.jit
    def rotated(  # type: ignore[no-untyped-def]
        first, second, cos_ptr, sin_ptr, pair, column, other_column, turns, HALF_TABLE: tl.constexpr
    ):
        """Rotate pairs of fp32 columns by the row of the tables at `cos_ptr` and `sin_ptr`."""
        at = pair if HALF_TABLE else column
        at_other = pair if HALF_TABLE else other_column
        cos = tl.load(cos_ptr + at, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + at, mask=turns, other=0.0).to(tl.float32)
        other_cos = tl.load(cos_ptr + at_other, mask=turns, other=1.0).to(tl.float32)
        other_sin = tl.load(sin_ptr + at_other, mask=turns, other=0.0).to(tl.float32)
        return first * cos - second * sin, second * other_cos + first * other_sin

    from ..cache.fp8_layer import kept_pairs

    # AMD's compiler (Triton 3.6) fails on a pointer that is chosen by a branch: each branch loads and stores itself.

    @triton.jit
    def load_pairs(source, column, other_column, live):  # type: ignore[no-untyped-def]
        """Read pairs of columns of heads as fp32."""
        first = tl.load(source + column, mask=live, other=0.0).to(tl.float32)
        second = tl.load(source + other_column, mask=live, other=0.0).to(tl.float32)
        return first, second

    @triton.jit
    def store_pairs(target, column, other_column, live, first, second):  # type: ignore[no-untyped-def]
        """Write pairs of fp32 columns of heads."""
        tl.store(target + column, first.to(target.dtype.element_ty), mask=live)
        tl.store(target + other_column, second.to(target.dtype.element_ty), mask=live)

    @triton.jit(do_not_specialize=["capacity"])
    def _rope_cache_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        q_norm_ptr,
        k_norm_ptr,
        cos_ptr,
        sin_ptr,
        position_ptr,
        query_ptr,
        keys_ptr,
        values_ptr,
        scale_ptr,
        capacity,
        q_stride,
        k_stride,
        v_stride,
        table_stride,
        q_eps,
        q_offset,
        k_eps,
        k_offset,
        H: tl.constexpr,
        HK: tl.constexpr,
        D: tl.constexpr,
        R: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        Q_NORM: tl.constexpr,
        K_NORM: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK: tl.constexpr,
        FP8_CACHE: tl.constexpr,
        FNUZ: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(1).to(tl.int64)
        head = tl.program_id(0)
        pair = tl.arange(0, BLOCK)
        live = pair < D // 2
        column, other_column, turns = pair_columns(pair, R, D, INTERLEAVED)
        position = tl.load(position_ptr)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if head < H:
            first, second = load_pairs(q_ptr + row * q_stride + head * D, column, other_column, live)
        elif head < H + HK:
            first, second = load_pairs(k_ptr + row * k_stride + (head - H) * D, column, other_column, live)
        else:
            first, second = load_pairs(v_ptr + row * v_stride + (head - H - HK) * D, column, other_column, live)
        if Q_NORM and head < H:
            inverse = tl.rsqrt(tl.sum(first * first + second * second, 0) / D + q_eps)
            first *= inverse * (tl.load(q_norm_ptr + column, mask=live, other=0.0).to(tl.float32) + q_offset)
            second *= inverse * (tl.load(q_norm_ptr + other_column, mask=live, other=0.0).to(tl.float32) + q_offset)
        if K_NORM and (head >= H and head < H + HK):
            inverse = tl.rsqrt(tl.sum(first * first + second * second, 0) / D + k_eps)
            first *= inverse * (tl.load(k_norm_ptr + column, mask=live, other=0.0).to(tl.float32) + k_offset)
            second *= inverse * (tl.load(k_norm_ptr + other_column, mask=live, other=0.0).to(tl.float32) + k_offset)
        if R > 0 and head < H + HK:
            table = row * table_stride
            first, second = rotated(
                first, second, cos_ptr + table, sin_ptr + table, pair, column, other_column, turns & live, HALF_TABLE
            )
        if head < H:
            store_pairs(query_ptr + (row * H + head) * D, column, other_column, live, first, second)
        elif head < H + HK:
            target = keys_ptr + ((row * HK + head - H) * capacity + position) * D
            if FP8_CACHE:
                scale = scale_ptr + 2 * ((row * HK + head - H) * capacity + position)
                code, other_code = kept_pairs(first, second, scale, query_ptr.dtype.element_ty, FNUZ)
                store_pairs(target, column, other_column, live, code, other_code)
            if not FP8_CACHE:
                store_pairs(target, column, other_column, live, first, second)
        else:
            target = values_ptr + ((row * HK + head - H - HK) * capacity + position) * D
            if FP8_CACHE:
                scale = scale_ptr + 2 * ((row * HK + head - H - HK) * capacity + position) + 1
                code, other_code = kept_pairs(first, second, scale, query_ptr.dtype.element_ty, FNUZ)
                store_pairs(target, column, other_column, live, code, other_code)
            if not FP8_CACHE:
                store_pairs(target, column, other_column, live, first, second)

    rope_cache_kernel = Kernel(_rope_cache_kernel)


class Rotation(NamedTuple):
    """Tables `[B or 1, 1, R]` (or R / 2 columns with `half_table`) and the layout of the pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    half_table: bool = False

    @property
    def columns(self) -> int:
        """R."""
        return self.cos.shape[-1] * (2 if self.half_table else 1)

    def fits(self, rows: int, head_dim: int, tokens: int = 1) -> bool:
        """Return whether the kernels read these tables: dense, for every token of one row or of all, of even width."""
        cos, sin = self.cos, self.sin
        dense = cos.ndim == 3 and cos.shape == sin.shape and cos.stride() == sin.stride() and cos.stride(2) == 1
        even = self.columns % 2 == 0 and (head_dim - self.columns) % 2 == 0 and self.columns <= head_dim
        return dense and even and cos.shape[1] == tokens and cos.shape[0] in (1, rows)


def turning(
    rotation: Rotation | None, other: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int], tuple[int, bool, bool]]:
    """Return what kernels are given of a rotation, `other` in place of tables where there is none.

    Returns:
        cos and sin; their strides of rows, 0 for one of all, and of tokens; R, INTERLEAVED and HALF_TABLE.
    """
    if rotation is None:
        return (other, other), (0, 0), (0, False, False)
    cos = rotation.cos
    strides = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    return (cos, rotation.sin), strides, (rotation.columns, rotation.interleaved, rotation.half_table)


def rope_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    rotation: Rotation | None,
    q_norm: Prologue | None,
    k_norm: Prologue | None,
    slots: Any = None,
) -> Tensor:
    """Write keys and values of one token a row at `position` and return its queries.

    Args:
        q: `[B, 1, H D]`, dense in its last dimension; `k`, `v` `[B, 1, Hk D]` likewise.
        keys, values: `[B, Hk, S, D]`, contiguous.
        position: `[1]`, int64.
        rotation: None for none.
        q_norm, k_norm: RMSNorms over one head, with a weight; None for none.
        slots: `cache.fp8_layer.Fp8Slots`, of which `keys` and `values` are the codes; None for what is in 16 bits.

    Returns:
        `[B, H, 1, D]`.
    """
    written, form = (keys, values, keys), (False, False)
    if slots is not None:
        written, form = slots.written, (True, slots.fnuz)
    batch, kv_heads, capacity, head_dim = keys.shape
    heads = q.shape[-1] // head_dim
    query = q.new_empty(batch, heads, 1, head_dim)
    tables, (table_stride, _), turns = turning(rotation, q)
    overlap = overlaps(q)
    with backend.device_guard(q):
        rope_cache_kernel.launch(
            (heads + 2 * kv_heads, batch, 1),
            max(1, 32 // WAVE),
            (
                q, k, v, head_weight(q_norm, q), head_weight(k_norm, q), *tables, position, query, *written,
            ),
            (capacity,),
            (q.stride(0), k.stride(0), v.stride(0), table_stride),
            (*head_scale(q_norm), *head_scale(k_norm)),
            (
                heads, kv_heads, head_dim, *turns, q_norm is not None, k_norm is not None, overlap,
                1 << (head_dim // 2 - 1).bit_length(), *form,
            ),
            overlap=overlap,
        )  # fmt: skip
    return query


def head_weight(norm: Prologue | None, other: Tensor) -> Tensor:
    """Return the weight of a norm over a head; `other` where there is none."""
    return other if norm is None or norm.weight is None else norm.weight


def head_scale(norm: Prologue | None) -> tuple[float, float]:
    """Return eps and offset of a norm over a head."""
    return (0.0, 0.0) if norm is None else (norm.eps, norm.offset)


FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz})


def writable(keys: Tensor | None, values: Tensor | None, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels write numbers of a dtype into these buffers."""
    return (
        keys is not None
        and values is not None
        and keys.shape == values.shape
        and keys.shape[3] == head_dim
        and (keys.dtype == values.dtype == dtype or keys.dtype in FP8_DTYPES)
        and keys.is_contiguous()
        and values.is_contiguous()
    )
