"""Products of one to 16 rows with weights in 8 bits: half the bytes of bf16, which is the time of a decode step.

I in_features, O out_features, M rows, W[o] = s[o] q[o] as in `device.e4m3`:

    linear   y = s * (x' qᵀ) + b (+ residual)                               x' = norm(x), or x
    gated    y = activation(s_g * (x' q_gᵀ) + b_g) * (s_u * (x' q_uᵀ) + b_u)

One row has the kernels of `linear`, with a scale for each output row: the input stays in its 16 bits, sums are fp32,
the norm is computed inside, and inside a graph the first weights are loaded before the input is there. Several rows
have a kernel of their own, in which the weight is the right side.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..core import backend
from ..device.e4m3 import Quantized, as_read
from ..launching.launch import HIP, WAVE, Kernel, overlaps
from ..launching.tiles import Tile, entry, key
from ..linear.gemv import Weight, launch_gated, launch_linear
from ..linear.linear import is_one_row
from ..linear.prologue import Norm, norm_arguments

CASES = """
def product(rows, cols, out, norm):
    out = many(out)
    before, after = (prologue(cols), None) if norm else (None, tensor(rows, 1, out))
    return few_rows(tensor(rows, 1, cols), quantized(out, cols), None, before, after)

def halves(model):
    size = model.hidden_size
    return gated(tensor(1, 1, size), quantized(2 * model.intermediate_size, size), None, "silu", prologue(size))

size, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
case("8B, qkv", product, 1, size, 6144, norm=True)
case("8B, down", product, 1, inner, size, norm=False)
case("8B, head", product, 1, size, LLAMA_8B.vocabulary, norm=True)
case("8B, qkv, 8 rows", product, 8, size, 6144, norm=not HIP)
case("8B, down, 8 rows", product, 8, inner, size, norm=False)
case("8B", halves, LLAMA_8B)
"""

MOST_ROWS = 16
STAGES = 2 if HIP else 4
"""Tiles of a program of several rows in flight; LDS is 64 KiB on AMD cards."""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.blocks import narrowed, widened

    @triton.jit(do_not_specialize=["count"])
    def _fp8_skinny_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        code_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        count,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        DECODE: tl.constexpr,
        FNUZ: tl.constexpr,
        CUT: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        OVERLAP: tl.constexpr,
        M: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        """2 to M rows on the tensor cores; the weight's 8 bits are exact in the input's dtype.

        With the weight as the left side, as in `skinny`, the best tile of each weight of an 8B Llama took up to 9%
        longer at 8 rows (H100, triton 3.6).
        """
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        column = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = column < O
        code_row = code_ptr + column.to(tl.int64)[:, None] * I
        rows = tl.arange(0, M)
        scale = tl.load(scale_ptr + column, mask=live, other=0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        y = tl.zeros((M, BLOCK_ROWS), tl.float32)
        square = tl.zeros((M, BLOCK_COLS), tl.float32)
        for start in tl.range(0, I, BLOCK_COLS, num_stages=STAGES):
            col = start + tl.arange(0, BLOCK_COLS)
            code = tl.load(code_row + col, mask=live[:, None] & (col < I)[None, :], other=0.0)
            there = (rows < count)[:, None] & (col < I)[None, :]
            x = tl.load(x_ptr + rows[:, None] * I + col, mask=there, other=0.0)
            if NORM:
                wide = x.to(tl.float32)
                square += wide * wide
                if NORM_WEIGHT:
                    norm = tl.load(norm_ptr + col, mask=col < I, other=0.0).to(tl.float32) + offset
                    x = (wide * norm[None, :]).to(x.dtype)
            weight = narrowed(widened(code, DECODE, FNUZ), x.dtype, CUT)
            y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
        y *= scale[None, :]
        if NORM:
            y *= tl.rsqrt(tl.sum(square, 1) / I + eps)[:, None]
        if BIAS:
            y += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)[None, :]
        at = rows[:, None] * O + column[None, :]
        written = (rows < count)[:, None] & live[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + at, mask=written, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=written)

    fp8_skinny_kernel = Kernel(_fp8_skinny_kernel, dot=True)


def few_rows(
    input: Tensor,
    weight: Quantized,
    bias: Tensor | None,
    prologue: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return `norm(input) Wᵀ + bias + residual` `[M, O]` by a kernel."""
    one_row = is_one_row(input)
    out = input.new_empty((*input.shape[:-1], weight.values.shape[0]))
    tile = tile_for("linear" if one_row else "skinny_linear", weight, normed=prologue is not None)
    launch = launch_linear if one_row else launch_skinny
    launch(input, read(weight), bias, prologue, residual, out, tile)
    return out


def gated(input: Tensor, weight: Quantized, bias: Tensor | None, kind: str, prologue: Norm | None) -> Tensor:
    """Return the gated product of one row, `[1, O]`, of a weight `[2 O, I]` whose first half is the gate."""
    out = input.new_empty((*input.shape[:-1], weight.values.shape[0] // 2))
    launch_gated(input, read(weight), bias, kind, prologue, out, tile_for("gated", weight))
    return out


def launch_skinny(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None,
    prologue: Norm | None,
    residual: Tensor | None,
    out: Tensor,
    shape: Tile,
) -> None:
    """Run the kernel of 2 to 16 rows with a tile."""
    block_rows, block_cols, num_warps = shape
    codes, scale, decode, fnuz = weight
    rows, cols = codes.shape
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    with backend.device_guard(input):
        fp8_skinny_kernel.launch(
            (-(-rows // block_rows), 1, 1),
            num_warps,
            (
                input.contiguous(), norm, codes, input if scale is None else scale, input if bias is None else bias,
                input if residual is None else residual.contiguous(), out,
            ),
            (out.numel() // rows,),
            (),
            (eps, offset),
            (
                cols, rows, decode, fnuz, HIP, prologue is not None, has_weight, bias is not None,
                residual is not None, overlap, MOST_ROWS, block_rows, block_cols, STAGES,
            ),
            overlap=overlap,
        )  # fmt: skip


def read(weight: Quantized) -> Weight:
    """Return a weight as kernels read it."""
    codes = as_read(weight.values)
    return Weight(codes, weight.scale, codes.dtype == torch.uint8, weight.values.dtype == torch.float8_e4m3fnuz)


def tile_for(kind: str, weight: Quantized, *, normed: bool = False) -> Tile:
    """Return the tile for a weight: from the tables of `tiles`, as of one byte an element; else a rule.

    `normed` says that the kernel computes the norm of its input.
    """
    rows, cols = weight.values.shape
    rows = rows // 2 if kind == "gated" else rows
    device = weight.values.get_device() if weight.values.is_cuda else None
    found = entry(key(kind, rows, cols, 1), device, lambda: rule(kind, rows, cols, normed=normed))
    return rule(kind, rows, cols, normed=normed) if found is None else (found[0], found[1], found[2])


@functools.cache
def rule(kind: str, rows: int, cols: int, *, normed: bool = False) -> Tile:
    """Return a tile for a shape that was not measured: for one row 64 elements a thread.

    Several rows with a norm take 256 columns, as `rewrite tune` found on the H100: with 512 a thread has the squares
    of 64 elements besides its tile, 255 registers and, with Triton 3.9, up to 152 bytes in memory.
    """
    whole = 1 << (cols - 1).bit_length()
    if kind.startswith("skinny"):
        return 32, max(32, min(256 if HIP or normed else 512, whole)), 128 // WAVE
    block_cols = min(4096, whole)
    if cols % block_cols:  # a block that divides the columns needs no mask
        block_cols = max(256, min(block_cols, cols & -cols))
    block_rows = 4 if kind == "linear" else 2
    while rows % block_rows:
        block_rows //= 2
    halves = 1 if kind == "linear" else 2
    threads = max(WAVE, min(512, block_rows * block_cols * halves // 64))
    return block_rows, block_cols, threads // WAVE
