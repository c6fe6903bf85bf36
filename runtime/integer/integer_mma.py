"""Words of 4-bit integers times 16 bits on NVIDIA's matrix units: instructions that Triton has no words for.

A product `m16n8k16` takes eight weights of each thread: of thread `4 r + q` of a warp, four of row `r` and four of
row `r + 8`. It multiplies them with what the threads `4 n + q` say of column `n` of eight, sums over the four `q`, and
gives thread `4 r + q` the columns `2 q` and `2 q + 1` of both rows. So the weights need not be brought to where a
product of matrices would want them: a thread multiplies the words that it has loaded.

Integers `i` and `i + 4` of a word, 16 bits apart, become a pair of 16-bit numbers by one operation, `base + q` with
128 in bf16 and 1024 in fp16, and `q - zero` by one more, exactly: 12 instructions a word with its shifts and
products, where on the ordinary units it takes twenty.

What lies with which thread is for the compiler to say. A warp's threads are told which they should be, and what they
sum up is no number where that is wrong.
"""

from __future__ import annotations

from ..core import backend


def _products(half: bool, sets: int) -> list[str]:
    """Return the unpacking and the products; operands are those of `_instructions`."""
    kind, words = "f16" if half else "bf16", 4 * sets
    zeros = f"${words + 8 + 16 * sets + 1}", f"${words + 8 + 16 * sets + 2}"
    lines: list[str] = []
    before = ["none, none, none, none"] * sets
    for word in range(4):
        for name, source, zero in (("w", words + word, zeros[0]), ("v", words + 4 + word, zeros[1])):
            for place in range(4):
                read = f"${source}"
                if place:
                    lines.append(f"shr.u32 part, ${source}, {4 * place};")
                    read = "part"
                lines += [
                    f"lop3.b32 {name}{place}, {read}, 0x000F000F, base, 0xEA;",
                    f"fma.rn.{kind}x2 {name}{place}, {name}{place}, one, {zero};",
                ]
        for one, other in ((0, 1), (2, 3)):
            for number in range(sets):
                x = words + 8 + 16 * number + 4 * word
                sums = ", ".join(f"sum{number}_{place}" for place in range(4))
                lines.append(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{sums}}}, "
                    f"{{w{one}, v{one}, w{other}, v{other}}}, {{${x + one}, ${x + other}}}, {{{before[number]}}};"
                )
                before[number] = sums
    return lines


def _instructions(half: bool, sets: int) -> str:
    """Return four sums of each set of eight columns, of four words of row `r` and four of row `r + 8`.

    Operands: the sums, the words, 16 words of pairs of each set, which thread of its warp a thread should be, and
    pairs of `-base - zero` of either row.
    """
    base, one = (0x64006400, 0x3C003C00) if half else (0x43004300, 0x3F803F80)
    lines = [
        ".reg .b32 w<4>, v<4>, part, base, one, lane;",
        ".reg .f32 none, right;",
        ".reg .pred wrong;",
        *(f".reg .f32 sum{number}_<4>;" for number in range(sets)),
        f"mov.b32 base, {base:#x};",
        f"mov.b32 one, {one:#x};",
        "mov.f32 none, 0f00000000;",
        "mov.u32 lane, %laneid;",
        f"setp.ne.u32 wrong, lane, ${4 * sets + 8 + 16 * sets};",
        "selp.f32 right, 0f7FC00000, 0f3F800000, wrong;",
        *_products(half, sets),
        *(f"mul.f32 ${place}, sum{place // 4}_{place % 4}, right;" for place in range(4 * sets)),
    ]
    return "{\n" + "\n".join(lines) + "\n}"


def _squares(half: bool) -> str:
    """Return what the products of 16 words of pairs ($2 to $17) with themselves sum up to, in row `r` ($0, $1)."""
    kind = "f16" if half else "bf16"
    lines = [".reg .f32 sum<4>, none;", ".reg .b32 no;", "mov.f32 none, 0f00000000;", "mov.b32 no, 0;"]
    given = "none, none, none, none"
    for x in range(2, 18, 2):
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{sum0, sum1, sum2, sum3}}, "
            f"{{${x}, no, ${x + 1}, no}}, {{${x}, ${x + 1}}}, {{{given}}};"
        )
        given = "sum0, sum1, sum2, sum3"
    return "{\n" + "\n".join([*lines, "mov.f32 $0, sum0;", "mov.f32 $1, sum1;"]) + "\n}"


_PAIRS = "\n".join(
    f"prmt.b32 ${place}, ${4 + place // 2}, ${6 + place // 2}, {'0x7632' if place % 2 else '0x5410'};"
    for place in range(4)
)

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.mma_fp4 import four_words

    PAIRS = tl.constexpr(_PAIRS)
    PRODUCTS = tl.constexpr(_instructions(False, 1))
    PRODUCTS_HALF = tl.constexpr(_instructions(True, 1))
    PRODUCTS_OF_TWO = tl.constexpr(_instructions(False, 2))
    PRODUCTS_OF_TWO_HALF = tl.constexpr(_instructions(True, 2))
    SQUARES = tl.constexpr(_squares(False))
    SQUARES_HALF = tl.constexpr(_squares(True))
    TIMES = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
    TIMES_HALF = tl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")

    @triton.jit
    def _wide(word, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return both numbers of a word in fp32."""
        if HALF:
            low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
            return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            return (word << 16).to(tl.float32, bitcast=True), (word & -0x10000).to(tl.float32, bitcast=True)

    @triton.jit
    def pairs_of(words, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return eight columns, words `[T, 4]`, as pairs of column `i` and `i + 4`, each `[T]`."""
        w = four_words(words)
        if PTX:
            return tl.inline_asm_elementwise(
                PAIRS,
                "=&r,=&r,=&r,=&r,r,r,r,r",
                [w[0], w[1], w[2], w[3]],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=True,
                pack=1,
            )
        else:
            return (
                (w[0] & 0xFFFF) | (w[2] << 16),
                ((w[0] >> 16) & 0xFFFF) | (w[2] & -0x10000),
                (w[1] & 0xFFFF) | (w[3] << 16),
                ((w[1] >> 16) & 0xFFFF) | (w[3] & -0x10000),
            )

    @triton.jit
    def times(x, gain, HALF: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the products of two words of pairs, rounded; without PTX those of bf16 are cut off."""
        if PTX:
            none = tl.full(x.shape, -0x7FFF8000, tl.int32)
            return tl.inline_asm_elementwise(
                TIMES_HALF if HALF else TIMES, "=r,r,r,r", [x, gain, none], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            low, high = _wide(x, HALF)
            low_gain, high_gain = _wide(gain, HALF)
            low, high = low * low_gain, high * high_gain
            if HALF:
                low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
                return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
            else:
                return (high.to(tl.int32, bitcast=True) & -0x10000) | ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)

    @triton.jit
    def _by_rows(low_w, high_w, x, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return, for pairs of weights and of columns, what a product gives each thread of one row."""
        low, high = _wide(x, HALF)
        warps: tl.constexpr = x.shape[0] // 32
        both = tl.reshape(low_w, (warps, 8, 1, 4)) * tl.reshape(low, (warps, 1, 8, 4))
        both += tl.reshape(high_w, (warps, 8, 1, 4)) * tl.reshape(high, (warps, 1, 8, 4))
        even, odd = tl.split(tl.reshape(tl.sum(both, 3), (warps, 8, 4, 2)))
        return tl.reshape(even, (32 * warps,)), tl.reshape(odd, (32 * warps,))

    @triton.jit
    def squares_of(x, HALF: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what 16 words of pairs give multiplied by themselves: columns `2 q` and `2 q + 1` of row `r`."""
        if PTX:
            return tl.inline_asm_elementwise(
                SQUARES_HALF if HALF else SQUARES,
                "=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                x,
                dtype=(tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        else:
            even = tl.zeros(x[0].shape, tl.float32)
            odd = even
            for place in tl.static_range(16):
                low, high = _wide(x[place], HALF)
                more, further = _by_rows(low, high, x[place], HALF)
                even += more
                odd += further
            return even, odd

    @triton.jit
    def _numbers(words, place: tl.constexpr, zero):  # type: ignore[no-untyped-def]
        """Return integers `place` and `place + 4` of a word less the zero, in fp32."""
        low = ((words >> (4 * place)) & 15) - zero
        high = ((words >> (4 * place + 16)) & 15) - zero
        return low.to(tl.float32), high.to(tl.float32)

    @triton.jit
    def integer_products(one, other, x, thread, one_zero, other_zero, HALF: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return, of each set of eight columns, columns `2 q` and `2 q + 1` of row `r` and of row `r + 8`, `[T]` each.

        Args:
            one: words of row `r` of thread `4 r + q` of each warp, `[T, 4]`.
            other: of row `r + 8`.
            x: of each set 16 words of pairs; of thread `4 n + q` those of column `n`.
            thread: its number in its warp.
            one_zero: of the group of `one`, `[T]`, int32.
            other_zero: of that of `other`.
            HALF: whether pairs are fp16, else bf16.
            PTX: whether in instructions of NVIDIA's; else, where a layout means nothing, by sums.
        """
        w = four_words(one)
        v = four_words(other)
        SETS: tl.constexpr = len(x)
        if PTX:
            base: tl.constexpr = 0xE400 if HALF else 0xC300
            rest = (thread, (one_zero + base) * 0x10001, (other_zero + base) * 0x10001)
            if SETS == 1:
                return tl.inline_asm_elementwise(
                    PRODUCTS_HALF if HALF else PRODUCTS,
                    "=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                    w + v + x[0] + rest,
                    dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                    is_pure=True,
                    pack=1,
                )
            else:
                return tl.inline_asm_elementwise(
                    PRODUCTS_OF_TWO_HALF if HALF else PRODUCTS_OF_TWO,
                    "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,"
                    "r,r,r,r,r,r,r,r",
                    w + v + x[0] + x[1] + rest,
                    dtype=(
                        tl.float32,
                        tl.float32,
                        tl.float32,
                        tl.float32,
                        tl.float32,
                        tl.float32,
                        tl.float32,
                        tl.float32,
                    ),
                    is_pure=True,
                    pack=1,
                )
        else:
            found = ()
            for number in tl.static_range(SETS):
                s0 = tl.zeros(one_zero.shape, tl.float32)
                s1, s2, s3 = s0, s0, s0
                for word in tl.static_range(4):
                    for place in tl.static_range(4):
                        said = x[number][4 * word + place]
                        low, high = _numbers(w[word], place, one_zero)
                        more, further = _by_rows(low, high, said, HALF)
                        s0 += more
                        s1 += further
                        low, high = _numbers(v[word], place, other_zero)
                        more, further = _by_rows(low, high, said, HALF)
                        s2 += more
                        s3 += further
                found += (s0, s1, s2, s3)  # type: ignore[assignment]
            return found
