"""The kernel of `decode_attention`, and what attention with a mask takes of it. The letters are those of that file."""

from __future__ import annotations

from ..core import backend
from ..launching.launch import Kernel

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..cache.fp8_layer import in_range, kept
    from ..device.elementary import tanh
    from ..device.split_k_semaphores import publish

    @triton.jit
    def _tile(ptr, slot, keep, column, D: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load rows `slot` of one head's keys or values, zeros where not `keep`."""
        return tl.load(ptr + slot.to(tl.int64)[:, None] * D + column, mask=keep[:, None] & (column < D), other=0.0)

    @triton.jit
    def _score(product, head, distance, scaling, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the scores of products q kᵀ: the one place of the kernel where a rule for scores stands.

        `head` and `distance`, from the token to the slot, have shapes that broadcast with `product`.
        """
        scores = product * scaling
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        return scores

    @triton.jit
    def key_products(query, keys, DOT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return `[heads, slots]` products."""
        if DOT:
            return tl.dot(query, tl.trans(keys), input_precision="ieee")
        return tl.sum(query.to(tl.float32)[:, None, :] * keys.to(tl.float32)[None, :, :], 2)

    @triton.jit
    def _scores(  # type: ignore[no-untyped-def]
        query, keys, head, slot, position, end, scaling, softcap, SOFTCAP: tl.constexpr, DOT: tl.constexpr
    ):
        """Return `[heads, slots]` scores, -1e30 from slot `end` on."""
        products = key_products(query, keys, DOT)
        scores = _score(products, head[:, None], (position - slot)[None, :], scaling, softcap, SOFTCAP)
        return tl.where((slot < end)[None, :], scores, -1e30)

    @triton.jit
    def weighted(weights, values, DOT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return `[heads, columns]`: values `[slots, columns]`, each times its weight, added up."""
        if DOT:
            return tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        return tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], 1)

    @triton.jit
    def sum_of_parts(part_ptr, part, held, scale, column, DV: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return `[heads, columns]`: the rows `part` of `[heads, parts]`, each times its scale, added up."""
        at = part[:, :, None] * DV + column[:, None, :]
        keep = held[:, :, None] & (column < DV)[:, None, :]
        return tl.sum(tl.load(part_ptr + at, mask=keep, other=0.0, cache_modifier=".cg") * scale[:, :, None], 1)

    @triton.jit(do_not_specialize=["capacity", "window"])
    def _decode_attention_kernel(  # type: ignore[no-untyped-def]
        query_ptr,
        keys_ptr,
        values_ptr,
        position_ptr,
        starts_ptr,
        sinks_ptr,
        top_ptr,
        sum_ptr,
        part_ptr,
        arrived_ptr,
        out_ptr,
        scale_ptr,
        new_key_ptr,
        new_value_ptr,
        capacity,
        window,
        new_key_row_stride,
        new_key_head_stride,
        new_value_row_stride,
        new_value_head_stride,
        scaling,
        softcap,
        H: tl.constexpr,
        HK: tl.constexpr,
        D: tl.constexpr,
        DV: tl.constexpr,
        WINDOW: tl.constexpr,
        SOFTCAP: tl.constexpr,
        SINKS: tl.constexpr,
        OVERLAP: tl.constexpr,
        WAIT: tl.constexpr,
        HEADS: tl.constexpr,
        HEADS_HELD: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_DV: tl.constexpr,
        BLOCK_SLOTS: tl.constexpr,
        SPLITS: tl.constexpr,
        PARTS: tl.constexpr,
        DOT: tl.constexpr,
        WRITES: tl.constexpr,
        FP8_CACHE: tl.constexpr,
        DECODE: tl.constexpr,
        FNUZ: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0)
        first_head = tl.program_id(1) * HEADS
        part = tl.program_id(2)
        position = tl.load(position_ptr)
        low = tl.load(starts_ptr + row)
        if WINDOW:
            low = tl.maximum(low, position + 1 - window)
        count = (position + 1 - low).to(tl.int32)
        share = tl.cdiv(tl.cdiv(count, SPLITS), BLOCK_SLOTS) * BLOCK_SLOTS
        active = tl.cdiv(count, share)
        if part >= active:
            return
        # Slots are int32: of loops that count in int64, AMD's compiler loses the pipeline's ring of slots in LDS.
        begin = (low + part * share).to(tl.int32)
        end = tl.minimum(begin + share, position.to(tl.int32) + 1)
        kv_head = (row * HK + first_head // (H // HK)).to(tl.int64)
        keys_ptr += kv_head * capacity * D
        values_ptr += kv_head * capacity * DV
        if FP8_CACHE:
            scale_ptr += kv_head * capacity
        column = tl.arange(0, BLOCK_D)[None, :]
        value_column = tl.arange(0, BLOCK_DV)[None, :]
        # All slots but the newest were written by earlier steps, before this graph was launched.
        older = tl.minimum(end, position.to(tl.int32))
        slot = begin + tl.arange(0, BLOCK_SLOTS)
        keys = _tile(keys_ptr, slot, slot < older, column, D)
        values = _tile(values_ptr, slot, slot < older, value_column, DV)
        if FP8_CACHE:  # codes are exact in fp16, to which a chip converts them at once
            dtype: tl.constexpr = tl.float32 if query_ptr.dtype.element_ty == tl.float32 else tl.float16
            keys, values, key_scale, shift, inverse = kept(
                keys, values, scale_ptr, slot, slot < older, dtype, DECODE, FNUZ
            )
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        head = first_head + tl.arange(0, BLOCK_HEADS)
        live = tl.arange(0, BLOCK_HEADS) < HEADS
        query_row = query_ptr + (row * H + head).to(tl.int64)[:, None] * D
        query = tl.load(query_row + column, mask=live[:, None] & (column < D), other=0.0)
        # The newest slot belongs to the last part; elsewhere it weighs nothing.
        newest = end > position
        # Not `newest & (column < D)`: to Triton 3.9's interpreter a mask made from a scalar is no mask.
        key_end, value_end = tl.where(newest, D, 0), tl.where(newest, DV, 0)
        if WRITES:
            number = (first_head // (H // HK)).to(tl.int64)
            new_key_ptr += row * new_key_row_stride + number * new_key_head_stride
            new_value_ptr += row * new_value_row_stride + number * new_value_head_stride
            key = tl.load(new_key_ptr + column, mask=column < key_end, other=0.0)
            value = tl.load(new_value_ptr + value_column, mask=value_column < value_end, other=0.0)
            tl.store(keys_ptr + position * D + column, key, mask=column < key_end)
            tl.store(values_ptr + position * DV + value_column, value, mask=value_column < value_end)
        if not WRITES:
            key = tl.load(keys_ptr + position * D + column, mask=column < key_end, other=0.0)
            value = tl.load(values_ptr + position * DV + value_column, mask=value_column < value_end, other=0.0)
        if FP8_CACHE:
            last = position + tl.arange(0, 1)
            key, value, last_key_scale, last_shift, last_inverse = kept(
                key, value, scale_ptr, last, last < end, tl.float32, DECODE, FNUZ
            )
            query, times = in_range(query, dtype)
            rate = scaling * times[:, None] * key_scale[None, :]
            last_rate = scaling * times * last_key_scale
        if not FP8_CACHE:
            rate = scaling
            last_rate = scaling
        scores = _scores(query, keys, head, slot, position, older, rate, softcap, SOFTCAP, DOT)
        product = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
        score = tl.where(newest, _score(product, head, 0, last_rate, softcap, SOFTCAP), -1e30)
        if FP8_CACHE:
            scores += shift[None, :]
            score += last_shift
        top = tl.maximum(tl.max(scores, 1), score)
        weights = tl.exp(scores - top[:, None])
        weight = tl.exp(score - top)
        total = tl.sum(weights, 1) + weight
        if FP8_CACHE:
            total = tl.sum(weights * inverse[None, :], 1) + weight * last_inverse
        mixed = weighted(weights, values, DOT) + weight[:, None] * value.to(tl.float32)
        for at in range(begin + BLOCK_SLOTS, older, BLOCK_SLOTS):
            slot = at + tl.arange(0, BLOCK_SLOTS)
            keys = _tile(keys_ptr, slot, slot < older, column, D)
            values = _tile(values_ptr, slot, slot < older, value_column, DV)
            if FP8_CACHE:
                keys, values, key_scale, shift, inverse = kept(
                    keys, values, scale_ptr, slot, slot < older, dtype, DECODE, FNUZ
                )
                rate = scaling * times[:, None] * key_scale[None, :]
            scores = _scores(query, keys, head, slot, position, older, rate, softcap, SOFTCAP, DOT)
            if FP8_CACHE:
                scores += shift[None, :]
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            if FP8_CACHE:
                total = total * shrink + tl.sum(weights * inverse[None, :], 1)
            if not FP8_CACHE:
                total = total * shrink + tl.sum(weights, 1)
            mixed = mixed * shrink[:, None] + weighted(weights, values, DOT)
            top = higher
        out_row = (row * H + head).to(tl.int64)
        if active == 1:
            if SINKS:
                sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
                higher = tl.maximum(top, sink)
                total = total * tl.exp(top - higher) + tl.exp(sink - higher)
                mixed = mixed * tl.exp(top - higher)[:, None]
            y = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_row[:, None] * DV + value_column, y, mask=live[:, None] & (value_column < DV))
            return
        at = out_row * SPLITS + part
        tl.store(top_ptr + at, top, mask=live)
        tl.store(sum_ptr + at, total, mask=live)
        tl.store(part_ptr + at[:, None] * DV + value_column, mixed, mask=live[:, None] & (value_column < DV))
        publish(WAIT)
        arrived = arrived_ptr + row * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") != active - 1:
            return
        tl.store(arrived, 0)
        index = tl.arange(0, HEADS_HELD)
        number = tl.arange(0, SPLITS)[None, :]
        there = (index < HEADS)[:, None] & (number < active)
        out_row = (row * H + first_head + index).to(tl.int64)
        at = out_row[:, None] * SPLITS + number
        tops = tl.load(top_ptr + at, mask=there, other=-1e30, cache_modifier=".cg")
        sums = tl.load(sum_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        highest = tl.max(tops, 1)
        if SINKS:
            sink = tl.load(sinks_ptr + first_head + index, mask=index < HEADS, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, sink)
        whole = tl.sum(sums * tl.exp(tops - highest[:, None]), 1)
        if SINKS:
            whole += tl.exp(sink - highest)
        y = tl.zeros([HEADS_HELD, BLOCK_DV], tl.float32)
        for first in tl.static_range(0, SPLITS, PARTS):
            if first < active:
                some = first + tl.arange(0, PARTS)[None, :]
                held = (index < HEADS)[:, None] & (some < active)
                rows = out_row[:, None] * SPLITS + some
                scale = tl.exp(
                    tl.load(top_ptr + rows, mask=held, other=-1e30, cache_modifier=".cg") - highest[:, None]
                )
                y += sum_of_parts(part_ptr, rows, held, scale, value_column, DV)
        y = (y / whole[:, None]).to(out_ptr.dtype.element_ty)
        keep = (index < HEADS)[:, None] & (value_column < DV)
        tl.store(out_ptr + out_row[:, None] * DV + value_column, y, mask=keep)

    decode_attention_kernel = Kernel(_decode_attention_kernel, dot=True)
