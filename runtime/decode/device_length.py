"""What a model does with the number of tokens so far, which in a step is a tensor that only the device can read.

Models ask the cache for it on the host, where two uses of it need a number. A mask of their own has as many ones as
there are keys, `torch.ones(B, past + 1)`: in a step it has a column for every slot, since what is beyond the position
is masked in any case, by the position. A table that may be too short is compared with it, `if past + 1 > len(table)`:
the answer is given where it is the same for every position that the cache has. Both are followed through sums with
integers; other uses are left alone, and cannot be captured. Rewritten files say the first themselves (`key_length`).

A table over all positions may be cut by the number of keys, `table[…, keys - queries : keys, : keys]`: the rows of
the last tokens, that many columns. Against buffers of fixed size there are as many keys as slots, and a step takes the
rows at its position instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..lazy.lazy_mode import ASKS

_TENSORS = (Tensor, nn.Parameter)
_ADDS = {"__add__", "__radd__", "add"}
_SUBTRACTS = {"__sub__", "sub"}
_COMPARES: dict[str, Callable[[int, int], bool]] = {
    "__gt__": operator.gt, "gt": operator.gt, "__ge__": operator.ge, "ge": operator.ge,
    "__lt__": operator.lt, "lt": operator.lt, "__le__": operator.le, "le": operator.le,
}  # fmt: skip


class StepLength(TorchFunctionMode):
    """Answers what has one answer in every step.

    Args:
        position: `[1]` int64, the number of tokens before the step.
        capacity: which it stays below.
        slots: `[n]` int64, the positions of the step's tokens; by default it reads one.
    """

    def __init__(self, position: Tensor, capacity: int, slots: Tensor | None = None):
        super().__init__()
        self.position, self.capacity = position, capacity
        self.slots = position if slots is None else slots
        self._lengths: dict[int, tuple[Tensor, int]] = {}
        """Tensors that are the position and so much more, by identity; kept, so that no other takes it over."""
        self._answers: dict[int, tuple[Tensor, bool]] = {}
        """Comparisons of such a tensor that come out the same for every position."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch.

        What asks a plain tensor for its shape is answered at once, past the modes around this one, to which it is
        nothing either: two thirds of all calls (8.2 → 5.9 ms a step of two layers of Llama on a CPU).
        """
        given = dict(kwargs or {})
        if func in ASKS and not given and type(args[0]) in _TENSORS and not torch.compiler.is_compiling():
            with torch._C.DisableTorchFunction():
                return func(*args)
        if func is torch.ones:
            size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if len(size) == 2 and isinstance(size[0], int) and self._more(size[1]) is not None:
                return torch.ones(size[0], self.capacity, **given)
        name = getattr(func, "__name__", "")
        if name == "__bool__" and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        if name == "__getitem__" and (places := self._table_of(args[1], args[0].dim())) is not None:
            return self._cut(args[0], *places)
        result = func(*args, **given)
        if id(result) in self._lengths or id(result) in self._answers:  # written in place, or into `out`
            self._lengths.pop(id(result), None)
            self._answers.pop(id(result), None)
        elif given or not isinstance(result, Tensor):
            pass
        elif name == "__getitem__" and args[0] is self.position and args[1] == 0:
            self._lengths[id(result)] = result, 0
        elif len(args) == 2 and (name in _COMPARES or name in _ADDS or name in _SUBTRACTS):
            self._follow(name, args[0], args[1], result)
        return result

    def _table_of(self, index: Any, dimensions: int) -> tuple[int, int] | None:
        """Return the dimensions of rows and columns that an index cuts by the number of keys; None for another one."""
        if not isinstance(index, tuple) or any(part is not ... and not _is_plain(part) for part in index):
            return None
        if (ellipses := [place for place, part in enumerate(index) if part is ...]) and len(ellipses) == 1:
            whole = (slice(None),) * (dimensions - len(index) + 1)
            index = (*index[: ellipses[0]], *whole, *index[ellipses[0] + 1 :])
        if ... in index:
            return None
        ends = {place: (part.start or 0, part.stop) for place, part in enumerate(index) if part != slice(None)}
        rows = [place for place, part in ends.items() if part == (self.capacity - len(self.slots), self.capacity)]
        columns = [place for place, part in ends.items() if part == (0, self.capacity)]
        return (rows[0], columns[0]) if len(rows) == len(columns) == 1 and len(ends) == 2 else None

    def _cut(self, table: Tensor, rows: int, columns: int) -> Tensor:
        """Return the rows of a table at the step's positions, with a column for every slot; zeros beyond its own."""
        cut = table.index_select(rows, self.slots).narrow(columns, 0, min(self.capacity, table.shape[columns]))
        missing = self.capacity - cut.shape[columns]
        if missing == 0:
            return cut
        beyond = list(cut.shape)
        beyond[columns] = missing
        return torch.cat([cut, cut.new_zeros(beyond)], columns)

    def _follow(self, name: str, left: Any, right: Any, result: Tensor) -> None:
        """Note what the sum or comparison of a length and an integer is."""
        more, other = self._more(left), right
        if more is None and name in _ADDS:
            more, other = self._more(right), left
        if more is None or type(other) is not int:
            return
        if name in _COMPARES:
            first, last = (_COMPARES[name](more + position, other) for position in (0, self.capacity - 1))
            if first == last:
                self._answers[id(result)] = result, first
        else:
            self._lengths[id(result)] = result, more + (other if name in _ADDS else -other)

    def _more(self, value: Any) -> int | None:
        """Return how much more than the position a tensor is, if it is known to be just that."""
        known = self._lengths.get(id(value)) if isinstance(value, Tensor) else None
        return None if known is None else known[1]


def _is_plain(part: Any) -> bool:
    """Whether a part of an index is a slice between integers of the host, without a step."""
    return isinstance(part, slice) and part.step is None and {type(part.start), type(part.stop)} <= {int, type(None)}
