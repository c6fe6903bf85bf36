"""Weights of integers with a scale for each group of columns, as GPTQ, AWQ and compressed-tensors publish them.

A weight `[O, I]` has one scale, and one zero, for every `columns` of its elements in a row:

    W[o, i] = scale[o, i // columns] (q[o, i] - zero[o, i // columns])

Integers of 4 or 8 bits lie in words of 32, the first in the lowest bits. A word's bits become numbers without a
conversion: put into the mantissa of an fp32 whose exponent is fixed, an integer `q` is `base + q`, exactly. Sums of
`base + q` have fewer digits for `q` than sums of `q`; with 128 and 2048 as bases that is less than what an input of 16
bits has been rounded by. For an input in fp32 the base is subtracted first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import WAVE, Kernel

CASES = """
def dense(rows, cols, bits, zero):
    words = tensor(rows, cols * bits // 32, dtype=torch.int32)
    zeros = tensor(rows, cols // 128, dtype=torch.uint8) if zero else None
    return dequantized(Integers(words, tensor(rows, cols // 128), zeros, bits, 128), torch.bfloat16)

for bits in (4, 8):
    case(f"8B, down, {bits} bits", dense, LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size, bits, zero=False)
case("8B, down, zeros", dense, LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size, 4, zero=True)
"""

GROUP_BYTES = 16
"""A thread's part of a row, which has one scale."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def integers_of(words, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return the integers of words `[R, W]` as int32 `[R, W 32 / BITS]`, in their order."""
        mask: tl.constexpr = (1 << BITS) - 1
        places: tl.constexpr = 32 // BITS
        shift = tl.arange(0, places) * BITS
        apart = (words[:, :, None] >> shift[None, None, :]) & mask
        return tl.reshape(apart, (words.shape[0], words.shape[1] * places))

    @triton.jit
    def _dequantize_integers_kernel(  # type: ignore[no-untyped-def]
        values_ptr,
        scale_ptr,
        zero_ptr,
        out_ptr,
        O: tl.constexpr,  # noqa: E741
        I: tl.constexpr,  # noqa: E741
        BITS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ZERO: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_WORDS: tl.constexpr,
    ):
        """Write BLOCK_ROWS rows of BLOCK_WORDS words."""
        places: tl.constexpr = 32 // BITS
        row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        word = tl.program_id(0) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]
        there = (row < O) & (word * places < I)
        words = tl.load(values_ptr + row * (I // places) + word, mask=there, other=0)
        group = row * (I // COLUMNS) + word * places // COLUMNS
        scale = tl.load(scale_ptr + group, mask=there, other=0.0).to(tl.float32)
        zero = tl.full((BLOCK_ROWS, BLOCK_WORDS), 1 << (BITS - 1), tl.int32)
        if ZERO:
            zero = tl.load(zero_ptr + group, mask=there, other=0).to(tl.int32)
        shift = (tl.arange(0, places) * BITS)[None, None, :]
        apart = ((words[:, :, None] >> shift) & ((1 << BITS) - 1)) - zero[:, :, None]
        out = out_ptr + row[:, :, None] * I + (word * places)[:, :, None] + tl.arange(0, places)[None, None, :]
        tl.store(out, (apart.to(tl.float32) * scale[:, :, None]).to(out_ptr.dtype.element_ty), mask=there[:, :, None])

    dequantize_integers_kernel = Kernel(_dequantize_integers_kernel)


class Integers(NamedTuple):
    """A weight `[O, I]`."""

    values: Tensor
    """`[O, I bits / 32]`, int32."""
    scale: Tensor
    """`[O, I / columns]`, fp32 or 16 bits."""
    zero: Tensor | None
    """`[O, I / columns]`, uint8; None for half of the range, `2^(bits - 1)`."""
    bits: int
    """4 or 8."""
    columns: int
    order: Tensor | None = None
    """`[I]`, int32: which column of the input each column of the weight is for; None for its own."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, I)`."""
        rows, words = self.values.shape
        return rows, words * 32 // self.bits

    @property
    def nbytes(self) -> int:
        """Of all that kernels read."""
        return sum(part.nbytes for part in (self.values, self.scale, self.zero, self.order) if part is not None)


def reason_against(weight: Integers) -> str | None:
    """Return why kernels do not read such a weight: `"blocks"`; None if they do.

    A thread's 16 bytes have one scale, and all parts lie row by row on one device.
    """
    rows, cols = weight.shape
    parts = [part for part in (weight.scale, weight.zero) if part is not None]
    lies = all(part.is_contiguous() and part.device == weight.values.device for part in (weight.values, *parts))
    whole = weight.columns > 0 and cols % weight.columns == 0 and weight.columns * weight.bits % (8 * GROUP_BYTES) == 0
    known = weight.values.dtype == torch.int32 and weight.bits in (4, 8) and weight.scale.dtype in KERNEL_DTYPES
    known = known and (weight.zero is None or weight.zero.dtype == torch.uint8)
    fits = whole and all(tuple(part.shape) == (rows, cols // weight.columns) for part in parts)
    return None if lies and known and fits and weight.values.storage_offset() % 4 == 0 else "blocks"


def dequantized(weight: Integers, dtype: torch.dtype) -> Tensor:
    """Return `[O, I]`, computed in fp32, or in fp64 where that is wanted, then rounded once to `dtype`.

    Its columns are in the weight's own order.
    """
    values = weight.values
    if dtype in KERNEL_DTYPES and backend.nothing_watches(values) and values.numel() and backend.uses_triton(values):
        if reason_against(weight) is None:
            return _launch(weight, dtype)
    return reference(weight, dtype)


def reference(weight: Integers, dtype: torch.dtype) -> Tensor:
    """Return what `dequantized` does, by torch's operators."""
    wide = torch.promote_types(dtype, torch.float32)
    zero = 1 << (weight.bits - 1) if weight.zero is None else spread(weight.zero.int(), weight.columns)
    numbers = unpacked(weight.values, weight.bits) - zero
    return (numbers.to(wide) * spread(weight.scale.to(wide), weight.columns)).to(dtype)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers of int32 words, the last axis times `32 / bits`."""
    shift = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shift) & ((1 << bits) - 1)).flatten(-2)


def packed(integers: Tensor, bits: int) -> Tensor:
    """Return integers as int32 words: the inverse of `unpacked`."""
    shift = torch.arange(0, 32, bits, dtype=torch.int64, device=integers.device)
    words = (integers.long().unflatten(-1, (-1, 32 // bits)) << shift).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def spread(of_groups: Tensor, columns: int) -> Tensor:
    """Return what each group has for each of its columns."""
    return of_groups.repeat_interleave(columns, -1)


def _launch(weight: Integers, dtype: torch.dtype) -> Tensor:
    rows, cols = weight.shape
    out = torch.empty(rows, cols, dtype=dtype, device=weight.values.device)
    block_rows, block_words = 4, 128
    words = cols * weight.bits // 32
    with backend.device_guard(weight.values):
        dequantize_integers_kernel.launch(
            (-(-words // block_words), -(-rows // block_rows), 1),
            128 // WAVE,
            (weight.values, weight.scale, weight.values if weight.zero is None else weight.zero, out),
            (),
            (),
            (),
            (rows, cols, weight.bits, weight.columns, weight.zero is not None, block_rows, block_words),
        )
    return out
