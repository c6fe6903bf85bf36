"""Whole numbers on the device that follow from what the host copied there: asked for, they need not be read back.

A table of shapes is put on the device, and a check of it asks `(h * w).sum() == n`. Nothing of the call's tensors is
in that number, so it is what it was when it was first read. It is followed through functions of torch, by the memory
that they write: integers and truth values alone, which nothing but torch's functions makes of such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..lazy.lazy_mode import tensors_of

READS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}
"""Give the host what a tensor holds."""
_EMPTY = {
    "empty",
    "zeros",
    "ones",
    "full",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "empty_like",
    "zeros_like",
}
_SETS = (Tensor.__setitem__, Tensor.copy_)
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "exponential")


class KnownNumbers:
    """Follows one run of a forward, and remembers what was read in the first.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: list[Any] = []
        self._next = 0
        self._known: dict[int, torch.UntypedStorage] = {}
        self._blank: dict[int, torch.UntypedStorage] = {}

    def begin(self) -> None:
        """Begin with a run."""
        self._next = 0
        self._known.clear()
        self._blank.clear()

    def read(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> tuple[bool, Any]:
        """Return whether a function reads a known number, and that."""
        if func not in READS or not self._is_known(args[0]):
            return False, None
        place, self._next = self._next, self._next + 1
        if place == len(self._read):
            self._read.append(func(*args, **given))
        return True, self._read[place]

    def add(self, result: Any) -> None:
        """Know what was copied from the host."""
        for tensor in _whole(result):
            self._known[_memory(tensor)._cdata] = _memory(tensor)

    def follow(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any], result: Any) -> None:
        """Know what a function made of known numbers, and forget what it wrote something else to."""
        name = getattr(func, "__name__", "")
        if func in _SETS or "out" in given or (name.endswith("_") and not name.endswith("__")):
            self._written(given.get("out", args[0] if args else None), (*args[1:], *given.values()), func in _SETS)
        elif name in _EMPTY:
            self._blank.update((_memory(tensor)._cdata, _memory(tensor)) for tensor in _whole(result))
        elif self._known and not any(part in name for part in _RANDOM):
            tensors = list(tensors_of((args, given)))
            if tensors and all(map(self._is_known, tensors)):
                self.add(result)

    def _written(self, target: Any, values: Sequence[Any], sets: bool) -> None:
        for tensor in _whole(target):
            place = _memory(tensor)._cdata
            own = (value for value in tensors_of(values) if value.device.type == self._device.type)
            if not all(map(self._is_known, own)):
                self._known.pop(place, None)
                self._blank.pop(place, None)
            elif sets and place in self._blank:
                self.add(tensor)

    def _is_known(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _memory(tensor)._cdata in self._known


def _whole(value: Any) -> Iterator[Tensor]:
    for tensor in tensors_of([value]):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            yield tensor


def _memory(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():  # of what is put off nothing is computed
        return tensor.untyped_storage()
