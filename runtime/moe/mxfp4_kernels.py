"""The kernels of MXFP4 experts; how their programs divide the work is said in `mxfp4_experts`."""

from __future__ import annotations

from ..core import backend
from ..launching.launch import Kernel

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.mma_fp4 import exponent_scales, four_words, in_pairs, own_sums
    from .form import gate_experts

    @triton.jit
    def _step(  # type: ignore[no-untyped-def]
        one_ptr,
        other_ptr,
        one_scale_ptr,
        other_scale_ptr,
        start,
        TILE: tl.constexpr,
        STEP: tl.constexpr,
        TILES: tl.constexpr,
        UNROLL: tl.constexpr,
    ):
        """Load the words of UNROLL steps from group `start` on, of either row of each tile, and then their scales."""
        loaded = ()
        for u in tl.static_range(UNROLL):
            for tile in tl.static_range(TILES):
                at = (tile * TILE + start + u * STEP) * 4
                loaded += (tl.load(one_ptr + at), tl.load(other_ptr + at))  # type: ignore[assignment]
        for u in tl.static_range(UNROLL):
            for tile in tl.static_range(TILES):
                at = tile * TILE + start + u * STEP
                loaded += (tl.load(one_scale_ptr + at), tl.load(other_scale_ptr + at))  # type: ignore[assignment]
        return loaded

    @triton.jit
    def _states(  # type: ignore[no-untyped-def]
        states_ptr, begin, start, group, says, STEP: tl.constexpr, UNROLL: tl.constexpr
    ):
        """Load the words of UNROLL steps of states from group `begin` on, zeros before group `start`."""
        loaded = ()
        for u in tl.static_range(UNROLL):
            new = (says & (group + begin + u * STEP >= start))[:, None]
            for i in tl.static_range(4):
                at = states_ptr + (begin + u * STEP) * 16 + 4 * i
                loaded += (tl.load(at, mask=new, other=0),)  # type: ignore[assignment]
        return loaded

    @triton.jit
    def _add(  # type: ignore[no-untyped-def]
        sums, loaded, x, thread, CROSS: tl.constexpr, PTX: tl.constexpr, U: tl.constexpr, UNROLL: tl.constexpr
    ):
        """Add step U of what was loaded, times the columns that its rows share."""
        added = ()
        TILES: tl.constexpr = len(sums) // 2
        for tile in tl.static_range(TILES):
            s, t = own_sums(
                loaded[2 * (U * TILES + tile)], loaded[2 * (U * TILES + tile) + 1], x, thread % 32, CROSS, PTX
            )
            s *= exponent_scales(loaded[2 * ((UNROLL + U) * TILES + tile)])
            t *= exponent_scales(loaded[2 * ((UNROLL + U) * TILES + tile) + 1])
            added += (sums[2 * tile] + s, sums[2 * tile + 1] + t)  # type: ignore[assignment]
        return added

    @triton.jit
    def _mxfp4_gate_up_kernel(  # type: ignore[no-untyped-def]
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
        PTX: tl.constexpr,
        TILES: tl.constexpr,
        WARPS: tl.constexpr,
        UNROLL: tl.constexpr,
        AHEAD: tl.constexpr,
    ):
        """Compute 8 TILES columns of one token's expert; `x_ptr` is of words, GROUPS has a row."""
        if OVERLAP:
            # In this order: once the next kernel runs, what came before this one, the experts' numbers, is there.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        slot = tl.program_id(1)
        token = tl.program_id(2).to(tl.int64)
        expert = tl.load(index_ptr + token * index_stride + slot).to(tl.int64)
        expert = tl.minimum(tl.maximum(expert, 0), E - 1)
        thread = tl.arange(0, 32 * WARPS)
        row = thread % 32 // 4
        group = thread // 32 * 4 + thread % 4
        says = row == 2 * (thread % 4)
        word = tl.arange(0, 4)[None, :]
        first = tl.minimum(tl.program_id(0) * 8 * TILES, M - 8 * TILES)
        gate = (first + row) * 2 if INTERLEAVED else first + row
        place = (expert * (2 * M) + gate) * GROUPS + group
        up: tl.constexpr = GROUPS if INTERLEAVED else M * GROUPS  # groups from a gate to its up
        tile_size: tl.constexpr = 16 * GROUPS if INTERLEAVED else 8 * GROUPS
        step: tl.constexpr = 4 * WARPS
        last: tl.constexpr = GROUPS - step * UNROLL
        x_ptr += token * x_stride + group[:, None] * 16 + word
        gate_ptr = values_ptr + place[:, None] * 4 + word
        up_ptr = gate_ptr + up * 4
        scale_ptr += place
        sums = ()
        for _ in tl.static_range(2 * TILES):
            sums += (tl.zeros((32 * WARPS,), tl.float32),)  # type: ignore[assignment]
        if AHEAD:
            following = _step(gate_ptr, up_ptr, scale_ptr, scale_ptr + up, 0, tile_size, step, TILES, UNROLL)
        for start in tl.range(0, GROUPS, step * UNROLL):
            begin = tl.minimum(start, last)
            if AHEAD:
                loaded = following
                after = tl.minimum(start + step * UNROLL, last)
                following = _step(gate_ptr, up_ptr, scale_ptr, scale_ptr + up, after, tile_size, step, TILES, UNROLL)
            else:
                loaded = _step(gate_ptr, up_ptr, scale_ptr, scale_ptr + up, begin, tile_size, step, TILES, UNROLL)
            for u in tl.static_range(UNROLL):
                at = begin + u * step
                new = says & (group + at >= start)
                x = ()
                for i in tl.static_range(4):
                    x += (in_pairs(four_words(tl.load(x_ptr + at * 16 + 4 * i)), new, PTX),)  # type: ignore[assignment]
                sums = _add(sums, loaded, x, thread, False, PTX, u, UNROLL)
        for tile in tl.static_range(TILES):
            gate = tl.sum(tl.sum(tl.reshape(sums[2 * tile], (WARPS, 8, 4)), 2), 0)
            ups = tl.sum(tl.sum(tl.reshape(sums[2 * tile + 1], (WARPS, 8, 4)), 2), 0)
            column = first + tile * 8 + tl.arange(0, 8)
            if BIASED:
                biases = bias_ptr + expert * (2 * M) + (column * 2 if INTERLEAVED else column)
                gate += tl.load(biases).to(tl.float32)
                ups += tl.load(biases + (1 if INTERLEAVED else M)).to(tl.float32)
            gated = gate_experts(gate, ups, scaling, limit, offset, ACTIVATION, BOUNDED) * 18446744073709551616.0
            paired = column // 8 * 8 + column % 4 * 2 + column % 8 // 4
            tl.store(out_ptr + (token * K + slot) * M + paired, gated.to(out_ptr.dtype.element_ty))

    @triton.jit
    def _mxfp4_down_kernel(  # type: ignore[no-untyped-def]
        states_ptr,
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
        PTX: tl.constexpr,
        PAIRS: tl.constexpr,
        TILES: tl.constexpr,
        WARPS: tl.constexpr,
        UNROLL: tl.constexpr,
        AHEAD: tl.constexpr,
    ):
        """Compute 8 TILES columns of one token's output; each warp has two of the experts, of which there are PAIRS.

        The first words are loaded before the states are there; the experts' numbers were when the kernel before this
        one let it start.
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(1).to(tl.int64)
        thread = tl.arange(0, 32 * WARPS)
        row = thread % 32 // 4
        group = thread // 32 // PAIRS * 4 + thread % 4
        slot = thread // 32 % PAIRS * 2
        says = row // 2 == thread % 4
        word = tl.arange(0, 4)[None, :]
        index_ptr += token * index_stride
        one = tl.load(index_ptr + tl.minimum(slot, K - 1)).to(tl.int64)
        other = tl.load(index_ptr + tl.minimum(slot + 1, K - 1)).to(tl.int64)
        one_here = (slot < K) & (one >= 0) & (one < E)  # another process has the others
        other_here = (slot + 1 < K) & (other >= 0) & (other < E)
        first = tl.minimum(tl.program_id(0) * 8 * TILES, H - 8 * TILES)
        one = (tl.minimum(tl.maximum(one, 0), E - 1) * H + first + row) * GROUPS + group
        other = (tl.minimum(tl.maximum(other, 0), E - 1) * H + first + row) * GROUPS + group
        tile_size: tl.constexpr = 8 * GROUPS
        step: tl.constexpr = 4 * (WARPS // PAIRS)
        last: tl.constexpr = GROUPS - step * UNROLL
        said = tl.minimum(slot + row % 2, K - 1)
        states_ptr += ((token * K + said) * GROUPS + group)[:, None] * 16 + word
        one_ptr = values_ptr + one[:, None] * 4 + word
        other_ptr = values_ptr + other[:, None] * 4 + word
        one_scale_ptr = scale_ptr + one
        other_scale_ptr = scale_ptr + other
        sums = ()
        for _ in tl.static_range(2 * TILES):
            sums += (tl.zeros((32 * WARPS,), tl.float32),)  # type: ignore[assignment]
        following = _step(one_ptr, other_ptr, one_scale_ptr, other_scale_ptr, 0, tile_size, step, TILES, UNROLL)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        columns = _states(states_ptr, 0, 0, group, says, step, UNROLL)
        for start in tl.range(0, GROUPS, step * UNROLL):
            after = tl.minimum(start + step * UNROLL, last)
            loaded, known = following, columns
            if AHEAD:
                columns = _states(states_ptr, after, start + step * UNROLL, group, says, step, UNROLL)
                following = _step(
                    one_ptr, other_ptr, one_scale_ptr, other_scale_ptr, after, tile_size, step, TILES, UNROLL
                )
            for u in tl.static_range(UNROLL):
                x = ()
                for i in tl.static_range(4):
                    x += (four_words(known[4 * u + i]),)  # type: ignore[assignment]
                sums = _add(sums, loaded, x, thread, True, PTX, u, UNROLL)
            if step * UNROLL < GROUPS and not AHEAD:
                columns = _states(states_ptr, after, start + step * UNROLL, group, says, step, UNROLL)
                following = _step(
                    one_ptr, other_ptr, one_scale_ptr, other_scale_ptr, after, tile_size, step, TILES, UNROLL
                )
        shares_ptr += token * shares_stride
        one_share = tl.load(shares_ptr + slot, mask=one_here, other=0.0).to(tl.float32) * scaling
        other_share = tl.load(shares_ptr + slot + 1, mask=other_here, other=0.0).to(tl.float32) * scaling
        for tile in tl.static_range(TILES):
            each = tl.where(one_here, sums[2 * tile] * one_share, 0.0)
            each += tl.where(other_here, sums[2 * tile + 1] * other_share, 0.0)
            y = tl.sum(tl.sum(tl.reshape(each, (WARPS, 8, 4)), 2), 0)
            column = first + tile * 8 + tl.arange(0, 8)
            if BIASED:
                for k in tl.static_range(K):
                    expert = tl.load(index_ptr + k).to(tl.int64)
                    here = (expert >= 0) & (expert < E)
                    share = tl.load(shares_ptr + k, mask=here, other=0.0).to(tl.float32) * scaling
                    y += tl.load(bias_ptr + expert * H + column, mask=here, other=0.0).to(tl.float32) * share
            if RESIDUAL:
                y += tl.load(residual_ptr + token * residual_stride + column).to(tl.float32)
            tl.store(out_ptr + token * H + column, y.to(out_ptr.dtype.element_ty))

    mxfp4_gate_up_kernel = Kernel(_mxfp4_gate_up_kernel)
    mxfp4_down_kernel = Kernel(_mxfp4_down_kernel)
