"""How a kernel that works row by row sees a tensor, and the tile each of its programs takes.

A row is the last dimension. Its address is `(row // inner) * outer_stride + (row % inner) * inner_stride`, which
covers contiguous tensors, column slices of a packed projection, and the heads of such a slice
(`[B, S, heads, head_dim]`) without a copy.
"""

from __future__ import annotations

import functools

import torch

from ..core import backend
from ..launching.launch import WAVE, processors

KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
MAX_BLOCK_COLS = 16384
LOOP_BLOCK_COLS = 8192


def collapse(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return `(tensor, inner, outer_stride, inner_stride)`, strides in elements; copies only where it must.

    `tensor` is `[..., H]` with H > 0. Leading dimensions that fold into at most two are read in place; anything else,
    or a last dimension that is not dense, is made contiguous first.
    """
    if tensor.is_contiguous():
        return tensor, 1, tensor.shape[-1], 0
    if tensor.stride(-1) == 1:
        levels: list[tuple[int, int]] = []
        for size, stride in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
            if size == 1:
                continue
            if levels and stride == levels[-1][0] * levels[-1][1]:
                levels[-1] = (levels[-1][0] * size, levels[-1][1])
            else:
                levels.append((size, stride))
        if len(levels) == 1:
            return tensor, 1, levels[0][1], 0
        if len(levels) == 2:
            return tensor, levels[0][0], levels[1][1], levels[0][1]
    return tensor.contiguous(), 1, tensor.shape[-1], 0


def order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dimensions of `tensor` from the outermost in memory, as torch lays out what it computes elementwise.

    Empty where the result would be contiguous, so that nothing has to change places; None where a kernel that writes
    row by row cannot lay it out so: the last dimension is not the innermost, or a dimension is expanded.
    """
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    wide = [place for place, size in enumerate(tensor.shape) if size != 1]
    if any(strides[place] == 0 for place in wide):
        return None
    ranked = sorted(wide, key=lambda place: -strides[place])
    if ranked == wide:
        return ()
    if ranked[-1] != tensor.ndim - 1:
        return None
    return (*(place for place in range(tensor.ndim) if tensor.shape[place] == 1), *ranked)


def restored(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return what `permute(order)` was made from."""
    return tensor.permute([order.index(place) for place in range(len(order))]) if order else tensor


def flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `(tensor, row_stride)` for a kernel that knows one row stride; copies where two would be needed."""
    tensor, inner, outer_stride, _ = collapse(tensor)
    if inner == 1:
        return tensor, outer_stride
    return tensor.contiguous(), tensor.shape[-1]


def few_rows(input: torch.Tensor, most: int) -> bool:
    """Return whether `input` is at most `most` rows that a kernel reads: nobody traces it or wants gradients.

    More than one row are for the tensor cores, which have no fp32.
    """
    most = 1 if input.dtype == torch.float32 else most
    return (
        0 < input.numel() <= most * input.shape[-1]
        and input.dtype in KERNEL_DTYPES
        and backend.nothing_watches(input)
        and not backend.wants_gradient(input)
        and backend.uses_triton(input)
    )


@functools.lru_cache(maxsize=4096)
def tile(hidden_size: int, rows: int) -> tuple[int, int, int]:
    """Return `(BLOCK_ROWS, BLOCK_COLS, num_warps)` for rows of `hidden_size` elements.

    Rows wider than `MAX_BLOCK_COLS` are walked in blocks. A thread takes 16 elements, or 8 where that gives it at most
    256 threads: the best of 64 to 1,024 threads at 2,048 to 16,384 columns (H100, triton 3.6). A block never has more
    than 1,024 threads, the limit on wave 64.
    """
    block_cols = 1 << (hidden_size - 1).bit_length()
    if block_cols > MAX_BLOCK_COLS:
        return 1, LOOP_BLOCK_COLS, 512 // WAVE
    block_rows = 2048 // block_cols if block_cols <= 512 and rows >= 4096 else 1
    size = block_rows * block_cols
    threads = max(size // 16, min(size // 8, 256))
    return block_rows, block_cols, max(1, threads // WAVE)


def programs(tensor: torch.Tensor, blocks: int) -> int:
    """Return how many programs walk over `blocks` of rows, each with a sum of its own: four a multiprocessor."""
    if not tensor.is_cuda:  # interpreted, one program after the other
        return min(blocks, 2)
    return min(blocks, 4 * processors(tensor.get_device()))
