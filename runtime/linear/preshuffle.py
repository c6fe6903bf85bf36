"""A second copy of a weight, in the order in which the assembly kernels of some chips read it.

The copy costs the weight's memory once more, so nothing asks for it but an entry `preshuffled` of the table, and only
products of many rows use it: for few rows the ordinary order was as fast or faster wherever it was reported. The
checkpoint's weight stays what it is; the copy is made anew when the weight has been written to. A packed weight is a
view that each call makes anew; it has one copy, kept with the first of the parameters that it is made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..aiter import aiter_preshuffle
from ..core import aiter_probe, weight_copies
from ..guards.tensor_version import version_of

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
    state: tuple[tuple[int | None, int], ...]
    """The version and the address of each parameter."""
    shuffled: Tensor


_kernels: Kernels | None = Kernels(aiter_preshuffle.shuffle, aiter_preshuffle.multiply)
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_packed_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the first of several parameters, which may have a copy of its own too."""
_PARTS = "_rewrite_parts"


def offer(kernels: Kernels | None) -> None:
    """Say who writes and reads the order, in place of aiter; None for nobody."""
    global _kernels
    _kernels = kernels
    _copies.clear()
    _packed_copies.clear()


def tell(weight: Tensor, parts: Sequence[Tensor | None]) -> None:
    """Say which parameters a packed weight is made of, so that it can have a copy."""
    setattr(weight, _PARTS, [weakref.ref(part) for part in parts if part is not None])


def multiply(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return `input @ weight.T` from the copy of a weight; None where there is and can be none. It adds no bias."""
    if _kernels is None or aiter_probe.chip(weight.device) not in CHIPS:
        return None
    shuffled = copy_of(weight, _kernels.shuffle)
    return None if shuffled is None else _kernels.multiply(input, shuffled, weight)


def fits(weight: Tensor) -> bool:
    """Return whether a weight has a copy: parameters in 16 bits whose size the blocks divide.

    A packed weight of which nothing is told has none: it does not live on, and its parts are written to behind its
    back.
    """
    parts = parts_of(weight)
    return (
        all(type(part) is nn.Parameter and version_of(part) is not None for part in parts)
        and sum(part.shape[0] for part in parts if part.dim()) == weight.shape[0]
        and weight.element_size() == 2
        and weight.shape[-2] % BLOCK_ROWS == 0
        and weight.shape[-1] % BLOCK_COLS == 0
        and weight.is_contiguous()
    )


def parts_of(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the parameters that a weight is made of: itself, or what was told."""
    told: list[weakref.ref[Tensor]] | None = getattr(weight, _PARTS, None)
    if told is None:
        return (weight,)
    return tuple(part for one in told if (part := one()) is not None)


def copy_of(weight: Tensor, shuffle: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    """Return the copy of a weight that `fits`, made by `shuffle` at the first call; None where there can be none."""
    if not fits(weight):
        return None
    weight_copies.note()
    parts = parts_of(weight)
    copies = _copies if parts[0] is weight else _packed_copies
    copy = copies.get(parts[0])
    state = tuple((version_of(part), part.data_ptr()) for part in parts)
    if copy is not None and copy.state == state:
        shuffled: Tensor = copy.shuffled
        return shuffled
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        made = shuffle(weight.detach())
    if made is not None:
        copies[parts[0]] = _Copy(state, made)
    return made


def nbytes() -> int:
    """Return the memory that the copies take."""
    return sum(copy.shuffled.nbytes for copies in (_copies, _packed_copies) for copy in copies.values())
