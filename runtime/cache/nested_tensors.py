"""Tensors in what holds them: lists, tuples and dictionaries, one in another, or an object of a class of the model's.

What is no tensor there belongs to the form: a step that finds another form than the one before is another step.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

_PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device)
_OF_THE_LOOP = ("_is_user_defined",)
"""What transformers' loop notes on the caches that it is given."""


class UnknownState(TypeError):
    """What a model carries is no tensor of a fixed form."""

    def __init__(self, found: object):
        what = f"{tuple(found.shape)} in {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        super().__init__(f"a state that the model carries from call to call cannot lie at a fixed address: {what}")


class Nested:
    """The tensors of a value, in order, and the form in which it holds them.

    Args:
        value: that holds tensors.
        kind: a class whose objects hold tensors in their attributes; None for none.

    Raises:
        UnknownState: if something in it may hold tensors in a way that is not known here.
    """

    def __init__(self, value: Any, kind: type | None = None):
        self.value, self._kind = value, kind
        self.tensors = list(self._tensors(value))
        self.form: Hashable = self._form(value)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return a value of the same form with other tensors; lists, dictionaries and objects are new ones."""
        waiting = iter(tensors)
        return self._filled(self.value, waiting)

    def _parts(self, value: Any) -> dict[Any, Any] | None:
        """Return what a value consists of; None for one that has no parts."""
        if type(value) in (list, tuple):
            return dict(enumerate(value))
        if type(value) is dict:
            return value
        if self._kind is not None and isinstance(value, self._kind):
            return {name: vars(value)[name] for name in sorted(vars(value)) if name not in _OF_THE_LOOP}
        return None

    def _tensors(self, value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        for part in (self._parts(value) or {}).values():
            yield from self._tensors(part)

    def _form(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return Tensor
        if (parts := self._parts(value)) is not None:
            return type(value), tuple((name, self._form(part)) for name, part in parts.items())
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, PretrainedConfig):
            return id(value)
        raise UnknownState(value)

    def _filled(self, value: Any, waiting: Iterator[Tensor]) -> Any:
        if isinstance(value, Tensor):
            return next(waiting)
        if (parts := self._parts(value)) is None:
            return value
        new = {name: self._filled(part, waiting) for name, part in parts.items()}
        if type(value) in (list, tuple):
            return type(value)(new.values())
        if type(value) is dict:
            return new
        filled = copy.copy(value)
        vars(filled).update(new)
        return filled


def shares(tensors: Sequence[Tensor]) -> bool:
    """Return whether what is written into one of several tensors may have to be seen in another, or in its rows."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    expanded = any(0 in tensor.stride() and tensor.stride() != tensor.contiguous().stride() for tensor in tensors)
    return expanded or len(set(places)) < len(places)
