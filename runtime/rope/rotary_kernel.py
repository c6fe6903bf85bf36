"""The kernel of `rotary`: B batch, S sequence, H and Hk heads, D head_dim, R <= D the rotated columns."""

from __future__ import annotations

from ..core import backend
from ..launching.launch import Kernel

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow

    @triton.jit
    def _pairs(ptr, mask, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load columns a and b of every pair, each [BLOCK_ROWS, BLOCK], from rows at `ptr`."""
        if INTERLEAVED:
            col = tl.arange(0, 2 * BLOCK)[None, :]
            x = tl.load(ptr + col, mask=mask & (col < R), other=0.0)
            first, second = tl.split(tl.reshape(x, (BLOCK_ROWS, BLOCK, 2)))
        else:
            pair = tl.arange(0, BLOCK)[None, :]
            first = tl.load(ptr + pair, mask=mask & (pair < R // 2), other=0.0)
            second = tl.load(ptr + R // 2 + pair, mask=mask & (pair < R // 2), other=0.0)
        return first, second

    @triton.jit
    def _table(ptr, R: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_TABLE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load the cos or sin of columns a and b of every pair, each [1, BLOCK] in fp32."""
        if HALF_TABLE:
            pair = tl.arange(0, BLOCK)[None, :]
            first = tl.load(ptr + pair, mask=pair < R // 2, other=0.0).to(tl.float32)
            return first, first
        first, second = _pairs(ptr + tl.zeros((1, 1), tl.int32), True, R, INTERLEAVED, 1, BLOCK)
        return first.to(tl.float32), second.to(tl.float32)

    @triton.jit
    def _rounded(x, DTYPE: tl.constexpr, ROUND: tl.constexpr):  # type: ignore[no-untyped-def]
        return x.to(DTYPE).to(tl.float32) if ROUND else x

    @triton.jit
    def _rotate(  # type: ignore[no-untyped-def]
        x_row,
        out_row,
        live,
        cos_a,
        cos_b,
        sin_a,
        sin_b,
        D: tl.constexpr,
        R: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        DEINTERLEAVE: tl.constexpr,
        ROUND: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_PAIRS: tl.constexpr,
        BLOCK_PASS: tl.constexpr,
    ):
        DTYPE: tl.constexpr = x_row.dtype.element_ty
        OUT: tl.constexpr = out_row.dtype.element_ty
        a, b = _pairs(x_row, live, R, INTERLEAVED, BLOCK_HEADS, BLOCK_PAIRS)
        a, b = a.to(tl.float32), b.to(tl.float32)
        out_a = _rounded(a * cos_a, DTYPE, ROUND) - _rounded(b * sin_a, DTYPE, ROUND)
        out_b = _rounded(b * cos_b, DTYPE, ROUND) + _rounded(a * sin_b, DTYPE, ROUND)
        if INTERLEAVED and not DEINTERLEAVE:
            col = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
            out = tl.reshape(tl.join(out_a, out_b), (BLOCK_HEADS, 2 * BLOCK_PAIRS))
            tl.store(out_row + col, out.to(OUT), mask=live & (col < R))
        else:
            pair = tl.arange(0, BLOCK_PAIRS)[None, :]
            tl.store(out_row + pair, out_a.to(OUT), mask=live & (pair < R // 2))
            tl.store(out_row + R // 2 + pair, out_b.to(OUT), mask=live & (pair < R // 2))
        if R < D:
            col = R + tl.arange(0, BLOCK_PASS)[None, :]
            passed = tl.load(x_row + col, mask=live & (col < D), other=0.0)
            tl.store(out_row + col, passed.to(OUT), mask=live & (col < D))

    @triton.jit(do_not_specialize=["token_count", "tokens", "q_heads", "k_heads"])
    def _rotary_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        cos_ptr,
        sin_ptr,
        q_out_ptr,
        k_out_ptr,
        token_count,
        tokens,
        q_heads,
        k_heads,
        q_stride_b,
        q_stride_s,
        q_stride_h,
        k_stride_b,
        k_stride_s,
        k_stride_h,
        q_out_stride_b,
        q_out_stride_s,
        q_out_stride_h,
        k_out_stride_b,
        k_out_stride_s,
        k_out_stride_h,
        table_stride_b,
        table_stride_s,
        D: tl.constexpr,
        R: tl.constexpr,
        ONE_SEQUENCE: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        HALF_TABLE: tl.constexpr,
        DEINTERLEAVE: tl.constexpr,
        ROUND: tl.constexpr,
        INVERSE: tl.constexpr,
        BLOCK_HEADS: tl.constexpr,
        BLOCK_PAIRS: tl.constexpr,
        BLOCK_PASS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Rotate some heads of a token; with INVERSE by the transposed matrix, for gradients."""
        follow(OVERLAP)
        q_blocks = tl.cdiv(q_heads, BLOCK_HEADS)
        block = tl.program_id(0)
        token = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        if token >= token_count:
            return
        b = tl.zeros((), tl.int64)
        s = token
        if not ONE_SEQUENCE:
            b = token // tokens
            s = token % tokens
        table = b * table_stride_b + s * table_stride_s
        cos_a, cos_b = _table(cos_ptr + table, R, INTERLEAVED, HALF_TABLE, BLOCK_PAIRS)
        sin_a, sin_b = _table(sin_ptr + table, R, INTERLEAVED, HALF_TABLE, BLOCK_PAIRS)
        if INVERSE:
            sin_a, sin_b = -sin_b, -sin_a
        if block < q_blocks:
            head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            x_row = q_ptr + b * q_stride_b + s * q_stride_s + head.to(tl.int64) * q_stride_h
            out_row = q_out_ptr + b * q_out_stride_b + s * q_out_stride_s + head.to(tl.int64) * q_out_stride_h
            _rotate(
                x_row, out_row, head < q_heads, cos_a, cos_b, sin_a, sin_b,
                D, R, INTERLEAVED, DEINTERLEAVE, ROUND, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_PASS,
            )  # fmt: skip
        else:
            head = (block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
            x_row = k_ptr + b * k_stride_b + s * k_stride_s + head.to(tl.int64) * k_stride_h
            out_row = k_out_ptr + b * k_out_stride_b + s * k_out_stride_s + head.to(tl.int64) * k_out_stride_h
            _rotate(
                x_row, out_row, head < k_heads, cos_a, cos_b, sin_a, sin_b,
                D, R, INTERLEAVED, DEINTERLEAVE, ROUND, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_PASS,
            )  # fmt: skip

    rotary_kernel = Kernel(_rotary_kernel)
