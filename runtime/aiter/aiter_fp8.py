"""aiter's product of rows and a weight in 8 bits (`gemm_a8w8_bpreshuffle`), in place of `torch._scaled_mm`.

    y[n, o] = s_x[n] s_w[o] Σ_i q_x[n, i] q_w[o, i] + b[o]

Rows, weights and scales are those of `--with fp8`, so that the product is the same up to the order of its sums. The
kernels read a weight in an order of their own: a copy in 8 bits beside the one that steps read, half of the bf16
weight's memory once more. So it has to be named (`REWRITE_AITER_ON=gemm_a8w8`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..core import aiter_probe
from ..guards.tensor_version import version_of
from ..launching.launch import fp8_dtype
from . import aiter_calls, aiter_preshuffle

COLUMNS, ROWS = 128, 64
"""What sizes of a weight have to be multiples of: the widest tiles of the kernels that are taken without a table."""
_TENSORS = ("XQ", "WQ", "x_scale", "w_scale")


class _Copy(NamedTuple):
    version: int
    """Of the weight that it was made of."""
    shuffled: Tensor


_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def product(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the product in bf16 by aiter; None, with a counted reason, where torch's is to run.

    Args:
        values: `[..., I]`, rows in the format of the chip.
        scale: `[...]`, theirs, fp32.
        weight: `[O, I]` in the same format, kept as long as it is multiplied with.
        weight_scale: `[O]`, fp32.
        bias: `[O]` in bf16, added behind; None for none.

    Returns:
        `[..., O]`.
    """
    if not aiter_calls.chosen("gemm_a8w8", values):
        return None
    reason = _refusal(values, scale, weight, weight_scale)
    if reason is not None:
        aiter_calls.refuse("gemm_a8w8", reason)
        return None
    function = aiter_calls.function("gemm_a8w8", "gemm_a8w8_bpreshuffle", _TENSORS, ("dtype",))
    if function is None:
        return None
    shuffled = _copy_of(weight)
    if shuffled is None:
        aiter_calls.refuse("gemm_a8w8", "no_copy")
        return None
    shape = values.numel() // values.shape[-1], weight.shape[0]

    def call(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor | None:
        found: Any = function(x, w, x_scale.reshape(-1, 1), w_scale.reshape(-1, 1), dtype=torch.bfloat16)
        same = isinstance(found, Tensor) and found.shape == shape and found.dtype == torch.bfloat16
        return found if same else None

    def proof() -> bool:
        return _holds(call, values, (*shape, weight.shape[1]))

    rows = values.reshape(-1, values.shape[-1])
    variant = (values.dtype, values.device, *shape, weight.shape[1])
    found = aiter_calls.run(
        "gemm_a8w8", values, variant, lambda: call(rows, shuffled, scale.reshape(-1), weight_scale), proof
    )
    if found is None:
        return None
    return (found if bias is None else found + bias).view(*values.shape[:-1], weight.shape[0])


def _refusal(values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> str | None:
    if {values.dtype, weight.dtype} != {fp8_dtype(aiter_probe.chip(values.device) or "")}:
        return "dtype"
    if not values.numel():
        return "empty"
    together = all(x.is_contiguous() and x.device == values.device for x in (values, scale, weight, weight_scale))
    return None if together and not weight.shape[0] % ROWS and not weight.shape[1] % COLUMNS else "layout"


def _copy_of(weight: Tensor) -> Tensor | None:
    """Return the copy of a weight in aiter's order, made at the first call, in the same memory when it has changed."""
    if (version := version_of(weight)) is None:
        return None
    copy = _copies.get(weight)
    if copy is not None and copy.version == version:
        kept: Tensor = copy.shuffled
        return kept
    if aiter_calls.capturing():
        return None
    with torch.inference_mode(False), torch.no_grad():
        made = aiter_preshuffle.shuffle(weight, "gemm_a8w8")
        if made is not None and copy is not None:  # graphs go on reading there
            made = copy.shuffled.copy_(made)
    if made is not None:
        _copies[weight] = _Copy(version, made)
    return made


def renew(weight: Tensor) -> None:
    """Make the copy of a weight anew, if it has one and has changed: before a graph reads it."""
    if weight in _copies:
        _copy_of(weight)


def nbytes() -> int:
    """Return the memory that the copies take."""
    return sum(copy.shuffled.nbytes for copy in _copies.values())


def describe_process() -> list[str]:
    """Return a line for `explain`."""
    return [f"aiter: {len(_copies)} weights in its order too, {nbytes() / 2**20:.1f} MiB"] if _copies else []


def _holds(call: Any, like: Tensor, sizes: tuple[int, int, int]) -> bool:
    """Return whether aiter multiplies as in fp32, by the scale of each row of either, to 1% of the largest.

    Of other numbers in 8 bits than those at hand, whose scales may be alike; here each row has another one.
    """
    rows, size, columns = sizes
    numbers = aiter_calls.many_samples(like.new_empty(0, dtype=torch.float32), (rows, columns), (size, columns))
    x, w = (each.to(like.dtype) for each in numbers)
    x_scale, w_scale = (2.0 ** (torch.arange(count, device=like.device) % 7 - 3) for count in (rows, size))
    shuffled = aiter_preshuffle.shuffle(w, "gemm_a8w8")
    found = None if shuffled is None else call(x, shuffled, x_scale, w_scale)
    if found is None:
        return False
    exact = x.float() @ w.float().t()
    apart = (found.float() / (x_scale[:, None] * w_scale) - exact).abs().max()
    return bool(torch.isfinite(found).all() & (apart <= 0.01 * exact.abs().max()))
