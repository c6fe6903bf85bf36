"""MXFP4 experts of one or few tokens on the matrix units, each thread's products summed for itself."""

from __future__ import annotations

import torch

from ..core import backend, rows
from ..core.launch import overlaps


def _text(crossed: bool) -> str:
    lines = [
        ".reg .b32 w<4>, v<4>, part, eight;",
        ".reg .f32 c<4>, none, up;",
        "mov.f32 up, 0f5E800000;",
        "mov.f32 none, $26;",
    ]
    for word in range(4):
        for name, source in (("w", f"${2 + word}"), ("v", f"${6 + word}")):
            lines += [
                f"and.b32 part, {source}, 0x000F000F;",
                "mul.lo.u32 part, part, 0x1040;",
                f"and.b32 {name}0, part, 0x81C081C0;",
                f"and.b32 part, {source}, 0x00F000F0;",
                "mul.lo.u32 part, part, 0x104;",
                f"and.b32 {name}1, part, 0x81C081C0;",
                f"shr.u32 eight, {source}, 8;",
                "and.b32 part, eight, 0x000F000F;",
                "mul.lo.u32 part, part, 0x1040;",
                f"and.b32 {name}2, part, 0x81C081C0;",
                "and.b32 part, eight, 0x00F000F0;",
                "mul.lo.u32 part, part, 0x104;",
                f"and.b32 {name}3, part, 0x81C081C0;",
            ]
        for half in range(2):
            a, b = 2 * half, 2 * half + 1
            x = f"${10 + 4 * word + a}, ${10 + 4 * word + b}"
            before = "c0, c1, c2, c3" if word or half else "none, none, none, none"
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                f"{{c0, c1, c2, c3}}, {{w{a}, v{a}, w{b}, v{b}}}, {{{x}}}, {{{before}}};"
            )
    lines += ["mul.f32 $0, c0, up;", f"mul.f32 $1, c{3 if crossed else 2}, up;"]
    return "{\n" + "\n".join(lines) + "\n}"


if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..core.launch import Kernel
    from .form import gate_experts

    _STRAIGHT = tl.constexpr(_text(False))
    _CROSSED = tl.constexpr(_text(True))

    @triton.jit
    def _paired(a0, a1, a2, a3, up):  # type: ignore[no-untyped-def]
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 zero, pair;
            mov.b32 zero, 0x80008000;
            prmt.b32 pair, $4, $6, 0x5410;
            fma.rn.bf16x2 $0, pair, $8, zero;
            prmt.b32 pair, $4, $6, 0x7632;
            fma.rn.bf16x2 $1, pair, $8, zero;
            prmt.b32 pair, $5, $7, 0x5410;
            fma.rn.bf16x2 $2, pair, $8, zero;
            prmt.b32 pair, $5, $7, 0x7632;
            fma.rn.bf16x2 $3, pair, $8, zero;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [a0, a1, a2, a3, up],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def _words(loaded):  # type: ignore[no-untyped-def]
        even, odd = tl.split(tl.reshape(loaded, (loaded.shape[0], 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        return w0, w1, w2, w3

    @triton.jit
    def _group(one, other, x, lane, CROSS: tl.constexpr):  # type: ignore[no-untyped-def]
        w = _words(one)
        v = _words(other)
        return tl.inline_asm_elementwise(
            _CROSSED if CROSS else _STRAIGHT,
            "=&f,=&f" + ",r" * 24 + ",f",
            [
                w[0], w[1], w[2], w[3], v[0], v[1], v[2], v[3],
                x[0][0], x[0][1], x[0][2], x[0][3], x[1][0], x[1][1], x[1][2], x[1][3],
                x[2][0], x[2][1], x[2][2], x[2][3], x[3][0], x[3][1], x[3][2], x[3][3], lane,
            ],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )  # fmt: skip

    @triton.jit
    def _start(lane, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
        if KIND == 3:
            return tl.inline_asm_elementwise("{ .reg .pred p, q; .reg .b32 lane; mov.u32 lane, %laneid; setp.ne.u32 p, lane, $1; bar.red.or.pred q, 0, p; selp.f32 $0, 0f7FC00000, 0f00000000, q; }", "=f,r,~{memory}", [lane], dtype=tl.float32, is_pure=False, pack=1)
        else:
            return tl.inline_asm_elementwise("{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.ne.u32 p, lane, $1; selp.f32 $0, 0f7FC00000, 0f00000000, p; }", "=f,r", [lane], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def _scale(ptr):  # type: ignore[no-untyped-def]
        loaded = tl.load(ptr).to(tl.int32)
        return tl.maximum(loaded << 23, 0x400000).to(tl.float32, bitcast=True)

    @triton.jit
    def _power(loaded):  # type: ignore[no-untyped-def]
        return tl.maximum(loaded.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)

    @triton.jit
    def _tiles(one_ptr, other_ptr, one_scale, other_scale, begin, TILE: tl.constexpr, STEP: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr):  # type: ignore[no-untyped-def]
        loaded = ()
        for u in tl.static_range(UNROLL):
            for p in tl.static_range(TILES):
                offset = p * TILE + begin + u * STEP
                loaded += (tl.load(one_ptr + offset * 4), tl.load(other_ptr + offset * 4))
        for u in tl.static_range(UNROLL):
            for p in tl.static_range(TILES):
                offset = p * TILE + begin + u * STEP
                loaded += (tl.load(one_scale + offset), tl.load(other_scale + offset))
        return loaded

    @triton.jit
    def _xs(x_ptr, begin, start, own, place, STEP: tl.constexpr, UNROLL: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
        loaded = ()
        for u in tl.static_range(UNROLL):
            new = (own & (place + begin + u * STEP >= start))[:, None]
            for i in tl.static_range(4):
                if MASKED:
                    loaded += (tl.load(x_ptr + (begin + u * STEP) * 16 + 4 * i, mask=new, other=0),)
                else:
                    loaded += (tl.load(x_ptr + (begin + u * STEP) * 16 + 4 * i),)
        return loaded

    @triton.jit
    def _mma_gate_up_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        index_ptr,
        values_ptr,
        scale_ptr,
        bias_ptr,
        out_ptr,
        x_stride,
        index_stride,
        scaling,
        limit,
        offset,
        E: tl.constexpr,
        K: tl.constexpr,
        GROUPS: tl.constexpr,
        M: tl.constexpr,
        ACTIVATION: tl.constexpr,
        BOUNDED: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        BIASED: tl.constexpr,
        OVERLAP: tl.constexpr,
        TILES: tl.constexpr,
        WARPS: tl.constexpr,
        UNROLL: tl.constexpr,
        AHEAD: tl.constexpr,
        STAGES: tl.constexpr,
        FENCE: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        slot = tl.program_id(1)
        token = tl.program_id(2).to(tl.int64)
        expert = tl.load(index_ptr + token * index_stride + slot).to(tl.int64)
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        thread = tl.arange(0, 32 * WARPS)
        row = thread % 32 // 4
        quad = thread % 4
        place = thread // 32 * 4 + quad
        word = tl.arange(0, 4)[None, :]
        x_ptr += token * x_stride + place[:, None] * 16 + word
        own = row == 2 * quad
        column = tl.minimum(tl.program_id(0) * 8 * TILES, M - 8 * TILES) + row
        gate = column * 2 if INTERLEAVED else column
        first = (expert * (2 * M) + gate) * GROUPS + place
        up: tl.constexpr = GROUPS if INTERLEAVED else M * GROUPS
        tile: tl.constexpr = 8 * GROUPS * (2 if INTERLEAVED else 1)
        step: tl.constexpr = 4 * WARPS
        values_ptr = values_ptr + first[:, None] * 4 + word
        scale_ptr = scale_ptr + first
        sums = ()
        for p in tl.static_range(2 * TILES):
            sums = sums + (tl.zeros((32 * WARPS,), tl.float32),)
        if AHEAD:
            columns = _xs(x_ptr, 0, 0, own, place, step, UNROLL, False)
            following = _tiles(values_ptr, values_ptr + up * 4, scale_ptr, scale_ptr + up, 0, tile, step, TILES, UNROLL)
        for start in tl.range(0, GROUPS, 4 * WARPS * UNROLL, num_stages=STAGES):
            begin = tl.minimum(start, GROUPS - step * UNROLL)  # the last tile begins in the one before
            if AHEAD:
                loaded = following
                said = columns
                after = tl.minimum(start + step * UNROLL, GROUPS - step * UNROLL)
                columns = _xs(x_ptr, after, 0, own, place, step, UNROLL, False)
                following = _tiles(values_ptr, values_ptr + up * 4, scale_ptr, scale_ptr + up, after, tile, step, TILES, UNROLL)
            else:
                said = _xs(x_ptr, begin, 0, own, place, step, UNROLL, False)
                loaded = _tiles(values_ptr, values_ptr + up * 4, scale_ptr, scale_ptr + up, begin, tile, step, TILES, UNROLL)
            zero = _start(thread % 32, FENCE)
            for u in tl.static_range(UNROLL):
                new = place + begin + u * step >= start
                factor = tl.where(new & own, 0x5F805F80, 0)
                x = ()
                for i in tl.static_range(4):
                    a = _words(said[4 * u + i])
                    x += (_paired(a[0], a[1], a[2], a[3], factor),)
                added = ()
                for p in tl.static_range(TILES):
                    s, t = _group(loaded[2 * (u * TILES + p)], loaded[2 * (u * TILES + p) + 1], x, zero, False)
                    added += (sums[2 * p] + s * _power(loaded[2 * (UNROLL * TILES + u * TILES + p)]), sums[2 * p + 1] + t * _power(loaded[2 * (UNROLL * TILES + u * TILES + p) + 1]))
                sums = added
        for p in tl.static_range(TILES):
            s = tl.sum(tl.sum(tl.reshape(sums[2 * p], (WARPS, 8, 4)), 2), 0)
            t = tl.sum(tl.sum(tl.reshape(sums[2 * p + 1], (WARPS, 8, 4)), 2), 0)
            out = tl.minimum(tl.program_id(0) * 8 * TILES, M - 8 * TILES) + p * 8 + tl.arange(0, 8)
            if BIASED:
                at = bias_ptr + expert * (2 * M) + (out * 2 if INTERLEAVED else out)
                s += tl.load(at).to(tl.float32)
                t += tl.load(at + (1 if INTERLEAVED else M)).to(tl.float32)
            gated = gate_experts(s, t, scaling, limit, offset, ACTIVATION, BOUNDED) * 18446744073709551616.0
            crossed = out // 8 * 8 + out % 4 * 2 + out % 8 // 4
            tl.store(out_ptr + (token * K + slot) * M + crossed, gated.to(out_ptr.dtype.element_ty))

    @triton.jit
    def _mma_down_kernel(  # type: ignore[no-untyped-def]
        gated_ptr,
        index_ptr,
        shares_ptr,
        values_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        index_stride,
        shares_stride,
        residual_stride,
        scaling,
        E: tl.constexpr,
        K: tl.constexpr,
        GROUPS: tl.constexpr,
        H: tl.constexpr,
        BIASED: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        PAIRS: tl.constexpr,
        TILES: tl.constexpr,
        WARPS: tl.constexpr,
        UNROLL: tl.constexpr,
        AHEAD: tl.constexpr,
        STAGES: tl.constexpr,
        FENCE: tl.constexpr,
    ):
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(1).to(tl.int64)
        thread = tl.arange(0, 32 * WARPS)
        row = thread % 32 // 4
        quad = thread % 4
        warp = thread // 32
        SHARE: tl.constexpr = WARPS // PAIRS  # warps that share the columns
        place = warp // PAIRS * 4 + quad
        slot = warp % PAIRS * 2
        word = tl.arange(0, 4)[None, :]
        mine = tl.minimum(slot + row % 2, K - 1)
        x_ptr = gated_ptr + ((token * K + mine) * GROUPS + place)[:, None] * 16 + word
        own = row // 2 == quad
        column = tl.minimum(tl.program_id(0) * 8 * TILES, H - 8 * TILES) + row
        index_ptr += token * index_stride
        one = tl.load(index_ptr + tl.minimum(slot, K - 1)).to(tl.int64)
        other = tl.load(index_ptr + tl.minimum(slot + 1, K - 1)).to(tl.int64)
        one_there = (slot < K) & (one >= 0) & (one < E)
        other_there = (slot + 1 < K) & (other >= 0) & (other < E)
        one = (tl.minimum(tl.maximum(one, 0), E - 1) * H + column) * GROUPS + place
        other = (tl.minimum(tl.maximum(other, 0), E - 1) * H + column) * GROUPS + place
        one_ptr = values_ptr + one[:, None] * 4 + word
        other_ptr = values_ptr + other[:, None] * 4 + word
        tile: tl.constexpr = 8 * GROUPS
        step: tl.constexpr = 4 * SHARE
        sums = ()
        for p in tl.static_range(2 * TILES):
            sums = sums + (tl.zeros((32 * WARPS,), tl.float32),)
        following = _tiles(one_ptr, other_ptr, scale_ptr + one, scale_ptr + other, 0, tile, step, TILES, UNROLL)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        if AHEAD:
            columns = _xs(x_ptr, 0, 0, own, place, step, UNROLL, True)
        for start in tl.range(0, GROUPS, step * UNROLL, num_stages=STAGES):
            begin = tl.minimum(start, GROUPS - step * UNROLL)  # the last tile begins in the one before
            loaded = following
            after = tl.minimum(start + step * UNROLL, GROUPS - step * UNROLL)
            if AHEAD:
                said = columns
                columns = _xs(x_ptr, after, start + step * UNROLL, own, place, step, UNROLL, True)
                following = _tiles(one_ptr, other_ptr, scale_ptr + one, scale_ptr + other, after, tile, step, TILES, UNROLL)
            else:
                said = _xs(x_ptr, begin, start, own, place, step, UNROLL, True)
            zero = _start(thread % 32, FENCE)
            for u in tl.static_range(UNROLL):
                x = ()
                for i in tl.static_range(4):
                    x += (_words(said[4 * u + i]),)
                added = ()
                for p in tl.static_range(TILES):
                    s, t = _group(loaded[2 * (u * TILES + p)], loaded[2 * (u * TILES + p) + 1], x, zero, True)
                    added += (sums[2 * p] + s * _power(loaded[2 * (UNROLL * TILES + u * TILES + p)]), sums[2 * p + 1] + t * _power(loaded[2 * (UNROLL * TILES + u * TILES + p) + 1]))
                sums = added
            if not AHEAD and step * UNROLL < GROUPS:
                following = _tiles(one_ptr, other_ptr, scale_ptr + one, scale_ptr + other, after, tile, step, TILES, UNROLL)
        shares_ptr += token * shares_stride
        one_share = tl.load(shares_ptr + slot, mask=one_there, other=0.0).to(tl.float32) * scaling
        other_share = tl.load(shares_ptr + slot + 1, mask=other_there, other=0.0).to(tl.float32) * scaling
        for p in tl.static_range(TILES):
            y = tl.where(one_there, sums[2 * p] * one_share, 0.0)
            y += tl.where(other_there, sums[2 * p + 1] * other_share, 0.0)
            y = tl.sum(tl.sum(tl.reshape(y, (WARPS, 8, 4)), 2), 0)
            out = tl.minimum(tl.program_id(0) * 8 * TILES, H - 8 * TILES) + p * 8 + tl.arange(0, 8)
            if BIASED:
                for k in tl.static_range(K):
                    expert = tl.load(index_ptr + k).to(tl.int64)
                    here = (expert >= 0) & (expert < E)
                    share = tl.load(shares_ptr + k, mask=here, other=0.0).to(tl.float32) * scaling
                    bias = tl.load(bias_ptr + expert * H + out, mask=here, other=0.0).to(tl.float32)
                    y += bias * share
            if RESIDUAL:
                y += tl.load(residual_ptr + token * residual_stride + out).to(tl.float32)
            tl.store(out_ptr + token * H + out, y.to(out_ptr.dtype.element_ty))

    mma_gate_up_kernel = Kernel(_mma_gate_up_kernel)
    mma_down_kernel = Kernel(_mma_down_kernel)


def launch_mma_experts(x, index, weights, parts, residual, out, how, tiles):  # type: ignore[no-untyped-def]
    """Write what the experts return."""
    states = first_product(x, index, parts, how, tiles[0])
    second_product(states, index, weights, parts, residual, out, how, tiles[1])


def first_product(x, index, parts, how, tile):
    gate_up, bias = parts.gate_up, parts.biases[0]
    experts, hidden_size, size = parts.down.shape
    tokens, top_k = index.shape
    x, x_stride = rows.flatten(x)
    index, index_stride = rows.flatten(index)
    states = torch.empty(tokens, top_k, size, dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    with backend.device_guard(x):
        mma_gate_up_kernel.launch(
            (-(-size // (8 * tile[0])), top_k, tokens),
            tile[1],
            (
                x.view(torch.int32), index, gate_up.values.view(torch.int32), gate_up.scale,
                x if bias is None else bias, states,
            ),
            (),
            (x_stride // 2, index_stride),
            (how.alpha, how.largest, how.shift),
            (
                experts, top_k, hidden_size // 32, size, how.activation, how.bounded, how.interleaved,
                bias is not None, overlap, *tile[:3], tile[3] == 1, 1, tile[4],
            ),
            overlap=overlap,
        )  # fmt: skip
    return states


def second_product(states, index, weights, parts, residual, out, how, tile):
    down, bias = parts.down, parts.biases[1]
    experts, hidden_size, size = down.shape
    tokens, top_k = index.shape
    index, index_stride = rows.flatten(index)
    weights, weights_stride = rows.flatten(weights)
    added, added_stride = (out, hidden_size) if residual is None else rows.flatten(residual)
    pairs = 1 << ((top_k + 1) // 2 - 1).bit_length()
    overlap = overlaps(states)
    with backend.device_guard(states):
        mma_down_kernel.launch(
            (-(-hidden_size // (8 * tile[0])), tokens, 1),
            tile[1],
            (
                states.view(torch.int32), index, weights, down.values.view(torch.int32), down.scale,
                states if bias is None else bias, added, out,
            ),
            (),
            (index_stride, weights_stride, added_stride),
            (how.scaling,),
            (
                experts, top_k, size // 32, hidden_size, bias is not None, residual is not None, overlap,
                pairs, *tile[:3], tile[3] == 1, 1, tile[4],
            ),
            overlap=overlap,
        )  # fmt: skip
