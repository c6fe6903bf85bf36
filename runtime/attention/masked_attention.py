"""Attention of one new token a row to keys and values with a mask of any kind (split-KV, as in Flash-Decoding, 2023).

B rows, H query heads, Hk key/value heads, G = H / Hk, S slots, D and Dv head_dim of keys and values:

    scores = q kᵀ * scaling + mask          a mask of bools is 0 where true and leaves the slot out where false
    out = softmax(scores) v

It stands for torch's `scaled_dot_product_attention` in a decode step, for models whose attention has no method for one
token: ALiBi, relative positions, cross-attention, heads of any layout. Torch's kernels for one query have one program
a head and want masks of another dtype and width, which is four kernels more. Here a program takes the query heads of
one key/value head and a part of the slots, and reads no tile whose mask leaves all of it out; the last program of a
head to finish adds up the parts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.token import Write
from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..device.split_k_semaphores import arrivals
from ..launching.launch import Kernel, overlaps, processors, wait_for_stores
from ..launching.tiles import next_power

MOST_HEADS = 16
"""Query heads of a program, which are the rows of a product of matrices."""
PROGRAMS = 4
"""Of a processor."""
WIDEST = 512
"""The largest head_dim."""

CASES = """
def attend(rows, heads, kv_heads, head_dim, mask):
    slots = CONTEXT if mask is None else mask.shape[3]
    keys, values = (tensor(rows, kv_heads, slots, head_dim) for _ in range(2))
    return masked_attention(tensor(rows, heads, 1, head_dim), keys, values, mask, enable_gqa=True)

def ahead(heads, kv_heads, head_dim):
    query, out = (tensor(1, heads, 1, head_dim) for _ in range(2))
    keys, values = (tensor(1, kv_heads, CONTEXT, head_dim) for _ in range(2))
    mask, new = tensor(1, 1, 1, CONTEXT, dtype=torch.bool), tensor(1, kv_heads, 1, head_dim)
    write = Write(keys, values, new, new, int64(1))
    _launch(query, keys, values, mask, 1.0, heads // kv_heads, out, int64(1), write)

for sizes in ((32, 32, 64), (16, 16, 128), (8, 8, 256), (8, 1, 512)):
    case("{} of {}, {}, ahead".format(*sizes), ahead, *sizes)
case("32 heads of 64, bools", attend, 1, 32, 32, 64, tensor(1, 1, 1, CONTEXT, dtype=torch.bool))
case("32 heads of 128, ALiBi", attend, 1, 32, 32, 128, tensor(1, 32, 1, CONTEXT))
case("71 of 1 heads of 64", attend, 1, 71, 1, 64, tensor(1, 1, 1, CONTEXT, dtype=torch.bool))
case("32 of 8 heads, no mask", attend, 1, 32, 8, 128, None)
case("32 of 8, many slots", attend, 1, 32, 8, 128, tensor(1, 1, 1, LONG_CONTEXT, dtype=torch.bool))
case("8 heads of 8, bools", attend, 1, 8, 8, 8, tensor(1, 1, 1, CONTEXT, dtype=torch.bool))
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.split_k_semaphores import publish
    from .decode_attention_kernel import key_products, sum_of_parts, weighted

    @triton.jit
    def _tile(ptr, slot, slot_stride, keep, column, D: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load slots of one head's keys or values, zeros where not `keep`."""
        at = ptr + slot.to(tl.int64)[:, None] * slot_stride + column[None, :]
        return tl.load(at, mask=keep[:, None] & (column < D)[None, :], other=0.0)

    @triton.jit
    def _mask(  # type: ignore[no-untyped-def]
        mask_ptr, head, slot, live, query_stride, slot_stride, MASK: tl.constexpr
    ):
        """Return which slots count, of those that are `live`, and what is added to their scores."""
        added = tl.zeros(live.shape, tl.float32)
        if MASK != "":
            at = mask_ptr + head[:, None] * query_stride + slot.to(tl.int64)[None, :] * slot_stride
            mask = tl.load(at, mask=live, other=0)
            if MASK == "bool":
                live = live & (mask != 0)
            else:
                added = mask.to(tl.float32)
                live = live & (added > -1e30)
        return live, added

    @triton.jit
    def _taken_in(  # type: ignore[no-untyped-def]
        query, keys, values, live, added, scaling, top, total, mixed, DOT: tl.constexpr
    ):
        """Return `top`, `total` and `mixed` with some more slots."""
        seen = tl.max(live.to(tl.int32), 0) > 0  # what nothing has written may be NaN, and 0 * NaN is NaN
        values = tl.where(seen[:, None], values, 0.0)
        scores = tl.where(live, key_products(query, keys, DOT) * scaling + added, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(live, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(top - higher)
        return higher, total * shrink + tl.sum(weights, 1), mixed * shrink[:, None] + weighted(weights, values, DOT)

    @triton.jit(do_not_specialize=["slots"])
    def _masked_attention_kernel(  # type: ignore[no-untyped-def]
        query_ptr,
        keys_ptr,
        values_ptr,
        mask_ptr,
        newest_ptr,
        new_key_ptr,
        new_value_ptr,
        part_ptr,
        top_ptr,
        sum_ptr,
        arrived_ptr,
        out_ptr,
        slots,
        key_row_stride,
        key_head_stride,
        key_slot_stride,
        value_row_stride,
        value_head_stride,
        value_slot_stride,
        mask_row_stride,
        mask_head_stride,
        mask_query_stride,
        mask_slot_stride,
        new_key_row_stride,
        new_key_head_stride,
        new_value_row_stride,
        new_value_head_stride,
        scaling,
        HK: tl.constexpr,
        G: tl.constexpr,
        SHARES: tl.constexpr,
        D: tl.constexpr,
        DV: tl.constexpr,
        MASK: tl.constexpr,
        BEFORE: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        HEADS: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_DV: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        SPLITS: tl.constexpr,
        PARTS: tl.constexpr,
        ONE_TILE: tl.constexpr,
        DOT: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1) // SHARES
        part = tl.program_id(2)
        share = tl.cdiv(tl.cdiv(slots, SPLITS), BLOCK_SLOTS) * BLOCK_SLOTS
        begin = part * share
        end = tl.minimum(begin + share, slots)
        keys_ptr += row * key_row_stride + kv_head * key_head_stride
        values_ptr += row * value_row_stride + kv_head * value_head_stride
        mask_ptr += row * mask_row_stride + kv_head * mask_head_stride
        index = tl.arange(0, BLOCK_HEADS)
        head = tl.program_id(1) % SHARES * HEADS + index
        ours = (index < HEADS) & (head < G)
        column = tl.arange(0, BLOCK_D)
        value_column = tl.arange(0, BLOCK_DV)
        slot = begin + tl.arange(0, BLOCK_SLOTS)
        if BEFORE != "":  # the only tile, but for what this step writes, lies there since before the step
            held = slot < end
            if BEFORE != "all":
                newest = tl.load(newest_ptr)
                held = held & (slot != newest)
            keys = _tile(keys_ptr, slot, key_slot_stride, held, column, D)
            values = _tile(values_ptr, slot, value_slot_stride, held, value_column, DV)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        out_row = (row * HK + kv_head) * G + head
        query_at = query_ptr + out_row[:, None] * D + column[None, :]
        query = tl.load(query_at, mask=ours[:, None] & (column < D)[None, :], other=0.0)
        top = tl.full([BLOCK_HEADS], -1e30, tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        mixed = tl.zeros([BLOCK_HEADS, BLOCK_DV], tl.float32)
        if BEFORE != "":
            live = ours[:, None] & (slot < end)[None, :]
            live, added = _mask(mask_ptr, head, slot, live, mask_query_stride, mask_slot_stride, MASK)
            if BEFORE != "all":
                # Not `here & (column < D)`: to Triton 3.9's interpreter a mask made from a scalar is no mask.
                here = (newest >= begin) & (newest < end)
                key_end, value_end = tl.where(here, D, 0), tl.where(here, DV, 0)
                key_at = keys_ptr + newest * key_slot_stride + column
                value_at = values_ptr + newest * value_slot_stride + value_column
                if BEFORE == "but the new":  # which nobody has written yet: one program does
                    new_key_at = new_key_ptr + row * new_key_row_stride + kv_head * new_key_head_stride + column
                    key = tl.load(new_key_at, mask=column < key_end, other=0.0)
                    new_value_at = new_value_ptr + row * new_value_row_stride + kv_head * new_value_head_stride
                    value = tl.load(new_value_at + value_column, mask=value_column < value_end, other=0.0)
                    if tl.program_id(1) % SHARES == 0:
                        tl.store(key_at, key, mask=column < key_end)
                        tl.store(value_at, value, mask=value_column < value_end)
                else:
                    key = tl.load(key_at, mask=column < key_end, other=0.0)
                    value = tl.load(value_at, mask=value_column < value_end, other=0.0)
                keys = tl.where((slot == newest)[:, None], key[None, :], keys)
                values = tl.where((slot == newest)[:, None], value[None, :], values)
            top, total, mixed = _taken_in(query, keys, values, live, added, scaling, top, total, mixed, DOT)
        else:
            for at in range(begin, end, BLOCK_SLOTS):
                slot = at + tl.arange(0, BLOCK_SLOTS)
                live = ours[:, None] & (slot < end)[None, :]
                live, added = _mask(mask_ptr, head, slot, live, mask_query_stride, mask_slot_stride, MASK)
                # The only tile of a program comes together with its mask; of several, only what a mask lets through.
                if ONE_TILE or tl.max(tl.max(live.to(tl.int32), 1), 0) > 0:
                    keys = _tile(keys_ptr, slot, key_slot_stride, slot < end, column, D)
                    values = _tile(values_ptr, slot, value_slot_stride, slot < end, value_column, DV)
                    top, total, mixed = _taken_in(query, keys, values, live, added, scaling, top, total, mixed, DOT)
        there = ours[:, None] & (value_column < DV)[None, :]
        if SPLITS == 1:
            out_at = out_ptr + out_row[:, None] * DV + value_column[None, :]
            tl.store(out_at, (mixed / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)
        else:
            at = out_row * SPLITS + part
            tl.store(top_ptr + at, top, mask=ours)
            tl.store(sum_ptr + at, total, mask=ours)
            tl.store(part_ptr + at[:, None] * DV + value_column[None, :], mixed, mask=there)
            publish(WAIT)
            arrived_ptr += row * tl.num_programs(1) + tl.program_id(1)
            if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
                return
            tl.store(arrived_ptr, 0)
            number = tl.arange(0, SPLITS)[None, :]
            index = tl.arange(0, HEADS)
            head = tl.program_id(1) % SHARES * HEADS + index
            ours = head < G
            out_row = (row * HK + kv_head) * G + head
            at = out_row[:, None] * SPLITS + number
            tops = tl.load(top_ptr + at, mask=ours[:, None], other=-1e30, cache_modifier=".cg")
            sums = tl.load(sum_ptr + at, mask=ours[:, None], other=0.0, cache_modifier=".cg")
            highest = tl.max(tops, 1)
            whole = tl.sum(sums * tl.exp(tops - highest[:, None]), 1)
            y = tl.zeros([HEADS, BLOCK_DV], tl.float32)
            for first in tl.static_range(0, SPLITS, PARTS):
                some = first + tl.arange(0, PARTS)[None, :]
                held = ours[:, None] & (some < SPLITS)
                parts = out_row[:, None] * SPLITS + some
                scale = tl.exp(
                    tl.load(top_ptr + parts, mask=held, other=-1e30, cache_modifier=".cg") - highest[:, None]
                )
                y += sum_of_parts(part_ptr, parts, held, scale, value_column[None, :], DV)
            out_at = out_ptr + out_row[:, None] * DV + value_column[None, :]
            there = ours[:, None] & (value_column < DV)[None, :]
            tl.store(out_at, (y / whole[:, None]).to(out_ptr.dtype.element_ty), mask=there)

    masked_attention_kernel = Kernel(_masked_attention_kernel, dot=True)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    newest: Tensor | str | None = None,
    write: Write | None = None,
) -> Tensor | None:
    """Attend as torch's `scaled_dot_product_attention` does; None where these are not few queries.

    Args:
        query: `[B, H, 1, D]`, or `[B, Hk, G, D]`: a few queries of a head are to the kernel what heads that share keys
            are.
        key: `[B, Hk, S, D]`.
        value: `[B, Hk, S, Dv]`.
        attn_mask: `[1 or B, 1 or H, 1 or G, S]`, bools or numbers to add; None for none.
        dropout_p, is_causal: taken only where they are 0 and False.
        scale: of the scores; None for `D ** -0.5`.
        enable_gqa: whether H may be more than Hk, also where that is not 1.
        newest: the slot `[1]` that the step writes, where all others were there before it; `"none"` where it writes
            none; by default that is not known.
        write: the write of the step's token to `key` and `value`, which nobody has done yet.

    Returns:
        As `query`, with Dv for D.
    """
    if dropout_p or is_causal or not _fits(query, key, value, attn_mask, enable_gqa):
        return None
    batch, kv_heads = key.shape[:2]
    group = query.shape[1] * query.shape[2] // kv_heads
    out = query.new_empty(batch, *query.shape[2:0:-1], value.shape[3]).transpose(1, 2)
    if query.shape[2] > 1:
        out = query.new_empty(*query.shape[:3], value.shape[3])
    scaling = query.shape[3] ** -0.5 if scale is None else scale
    _launch(query, key, value, attn_mask, scaling, group, out, newest, write)
    return out


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if any(t.dim() != 4 or t.device != query.device for t in tensors) or key.shape[:3] != value.shape[:3]:
        return False
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or not key.shape[2]:
        return False
    if query.shape[1] != key.shape[1]:
        shared = (enable_gqa or key.shape[1] == 1) and query.shape[1] % key.shape[1] == 0
        if not shared or query.shape[2] != 1:
            return False
    if query.shape[2] > MOST_HEADS or max(key.shape[3], value.shape[3]) > WIDEST:
        return False
    if key.stride(3) != 1 or value.stride(3) != 1 or not query.dtype == key.dtype == value.dtype:
        return False
    return _takes_mask(query, key, mask) and query.dtype in KERNEL_DTYPES and takes_rows(query)


def _takes_mask(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    if mask is None:
        return True
    rows, heads, queries, slots = mask.shape
    if mask.dtype != torch.bool and mask.dtype not in KERNEL_DTYPES:
        return False
    fits = rows in (1, query.shape[0]) and heads in (1, query.shape[1]) and slots == key.shape[2]
    return fits and queries in (1, query.shape[2])


def takes_rows(query: Tensor) -> bool:
    """Return whether a step's kernels read such rows: nobody traces them or wants gradients."""
    return (
        query.shape[0] > 0
        and backend.nothing_watches(query)
        and not backend.wants_gradient(query)
        and backend.uses_triton(query)
    )


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    group: int,
    out: Tensor,
    newest: Tensor | str | None,
    write: Write | None = None,
) -> None:
    batch, kv_heads, slots, head_dim = key.shape
    value_dim = value.shape[3]
    programs = PROGRAMS * processors(query.get_device() if query.is_cuda else None)
    known = newest is not None
    form = choose(batch, kv_heads, group, slots, head_dim, value_dim, programs, known)
    shares = -(-group // form.heads)
    block_d, block_dv = max(16, next_power(head_dim)), max(16, next_power(value_dim))  # the least of a product
    top, total = query.new_empty((2, out.numel() // value_dim * form.splits), dtype=torch.float32)
    parts = query.new_empty(out.numel() * form.splits, dtype=torch.float32)
    strides = (0, 0, 0, 0) if mask is None else _mask_strides(mask, query, kv_heads)
    kind = "" if mask is None else "bool" if mask.dtype == torch.bool else "number"
    overlap = overlaps(query)
    one_tile = -(-slots // form.splits) <= form.slots
    before = "" if newest is None or not one_tile else "all" if isinstance(newest, str) else "but one"
    new = (query, query)
    if write is not None and before == "but one":
        before, new = "but the new", (write.key, write.value)
    elif write is not None:
        write.run()
    with backend.device_guard(query):
        masked_attention_kernel.launch(
            (batch, kv_heads * shares, form.splits),
            form.warps,
            (
                query.contiguous(), key, value, query if mask is None else mask,
                newest if isinstance(newest, Tensor) else query, *new, parts, top, total,
                arrivals(query, batch * kv_heads * shares), out,
            ),
            (slots,),
            (*key.stride()[:3], *value.stride()[:3], *strides, *new[0].stride()[:2], *new[1].stride()[:2]),
            (scaling,),
            (
                kv_heads, group, shares, head_dim, value_dim, kind, before, overlap,
                wait_for_stores(query) if form.splits > 1 else "", form.heads, max(16, form.heads) if form.dot else
                form.heads, block_d, block_dv, form.slots, form.splits,
                max(1, min(form.splits, 4096 * form.warps // (form.heads * block_dv))),
                one_tile, form.dot,
            ),
            overlap=overlap,
        )  # fmt: skip


class Form(NamedTuple):
    """How the work is divided."""

    heads: int
    """Query heads of a program, a power of two."""
    slots: int
    """Of a tile."""
    splits: int
    """Parts of the slots, a power of two."""
    warps: int
    dot: bool
    """Whether products of matrices are taken, whose rows are heads and at least sixteen."""


@functools.cache
def choose(
    batch: int, kv_heads: int, group: int, slots: int, head_dim: int, value_dim: int, wanted: int, known: bool = False
) -> Form:
    """Return how the work is divided: into `wanted` programs where there are slots enough.

    Of slots that are `known` before the step, each program takes one tile, which may come while the kernels before it
    run; twice as many programs are no loss then.
    """
    widest = next_power(max(head_dim, value_dim))
    heads = min(MOST_HEADS, next_power(group))
    programs = batch * kv_heads * -(-group // heads)
    if known and (form := _of_one_tile(heads, slots, widest)) is not None and programs * form.splits <= 2 * wanted:
        return form
    tile = max(16, min(32, 8192 // widest))
    splits = next_power(max(1, min(32, wanted // programs, -(-slots // tile))) + 1) // 2
    if tile < -(-slots // splits) <= 2 * tile:  # one tile of a program is loaded together with its mask, two are not
        can_split = 2 * programs * splits <= 1.25 * wanted and splits < 32
        if widest <= 64 and (heads > 1 or not can_split):
            tile *= 2
        elif can_split:
            splits *= 2
    return Form(heads, tile, splits, 4, True)


def _of_one_tile(heads: int, slots: int, widest: int) -> Form | None:
    """Return a division in which each program has a single tile; None where there are too many slots.

    In chains of a write and an attention on an H100, µs, so divided and as what is not known: 8 heads of 256 over 768
    slots 8.1 and 11.2, 16 of 128 8.4 and 10.1, 32 of 64 9.0 and 10.5.
    """
    if heads > 1:
        tile, warps = 32, 8 if heads * widest >= 2048 else 4
    else:
        tile, warps = (32, 4) if widest <= 64 else (32, 2) if widest <= 128 else (64, 4)
    if widest * tile > 16384:
        return None
    splits = next_power(-(-slots // tile))
    return Form(heads, tile, splits, warps, True) if splits <= 32 else None


def _mask_strides(mask: Tensor, query: Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    """Return the strides of rows, key/value heads, queries of one such head, and slots; 0 for what is broadcast."""
    row, head, one, slot = (0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True))
    if query.shape[2] > 1:
        return row, head, one, slot
    return row, head * (query.shape[1] // kv_heads), head, slot
