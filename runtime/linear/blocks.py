"""Weights whose blocks have a scale each, as checkpoints are published: 8 bits of e4m3, or two 4 bits of e2m1 a byte.

A weight `[O, I]` has one scale for every `rows` times `columns` of its elements:

    W[o, i] = scale[o // rows, i // columns] q[o, i]

e4m3 with blocks of 128 x 128 and scales in fp32, or as exponents (DeepSeek, Qwen: `weight_scale_inv`), and e2m1 with
exponents of 32 columns of a row (OCP Microscaling Formats 1.0: MXFP4, gpt-oss: `*_blocks`, `*_scales`). An exponent
is a byte b and stands for 2^(b - 127); of two elements in a byte the low half is the first.

Kernels read 16 bytes at a time, a *group* of one block. e2m1 becomes an fp32 by two shifts: its exponent is put into
the lowest bits of an fp32's, which is 2^-126 of it, a subnormal for some. That stays exact, since what it is
multiplied with has 2^64 as a factor. e4m3 is decoded likewise, as an fp16, where a chip has no conversion; a byte that
is no number then counts as 480. Kernels of one row have ways of their own (`block_groups`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..launching.launch import WAVE, Kernel, chip_of

CASES = """
def dense(rows, cols):
    scale = tensor(rows // 128, cols // 128, dtype=torch.float32)
    return dequantized(Blocks(tensor(rows, cols, dtype=torch.float8_e4m3fn), scale, 128, 128), torch.bfloat16)

def expert(rows, cols):
    experts = GPT_OSS.experts
    codes = tensor(experts, rows, cols // 2, dtype=torch.uint8)
    scale = tensor(experts, rows, cols // 32, dtype=torch.uint8)
    return dequantized(Blocks(codes, scale, 1, 32), torch.bfloat16)

case("8B, down", dense, LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size)
case("gpt-oss, gate and up", expert, 2 * GPT_OSS.intermediate_size, GPT_OSS.hidden_size)
"""

GROUP = 16
"""Bytes of a group."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def widened(loaded, DECODE: tl.constexpr, FNUZ: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what was loaded of a weight in fp32; with DECODE the bytes of e4m3, or of e4m3fnuz."""
        if DECODE:
            wide = loaded.to(tl.int16)
            half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
            return half.to(tl.float16, bitcast=True).to(tl.float32) * (128.0 if FNUZ else 256.0)
        return loaded.to(tl.float32)

    @triton.jit
    def narrowed(wide, dtype: tl.constexpr, CUT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return what `widened` or `halves` made in a dtype that holds it exactly.

        With CUT a bf16 is the upper half of an fp32, of which the lower is zero: AMD's chips before gfx950 round by
        five instructions each, and take the halves of two at once.
        """
        if CUT and dtype == tl.bfloat16:
            return (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return wide.to(dtype)

    @triton.jit
    def halves(loaded):  # type: ignore[no-untyped-def]
        """Return both elements of bytes of e2m1 in fp32, times 2^-126."""
        word = loaded.to(tl.int32)
        low = ((word & 0x07) << 22) | ((word & 0x08) << 28)
        high = ((word & 0x70) << 18) | ((word & 0x80) << 24)
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)

    @triton.jit
    def power(exponent):  # type: ignore[no-untyped-def]
        """Return 2^exponent in fp32, of -126 to 127."""
        return ((exponent + 127) << 23).to(tl.float32, bitcast=True)

    @triton.jit
    def scaled_by(value, loaded, FOUR: tl.constexpr, EXPONENTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return numbers times their scales, as these were loaded; those of e2m1 times 2^62 too."""
        if EXPONENTS:
            exponent = loaded.to(tl.int32) - (127 - 62 if FOUR else 127)
            half = exponent >> 1
            return value * power(half) * power(exponent - half)
        return value * loaded.to(tl.float32)

    @triton.jit
    def _dequantize_kernel(  # type: ignore[no-untyped-def]
        values_ptr,
        scale_ptr,
        out_ptr,
        O: tl.constexpr,  # noqa: E741
        BYTES: tl.constexpr,
        ROWS: tl.constexpr,
        GROUPS: tl.constexpr,
        FOUR: tl.constexpr,
        EXPONENTS: tl.constexpr,
        DECODE: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
    ):
        """Write BLOCK_ROWS rows of BLOCK_GROUPS groups; GROUPS of them have one scale."""
        matrix = tl.program_id(2).to(tl.int64)
        row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        group = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        there = (row < O)[:, None] & (group * 16 < BYTES)[None, :]
        at = (group[:, None] * 16 + tl.arange(0, 16)[None, :])[None, :, :]
        scale_rows: tl.constexpr = (O + ROWS - 1) // ROWS
        scale_columns: tl.constexpr = (BYTES // 16 + GROUPS - 1) // GROUPS
        place = (matrix * O + row)[:, None, None]
        loaded = tl.load(values_ptr + place * BYTES + at, mask=there[:, :, None], other=0.0)
        scales = scale_ptr + (matrix * scale_rows + row // ROWS)[:, None] * scale_columns
        scale = tl.load(scales + (group // GROUPS)[None, :], mask=there, other=0)[:, :, None]
        if FOUR:
            low, high = halves(loaded)
            up: tl.constexpr = 18446744073709551616.0
            pair = tl.join(scaled_by(low * up, scale, FOUR, EXPONENTS), scaled_by(high * up, scale, FOUR, EXPONENTS))
            column = 2 * at[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
            out = out_ptr + place[:, :, :, None] * (2 * BYTES) + column
            tl.store(out, pair.to(out_ptr.dtype.element_ty), mask=there[:, :, None, None])
        else:
            wide = scaled_by(widened(loaded, DECODE, False), scale, FOUR, EXPONENTS)
            tl.store(out_ptr + place * BYTES + at, wide.to(out_ptr.dtype.element_ty), mask=there[:, :, None])

    dequantize_kernel = Kernel(_dequantize_kernel)

FOURS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The elements of e2m1, by their bits."""


_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


class Blocks(NamedTuple):
    """A weight `[…, O, I]`."""

    values: Tensor
    """`[…, O, I]` in e4m3fn, or `[…, O, I / 2]` bytes of two e2m1."""
    scale: Tensor
    """`[…, O / rows, I / columns]`, rounded up, in fp32 or 16 bits, or bytes of exponents."""
    rows: int
    columns: int

    @property
    def four(self) -> bool:
        """Whether an element has 4 bits."""
        return self.values.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """`(…, O, I)`."""
        *leading, size = self.values.shape
        return (*leading, 2 * size if self.four else size)

    @property
    def exponents(self) -> bool:
        """Whether the scales are exponents."""
        return self.scale.dtype in _EXPONENTS

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scale.nbytes


def reason_against(weight: Blocks) -> str | None:
    """Return why kernels do not read such a weight: `"blocks"`; None if they do.

    A group of 16 bytes has one scale, and rows begin at multiples of 16 bytes; e2m1 has exponents as scales.
    """
    *_, rows, cols = weight.shape
    in_bytes = weight.columns // 2 if weight.four else weight.columns
    wanted = (*weight.values.shape[:-2], -(-rows // weight.rows), -(-cols // weight.columns))
    whole = in_bytes % GROUP == 0 and weight.values.shape[-1] % GROUP == 0 and weight.values.storage_offset() % 4 == 0
    lies = weight.values.is_contiguous() and weight.scale.is_contiguous()
    known = weight.exponents or (weight.scale.dtype in _NUMBERS and not weight.four)
    known = known and weight.values.dtype in (torch.uint8, torch.float8_e4m3fn)
    together = weight.scale.device == weight.values.device
    return None if whole and lies and known and together and tuple(weight.scale.shape) == wanted else "blocks"


def as_read(weight: Blocks) -> tuple[Tensor, Tensor, bool]:
    """Return values and scales as kernels read them, and whether they decode e4m3 by shifts.

    MI300 converts e4m3fnuz, whose bits mean something else.
    """
    scale = weight.scale.view(torch.uint8) if weight.exponents else weight.scale
    if weight.four or _converts(weight.values):
        return weight.values, scale, False
    return weight.values.view(torch.uint8), scale, True


def _converts(values: Tensor) -> bool:
    """Return whether the device converts e4m3fn in hardware."""
    chip = chip_of(values)
    if chip is None:
        return False
    return int(chip.arch[3:]) >= 89 if chip.backend == "cuda" else chip.arch.startswith(("gfx95", "gfx12"))


def dequantized(weight: Blocks, dtype: torch.dtype) -> Tensor:
    """Return `[…, O, I]`, `scale * values` in fp32, or in fp64 where that is wanted, then rounded to `dtype`."""
    values = weight.values
    if dtype in KERNEL_DTYPES and backend.nothing_watches(values) and values.numel() and backend.uses_triton(values):
        if reason_against(weight) is None:
            return _launch(weight, dtype)
    return _reference(weight, dtype)


def _reference(weight: Blocks, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    *_, rows, cols = weight.shape
    if weight.four:
        table = torch.tensor(FOURS, dtype=wide, device=weight.values.device)
        codes = torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(-2)
        values = table[codes.int()]
    else:
        values = weight.values.to(wide)
    scale = weight.scale
    if weight.exponents:
        exponent = scale.view(torch.uint8).int() - 127
        scale = torch.ldexp(torch.ones_like(exponent, dtype=wide), exponent)
    scale = scale.to(wide).repeat_interleave(weight.rows, -2)[..., :rows, :]
    return (values * scale.repeat_interleave(weight.columns, -1)[..., :cols]).to(dtype)


def _launch(weight: Blocks, dtype: torch.dtype) -> Tensor:
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    values, scale, decode = as_read(weight)
    in_bytes = weight.columns // 2 if weight.four else weight.columns
    rows, size = values.shape[-2:]
    matrices = values.numel() // (rows * size)
    block_rows, block_groups = 4, 32
    with backend.device_guard(values):
        dequantize_kernel.launch(
            (-(-size // (GROUP * block_groups)), -(-rows // block_rows), matrices),
            128 // WAVE,
            (values, scale, out),
            (),
            (),
            (),
            (
                rows, size, weight.rows, in_bytes // GROUP, weight.four, weight.exponents, decode, block_rows,
                block_groups,
            ),
        )  # fmt: skip
    return out
