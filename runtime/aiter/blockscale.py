"""aiter's product of rows and a weight with a scale for each block (`gemm_a8w8_blockscale`), for many rows.

    q_x, s_x = x in 8 bits, a scale for 128 columns of a row          y = Σ_blocks s_x s_w (q_x q_wᵀ) + b

That is what a checkpoint's own FP8 kernels compute, and not what the rest of a package does: **the input is rounded to
8 bits**, where ours keeps its 16 (`linear/block_linear`). So it has to be named
(`REWRITE_AITER_ON=gemm_a8w8_blockscale`). The weight is read where it lies on gfx950. gfx942 takes e4m3fnuz: the bits
of e4m3fn mean half as much there, so scales are doubled, and the one for a negative zero would be no number, so the
weight is copied without it: its memory once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core import aiter_probe, weight_copies
from ..guards.tensor_version import version_of
from ..launching.launch import fp8_dtype
from . import aiter_calls
from .aiter_norms import DTYPES

BLOCK = 128
"""Rows and columns of a block, and columns of a row of the input with one scale."""
_TENSORS = ("XQ", "WQ", "x_scale", "w_scale")
_ROWS = "_aiter_rows"


class _Weight(NamedTuple):
    """A weight `[O, I]` as the chip reads it."""

    state: tuple[int | None, int, int | None, int]
    """Versions and addresses of values and scales."""
    values: Tensor
    scale: Tensor


_weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def product(input: Tensor, weight: Tensor, scale: Tensor, block_size: tuple[int, int], bias: Tensor | None) -> Any:
    """Return `input Wᵀ + b`, of the input in 8 bits, by aiter; None, with a counted reason, where ours is to run.

    Args:
        input: `[..., I]`.
        weight: `[O, I]` in e4m3fn, a parameter, with `scale` `[O / 128, I / 128]` in fp32.
        scale: a parameter likewise.
        block_size: rows and columns of a block.
        bias: `[O]`; None for none.

    Returns:
        `[..., O]` in the input's dtype.
    """
    if not aiter_calls.chosen("gemm_a8w8_blockscale", input):
        return None
    reason = _refusal(input, weight, scale, block_size)
    if reason is not None:
        aiter_calls.refuse("gemm_a8w8_blockscale", reason)
        return None
    function = aiter_calls.function("gemm_a8w8_blockscale", "gemm_a8w8_blockscale", _TENSORS, ("dtype",))
    quantise = aiter_calls.function(
        "gemm_a8w8_blockscale", "per_group_quant_hip", ("x",), ("quant_dtype", "group_size")
    )
    if function is None or quantise is None:
        return None
    read = _as_read(weight, scale)
    if read is None:
        aiter_calls.refuse("gemm_a8w8_blockscale", "no_copy")
        return None
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    shape = rows.shape[0], weight.shape[0]

    def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = quantise(x, quant_dtype=read.values.dtype, group_size=BLOCK)
        return values, scale.view(x.shape[0], -1)

    def multiply(x: tuple[Tensor, Tensor], values: Tensor, scale: Tensor) -> Tensor | None:
        found: Any = function(x[0], values, x[1], scale, dtype=rows.dtype)
        return found if aiter_calls.is_result(found, shape, rows) else None

    def call() -> Tensor | None:
        return multiply(_remembered(input, lambda: quantised(rows)), read.values, read.scale)

    def proof() -> bool:
        return _holds(quantised, multiply, rows, weight)

    variant = (rows.dtype, rows.device, *shape, rows.shape[1])
    found = aiter_calls.run("gemm_a8w8_blockscale", input, variant, call, proof)
    if found is None:
        return None
    return (found if bias is None else found + bias.to(found.dtype)).view(*input.shape[:-1], weight.shape[0])


def _refusal(input: Tensor, weight: Tensor, scale: Tensor, block_size: tuple[int, int]) -> str | None:
    if input.dtype not in DTYPES or weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        return "dtype"
    if not input.numel():
        return "empty"
    size, columns = weight.shape
    lies = all(x.is_contiguous() and x.device == input.device for x in (weight, scale))
    blocks = tuple(block_size) == (BLOCK, BLOCK) and tuple(scale.shape) == (size // BLOCK, columns // BLOCK)
    whole = not size % BLOCK and not columns % BLOCK and input.shape[-1] == columns
    return None if lies and blocks and whole else "layout"


def _as_read(weight: Tensor, scale: Tensor) -> _Weight | None:
    """Return a weight in the format of the chip: itself, or a copy made at the first call and renewed in its place."""
    if fp8_dtype(aiter_probe.chip(weight.device) or "") == weight.dtype:
        return _Weight((0, 0, 0, 0), weight.detach(), scale.detach())
    if version_of(weight) is None or version_of(scale) is None:
        return None
    weight_copies.note()
    kept: _Weight | None = _weights.get(weight)
    state = (version_of(weight), weight.data_ptr(), version_of(scale), scale.data_ptr())
    if kept is not None and kept.state == state:
        return kept
    if aiter_calls.capturing():
        return None
    with torch.inference_mode(False), torch.no_grad():
        values, doubled = as_fnuz(weight.detach()), scale.detach() * 2
        if kept is not None and kept.values.shape == values.shape:  # graphs go on reading there
            values, doubled = kept.values.copy_(values), kept.scale.copy_(doubled)
    _weights[weight] = made = _Weight(state, values, doubled)
    return made


def as_fnuz(values: Tensor) -> Tensor:
    """Return e4m3fn as e4m3fnuz of half the numbers: the same bits but for a negative zero."""
    codes = values.view(torch.uint8)
    return torch.where(codes == 0x80, 0, codes).to(torch.uint8).view(torch.float8_e4m3fnuz)


def _remembered(input: Tensor, make: Any) -> tuple[Tensor, Tensor]:
    """Return the rows of an input in 8 bits: several projections read one."""
    version = version_of(input)
    known = getattr(input, _ROWS, None)
    if known is None or version is None or known[0] != version:
        known = version, make()
        setattr(input, _ROWS, known)
    rows: tuple[Tensor, Tensor] = known[1]
    return rows


def nbytes() -> int:
    """Return the memory that copies in the chip's format take."""
    return sum(weight.values.nbytes + weight.scale.nbytes for weight in _weights.values())


def describe_process() -> list[str]:
    """Return a line for `explain`."""
    count = len(_weights)
    return [f"aiter: {count} block-scaled weights in e4m3fnuz too, {nbytes() / 2**20:.1f} MiB"] if count else []


def _holds(quantised: Any, multiply: Any, rows: Tensor, weight: Tensor) -> bool:
    """Return whether aiter rounds an input to its nearest in 8 bits, block by block, and multiplies as in fp32.

    On numbers of its own, whose blocks have unlike magnitudes, and a weight with negative zeros.
    """
    size, columns = weight.shape
    x, wide = aiter_calls.many_samples(rows, tuple(rows.shape), tuple(weight.shape))
    x = x * (2.0 ** (torch.arange(columns, device=x.device) // BLOCK % 5 - 2)).to(x.dtype)
    values = wide.to(torch.float8_e4m3fn)
    spread = torch.arange(size // BLOCK * (columns // BLOCK), device=x.device).view(size // BLOCK, -1)
    scale = 0.5 + spread % 7 / 4
    read = _read_once(values, scale, weight)
    codes, x_scale = quantised(x)
    if x_scale.shape != (x.shape[0], columns // BLOCK) or codes.shape != x.shape:
        return False
    rounded = codes.float() * x_scale.repeat_interleave(BLOCK, 1)
    largest = x.float().unflatten(-1, (-1, BLOCK)).abs().amax(-1).repeat_interleave(BLOCK, 1)
    near = (rounded - x.float()).abs() <= 0.04 * largest
    found = multiply((codes, x_scale), *read)
    if found is None:
        return False
    exact = rounded @ (values.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).t()
    apart = (found.float() - exact).abs().max()
    return bool(near.all() & torch.isfinite(found).all() & (apart <= 0.01 * exact.abs().max()))


def _read_once(values: Tensor, scale: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    if fp8_dtype(aiter_probe.chip(like.device) or "") == values.dtype:
        return values, scale
    return as_fnuz(values), scale * 2
