"""A second copy of a weight, in the order in which the assembly kernels of some chips read it.

The copy costs the weight's memory once more, so nothing asks for it but an entry `preshuffled` of the table, and only
products of many rows use it: for few rows the ordinary order was as fast or faster wherever it was reported. The
checkpoint's weight stays what it is; the copy is made anew when the weight has been written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..aiter import preshuffle as aiter_preshuffle
from ..core import aiter_probe, derived

CHIPS = frozenset({"gfx942", "gfx950"})
BLOCK_ROWS, BLOCK_COLS = 16, 32
"""Rows and, of two-byte elements, columns of a block of the order."""


class Kernels(NamedTuple):
    """Who writes the order and who reads it."""

    shuffle: Callable[[Tensor], Tensor | None]
    """Of a weight `[N, K]`; returns the copy, or None where it cannot."""
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor | None]
    """Of an input `[..., K]`, a copy and its weight; returns `[..., N]`, or None where it cannot."""


class _Copy(NamedTuple):
    version: int
    address: int
    shuffled: Tensor


_kernels: Kernels | None = Kernels(aiter_preshuffle.shuffle, aiter_preshuffle.multiply)
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def offer(kernels: Kernels | None) -> None:
    """Say who writes and reads the order, in place of aiter; None for nobody."""
    global _kernels
    _kernels = kernels
    _copies.clear()


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return `input @ weight.T` from the copy of a weight; None where there is and can be none. It adds no bias."""
    if _kernels is None or aiter_probe.chip(weight.device) not in CHIPS:
        return None
    shuffled = copy_of(weight, _kernels.shuffle)
    return None if shuffled is None else _kernels.multiply(input, shuffled, weight)


def fits(weight: Tensor) -> bool:
    """Return whether a weight has a copy: a parameter in 16 bits whose size the blocks divide.

    A packed weight has none: it is no tensor that lives on, and its parts are written to behind its back.
    """
    return (
        type(weight) is nn.Parameter
        and not weight.is_inference()
        and weight.element_size() == 2
        and weight.shape[-2] % BLOCK_ROWS == 0
        and weight.shape[-1] % BLOCK_COLS == 0
        and weight.is_contiguous()
    )


def copy_of(weight: Tensor, shuffle: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Return the copy of a weight that `fits`, made by `shuffle` at the first call; None where there can be none."""
    if not fits(weight):
        return None
    derived.note()
    copy = _copies.get(weight)
    if copy is not None and (copy.version, copy.address) == (weight._version, weight.data_ptr()):
        shuffled: Tensor = copy.shuffled
        return shuffled
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        made = shuffle(weight.detach())
    if made is not None:
        _copies[weight] = _Copy(weight._version, weight.data_ptr(), made)
    return made


def nbytes() -> int:
    """Return the memory that the copies take."""
    return sum(copy.shuffled.nbytes for copy in _copies.values())
