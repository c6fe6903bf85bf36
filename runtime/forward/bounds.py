"""Indices that are looked at before a table is read: on a GPU one that is out of bounds ends the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_ALONG = ("input", "dim", "index")
_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.embedding: ("input", "weight"),
    torch.embedding: ("weight", "indices"),
    torch.take_along_dim: ("input", "indices", "dim"),
    **dict.fromkeys((torch.gather, Tensor.gather, torch.index_select, Tensor.index_select), _ALONG),
}
"""Functions that read a table by indices, with the names of their first arguments."""


class Bounds(TorchFunctionMode):
    """Looks at every index into a table before it is used."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch.

        Raises:
            LookupError: if it would read behind a table.
        """
        given = kwargs or {}
        for index, size in _items(*args) if func is Tensor.__getitem__ else _looked_up(func, args, given):
            if index.numel() and not bool(((index >= -size) & (index < size)).all()):
                raise LookupError(f"index {int(index.max())} in a table of {size}")
        return func(*args, **given)


def _looked_up(
    func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
) -> Iterator[tuple[Tensor, int]]:
    """Yield the indices of a call, and the size of what they point into."""
    if func in _ARGUMENTS:
        named: dict[str, Any] = {**dict(zip(_ARGUMENTS[func], args, strict=False)), **given}
        index: Any = named.get("index", named.get("indices", named.get("input")))
        table, dim = (named["weight"], 0) if "weight" in named else (named["input"], named.get("dim"))
        yield index, table.numel() if dim is None else table.shape[dim]


def _items(input: Tensor, index: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield the same of `input[index]`."""
    parts = index if isinstance(index, tuple) else (index,)
    dim = 0
    taken = [_dims_taken(part) for part in parts]
    for number, part in enumerate(parts):
        if part is Ellipsis:
            dim = input.dim() - sum(taken[number + 1 :])
        elif isinstance(part, Tensor) and part.dtype not in (torch.bool, torch.uint8):
            yield part, input.shape[dim]
        dim += taken[number]


def _dims_taken(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
