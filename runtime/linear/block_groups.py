"""Groups of a block-scaled weight (`blocks`) times one row: a thread has all 16 bytes of a group and their columns.

A chip that reads 3 TB/s of e2m1 has time for four or five instructions an element, of e4m3 for nine; so each counts:

    e2m1    all low halves of a word's four bytes become upper bytes of an fp16 at once, then all high ones: its three
            lower bits are the lowest two of the exponent and the highest of the mantissa, which is 2^-14 of it there
            and a subnormal for some. 11 instructions for 8 elements, and for each one to widen, one to multiply
    e4m3    two at a time by the conversion that NVIDIA's chips have from compute capability 8.9 on; where there is
            none, a word's even bytes become two fp16 by shifts, times 2^-8, and then the odd ones

Sums are fp32, and scaled once for a group. Which thread has what is left to the compiler, which orders the axes of a
load by how many elements lie behind each other, and axes that are alike as it likes (Triton 3.8 not as 3.6 does). So
weights are loaded as rows of words or bytes, the input by its `octets`, and either is reshaped: a group is a thread's
in both, nothing passes through shared memory, and no barrier waits in the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..launching.launch import chip_of
from .blocks import Blocks, as_read

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def row_groups(row_ptr, live, start, LAST: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load GROUPS groups of rows from number `start` on, `[rows, SIZE GROUPS]`; LAST groups has a row."""
        place = start * SIZE + tl.arange(0, SIZE * GROUPS)[None, :]
        return tl.load(row_ptr + place, mask=live & (place < LAST * SIZE), other=0.0)

    @triton.jit
    def octets(group, FOUR: tl.constexpr, BLOCK_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the first eight columns of each group from number `group` on, as one row `[8 BLOCK_GROUPS]`."""
        place = tl.arange(0, 8 * BLOCK_GROUPS)
        return (group + place // 8) * (32 if FOUR else 16) + place % 8

    @triton.jit
    def _pair(word):  # type: ignore[no-untyped-def]
        """Return the two fp16 of a word in fp32."""
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)

    @triton.jit
    def _word_sums(word, x0, x1, x2, x3, x4, x5, x6, x7, sums, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add the products of words of eight e2m1 with their columns, times 2^-14.

        The low halves of all four bytes at once become the upper bytes of an fp16 each, and then the high ones. With
        PTX in instructions of NVIDIA's: of the same in Triton its compilers make nearly twice as many.
        """
        if PTX:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 even, odd, moved, pair;
                .reg .b16 low, high;
                .reg .f32 first, second, sum;
                shl.b32 even, $1, 1;
                and.b32 even, even, 0x0E0E0E0E;
                shl.b32 moved, $1, 4;
                lop3.b32 even, moved, 0x80808080, even, 0xEA;
                shr.u32 odd, $1, 3;
                and.b32 odd, odd, 0x0E0E0E0E;
                lop3.b32 odd, $1, 0x80808080, odd, 0xEA;
                prmt.b32 pair, even, 0, 0x1404;
                mov.b32 {low, high}, pair;
                cvt.f32.f16 first, low;
                cvt.f32.f16 second, high;
                fma.rn.f32 sum, first, $2, $10;
                fma.rn.f32 sum, second, $4, sum;
                prmt.b32 pair, odd, 0, 0x1404;
                mov.b32 {low, high}, pair;
                cvt.f32.f16 first, low;
                cvt.f32.f16 second, high;
                fma.rn.f32 sum, first, $3, sum;
                fma.rn.f32 sum, second, $5, sum;
                prmt.b32 pair, even, 0, 0x3424;
                mov.b32 {low, high}, pair;
                cvt.f32.f16 first, low;
                cvt.f32.f16 second, high;
                fma.rn.f32 sum, first, $6, sum;
                fma.rn.f32 sum, second, $8, sum;
                prmt.b32 pair, odd, 0, 0x3424;
                mov.b32 {low, high}, pair;
                cvt.f32.f16 first, low;
                cvt.f32.f16 second, high;
                fma.rn.f32 sum, first, $7, sum;
                fma.rn.f32 $0, second, $9, sum;
                }""",
                "=f,r,f,f,f,f,f,f,f,f,f",
                [word, x0, x1, x2, x3, x4, x5, x6, x7, sums],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            even = ((word << 4) & -0x7F7F7F80) | ((word << 1) & 0x0E0E0E0E)
            odd = (word & -0x7F7F7F80) | ((word >> 3) & 0x0E0E0E0E)
            w0, w4 = _pair((even << 8) & -0x00FF0100)
            w1, w5 = _pair((odd << 8) & -0x00FF0100)
            w2, w6 = _pair(even & -0x00FF0100)
            w3, w7 = _pair(odd & -0x00FF0100)
            return sums + w0 * x0 + w2 * x2 + w1 * x1 + w3 * x3 + w4 * x4 + w6 * x6 + w5 * x5 + w7 * x7

    @triton.jit
    def _octet_sums(word, x_ptr, mask, sums, GROUPS: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add the products of one word of each group, `[N, R, GROUPS]`, with its octet; see `four_sums`."""
        x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (1, x_ptr.shape[0], GROUPS, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
        return _word_sums(word, x0, x1, x2, x3, x4, x5, x6, x7, sums, PTX)

    @triton.jit
    def four_sums(words, x_ptr, mask, GROUPS: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what groups of e2m1 sum up to without their scales, `[N R, GROUPS]`.

        Args:
            words: `[N R, 4 GROUPS]`, of which row `r` of `x_ptr` is multiplied with every R-th.
            x_ptr: the input's `octets`, `[R, 8 GROUPS]`.
            mask: of these.
        """
        R: tl.constexpr = x_ptr.shape[0]
        N: tl.constexpr = words.shape[0] // R
        even, odd = tl.split(tl.reshape(words, (N, R, GROUPS, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        sums = tl.zeros((N, R, GROUPS), tl.float32)
        sums = _octet_sums(w0, x_ptr, mask, sums, GROUPS, PTX)
        sums = _octet_sums(w1, x_ptr + 8, mask, sums, GROUPS, PTX)
        sums = _octet_sums(w2, x_ptr + 16, mask, sums, GROUPS, PTX)
        sums = _octet_sums(w3, x_ptr + 24, mask, sums, GROUPS, PTX)
        return tl.reshape(sums * 16384.0, (N * R, GROUPS))

    @triton.jit
    def sixteen(x_ptr, mask, GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Load the columns of groups of e4m3, `[R, 16 GROUPS]` in fp32, by their `octets` `[R, 8 GROUPS]`.

        So a thread loads the columns of its own groups; of a row it would load 16 bytes here and there.
        """
        first = tl.reshape(tl.load(x_ptr, mask=mask, other=0.0), (x_ptr.shape[0], GROUPS, 8))
        second = tl.reshape(tl.load(x_ptr + 8, mask=mask, other=0.0), (x_ptr.shape[0], GROUPS, 8))
        both = tl.permute(tl.join(first, second).to(tl.float32), (0, 1, 3, 2))
        return tl.reshape(both, (x_ptr.shape[0], 16 * GROUPS))

    @triton.jit
    def _quad_sums(word, x, sums, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Add the products of words of four e4m3 with their columns `[…, 2, 2]`; without PTX times 2^-8."""
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        if not PTX:
            w0, w2 = _pair(((word << 8) & -0x7FFF8000) | ((word << 7) & 0x3F803F80))
            w1, w3 = _pair((word & -0x7FFF8000) | ((word >> 1) & 0x3F803F80))
            return sums + w0 * x0 + w2 * x2 + w1 * x1 + w3 * x3
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            .reg .b16 low, high, one, other;
            .reg .f32 first, second, sum;
            mov.b32 {low, high}, $1;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {one, other}, pair;
            cvt.f32.f16 first, one;
            cvt.f32.f16 second, other;
            fma.rn.f32 sum, first, $2, $6;
            fma.rn.f32 sum, second, $3, sum;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {one, other}, pair;
            cvt.f32.f16 first, one;
            cvt.f32.f16 second, other;
            fma.rn.f32 sum, first, $4, sum;
            fma.rn.f32 $0, second, $5, sum;
            }""",
            "=f,r,f,f,f,f,f",
            [word, x0, x1, x2, x3, sums],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def eight_sums(loaded, x, GROUPS: tl.constexpr, DECODE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what groups of e4m3 sum up to without their scales, `[N R, GROUPS]`.

        Args:
            loaded: `[N R, 4 GROUPS]` words with PTX or DECODE, else `[N R, 16 GROUPS]` of e4m3.
            x: `sixteen`'s, `[R, 16 GROUPS]`; row `r` is multiplied with every R-th of `loaded`.
        """
        R: tl.constexpr = x.shape[0]
        N: tl.constexpr = loaded.shape[0] // R
        if PTX or DECODE:
            even, odd = tl.split(tl.reshape(loaded, (N, R, GROUPS, 2, 2)))
            w0, w2 = tl.split(even)
            w1, w3 = tl.split(odd)
            x = tl.permute(tl.reshape(x, (1, R, GROUPS, 2, 2, 2, 2)), (0, 1, 2, 5, 6, 3, 4))
            x_even, x_odd = tl.split(x)
            x0, x2 = tl.split(x_even)
            x1, x3 = tl.split(x_odd)
            sums = _quad_sums(w0, x0, tl.zeros((N, R, GROUPS), tl.float32), PTX)
            sums = _quad_sums(w1, x1, sums, PTX)
            sums = _quad_sums(w2, x2, sums, PTX)
            sums = _quad_sums(w3, x3, sums, PTX)
            if DECODE:
                sums *= 256.0
        else:
            wide = tl.reshape(loaded.to(tl.float32), (N, R, GROUPS, 16))
            sums = tl.sum(wide * tl.reshape(x, (1, R, GROUPS, 16)), axis=3)
        return tl.reshape(sums, (N * R, GROUPS))

    @triton.jit
    def block_scales(  # type: ignore[no-untyped-def]
        row_ptr,
        live,
        start,
        LAST: tl.constexpr,
        SHARING: tl.constexpr,
        EXPONENTS: tl.constexpr,
        GROUPS: tl.constexpr,
    ):
        """Load what the sums of GROUPS groups from number `start` on are multiplied by, `[rows, GROUPS]`.

        Args:
            row_ptr: where the scales of rows begin, `[rows, 1]`; `live` is their mask.
            LAST: groups of a row, of which SHARING have one scale.
        """
        group = (start + tl.arange(0, GROUPS))[None, :]
        at = row_ptr + group // SHARING
        if SHARING == 1:  # one at a time, as a thread has one group
            at = tl.multiple_of(tl.max_contiguous(at, (1, 2)), (1, 1))
        loaded = tl.load(at, mask=live & (group < LAST), other=0)
        if EXPONENTS:
            return tl.maximum(loaded.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
        else:
            return loaded.to(tl.float32)


class Read(NamedTuple):
    """A weight as kernels of one row read it."""

    values: Tensor
    """In words of 32 bits, or bytes, or e4m3."""
    scale: Tensor
    size: int
    """Elements of `values` in a group."""
    decode: bool
    """Whether e4m3 is decoded by shifts."""
    ptx: bool
    """Whether in instructions of NVIDIA's."""


def in_words(weight: Blocks) -> Read:
    """Return a weight as kernels of one row read it: as words, but for e4m3 that AMD's chips convert."""
    values, scale, decode = as_read(weight)
    chip = chip_of(values)
    ptx = chip is not None and chip.backend == "cuda" and not decode
    if ptx or decode or weight.four:
        return Read(values.view(torch.int32), scale, 4, decode, ptx)
    return Read(values, scale, 16, decode, False)
