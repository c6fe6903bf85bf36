"""Words of e2m1 times bf16 on NVIDIA's matrix units, which sum up for each thread what is its own.

A product `m16n8k16` takes eight weights of each thread: of thread `4 r + q` of a warp, four of row `r` and four of row
`r + 8`. It multiplies them with what the threads `4 n + q` say of column `n`, sums over the four `q`, and gives thread
`4 r + q` the columns `2 q` and `2 q + 1` of both rows:

    straight    only thread `4 (2 q) + q` says something, the others zeros: column `2 q` then has what the weights of
                one `q` sum up to, and a thread gets the sums of its own two words
    crossed     threads `4 (2 q) + q` and `4 (2 q + 1) + q` say the columns of one input and of another: a thread gets
                its word of row `r` times the one and its word of row `r + 8` times the other

So a thread's 16 bytes are one group, whose sum is scaled once, and seven of eight products are of zeros, for which the
matrix units have time. Instead of two instructions for each weight, to widen and to multiply, there is one for eight.

Numbers `i` and `i + 4` of a word, 16 bits apart, become a pair of bf16 by a mask, a product that copies both to where
the sign and the rest belong, and a mask; 13 instructions a word. They are 2^-126 of what they stand for, the input is
multiplied by 2^64 and the sums by 2^62: all exact. The input's pairs lie in the same order (`in_pairs`).

What lies with which thread is for the compiler to say. A warp's threads are told which they should be, and what they
sum up is no number where that is wrong.
"""

from __future__ import annotations

from ..core import backend

ROWS = 8
"""Rows of a warp's products, of each of the two words."""
UP = 2.0**64
"""What the input is multiplied by."""


def _instructions(crossed: bool) -> str:
    """Return the sums ($0, $1) of four words each ($2 to $5, $6 to $9), of 16 pairs of columns ($10 to $25).

    $26 is which thread of its warp a thread should be.
    """
    lines = [
        ".reg .b32 w<4>, v<4>, part, upper, lane;",
        ".reg .f32 sum<4>, zero, up;",
        ".reg .pred wrong;",
        "mov.f32 zero, 0f00000000;",
        "mov.u32 lane, %laneid;",
        "setp.ne.u32 wrong, lane, $26;",
        "selp.f32 up, 0f7FC00000, 0f5E800000, wrong;",  # 2^62
    ]
    before = "zero, zero, zero, zero"
    for word in range(4):
        for name, source in (("w", f"${2 + word}"), ("v", f"${6 + word}")):
            lines += [
                f"and.b32 part, {source}, 0x000F000F;",
                "mul.lo.u32 part, part, 0x1040;",
                f"and.b32 {name}0, part, 0x81C081C0;",
                f"and.b32 part, {source}, 0x00F000F0;",
                "mul.lo.u32 part, part, 0x104;",
                f"and.b32 {name}1, part, 0x81C081C0;",
                f"shr.u32 upper, {source}, 8;",
                "and.b32 part, upper, 0x000F000F;",
                "mul.lo.u32 part, part, 0x1040;",
                f"and.b32 {name}2, part, 0x81C081C0;",
                "and.b32 part, upper, 0x00F000F0;",
                "mul.lo.u32 part, part, 0x104;",
                f"and.b32 {name}3, part, 0x81C081C0;",
            ]
        for one, other in ((0, 1), (2, 3)):
            x = 10 + 4 * word
            lines.append(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {sum0, sum1, sum2, sum3}, "
                f"{{w{one}, v{one}, w{other}, v{other}}}, {{${x + one}, ${x + other}}}, {{{before}}};"
            )
            before = "sum0, sum1, sum2, sum3"
    lines += ["mul.f32 $0, sum0, up;", f"mul.f32 $1, sum{3 if crossed else 2}, up;"]
    return "{\n" + "\n".join(lines) + "\n}"


if backend.triton_installed():
    import triton
    import triton.language as tl

    STRAIGHT = tl.constexpr(_instructions(False))
    CROSSED = tl.constexpr(_instructions(True))

    @triton.jit
    def four_words(loaded):  # type: ignore[no-untyped-def]
        """Return the columns of `[T, 4]`."""
        even, odd = tl.split(tl.reshape(loaded, (loaded.shape[0], 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        return w0, w1, w2, w3

    @triton.jit
    def _raised(word, mask):  # type: ignore[no-untyped-def]
        """Return a word of two bf16 times 2^64, or zeros."""
        low = (word << 16).to(tl.float32, bitcast=True) * 18446744073709551616.0
        high = (word & -0x10000).to(tl.float32, bitcast=True) * 18446744073709551616.0
        both = (high.to(tl.int32, bitcast=True) & -0x10000) | ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
        return tl.where(mask, both, 0)

    @triton.jit
    def in_pairs(words, mask, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return eight columns in bf16, four words, as pairs of column `i` and `i + 4`, times 2^64; zeros outside."""
        if PTX:
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
                [words[0], words[1], words[2], words[3], tl.where(mask, 0x5F805F80, 0)],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            x04 = _raised((words[0] & 0xFFFF) | (words[2] << 16), mask)
            x15 = _raised(((words[0] >> 16) & 0xFFFF) | (words[2] & -0x10000), mask)
            x26 = _raised((words[1] & 0xFFFF) | (words[3] << 16), mask)
            x37 = _raised(((words[1] >> 16) & 0xFFFF) | (words[3] & -0x10000), mask)
            return x04, x15, x26, x37

    @triton.jit
    def _said(x, CROSS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what a warp's even rows and its odd ones say of each thread's columns."""
        every = tl.sum(tl.reshape(x, (x.shape[0] // 32, 4, 2, 4)), 1)  # all others said zero
        even, odd = tl.split(tl.permute(every, (0, 2, 1)))
        even = tl.reshape(tl.broadcast_to(even[:, None, :], (x.shape[0] // 32, 8, 4)), (x.shape[0],))
        odd = tl.reshape(tl.broadcast_to(odd[:, None, :], (x.shape[0] // 32, 8, 4)), (x.shape[0],))
        return even, odd if CROSS else even

    @triton.jit
    def _number(word, place: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return one number of a word, times 2^-126."""
        code = word >> (4 * place)
        return (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True)

    @triton.jit
    def _pair_sum(word, place: tl.constexpr, x):  # type: ignore[no-untyped-def]
        low, high = (x << 16).to(tl.float32, bitcast=True), (x & -0x10000).to(tl.float32, bitcast=True)
        return _number(word, place) * low + _number(word, place + 4) * high

    @triton.jit
    def own_sums(one, other, x, thread, CROSS: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what two groups of each thread sum up to without their scales, `[T]` each.

        Args:
            one: words of row `r` of thread `4 r + q` of each warp, `[T, 4]`.
            other: of row `r + 8`.
            x: pairs of the group's columns, four of `in_pairs`, zeros in all threads but those that say them.
            thread: its number in its warp.
            CROSS: whether odd rows say the columns of `other`.
            PTX: whether in instructions of NVIDIA's; else, where a layout means nothing, by sums.
        """
        w = four_words(one)
        v = four_words(other)
        if PTX:
            return tl.inline_asm_elementwise(
                CROSSED if CROSS else STRAIGHT,
                "=&f,=&f" + ",r" * 25,
                [
                    w[0], w[1], w[2], w[3], v[0], v[1], v[2], v[3],
                    x[0][0], x[0][1], x[0][2], x[0][3], x[1][0], x[1][1], x[1][2], x[1][3],
                    x[2][0], x[2][1], x[2][2], x[2][3], x[3][0], x[3][1], x[3][2], x[3][3], thread,
                ],
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            s = tl.zeros((one.shape[0],), tl.float32)
            t = s
            for word in tl.static_range(4):
                for place in tl.static_range(4):
                    even, odd = _said(x[word][place], CROSS)
                    s += _pair_sum(w[word], place, even)
                    t += _pair_sum(v[word], place, odd)
            return s * 4611686018427387904.0, t * 4611686018427387904.0

    @triton.jit
    def exponent_scales(loaded):  # type: ignore[no-untyped-def]
        """Return what exponents stand for."""
        return tl.maximum(loaded.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
