"""Tensors in what holds them: lists, tuples and dictionaries, one in another, or an object of a class of the model's.

What is no tensor there belongs to the form: a step that finds another form than the one before is another step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
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
        kind: a class whose object holds tensors in its attributes; None for none.

    Raises:
        UnknownState: if something in it may hold tensors in a way that is not known here.
    """

    def __init__(self, value: Any, kind: type | None = None):
        self.value = value
        self._is_object = kind is not None and isinstance(value, kind)
        held = vars(value) if self._is_object else value
        if self._is_object:
            held = {name: held[name] for name in sorted(held) if name not in _OF_THE_LOOP}
        self._leaves, self._spec = tree_flatten(held)
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.form = self._spec, [_form(leaf) for leaf in self._leaves]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return a value of the same form with other tensors; lists, dictionaries and objects are new ones."""
        waiting = iter(tensors)
        made = tree_unflatten(
            [next(waiting) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves], self._spec
        )
        if not self._is_object:
            return made
        filled = copy.copy(self.value)
        vars(filled).update(made)
        return filled


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Tensor
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    if isinstance(leaf, PretrainedConfig):
        return id(leaf)
    raise UnknownState(leaf)


def shares(tensors: Sequence[Tensor]) -> bool:
    """Return whether what is written into one of several tensors may have to be seen in another, or in its rows."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()]
    expanded = any(0 in tensor.stride() and tensor.stride() != tensor.contiguous().stride() for tensor in tensors)
    return expanded or len(set(places)) < len(places)
