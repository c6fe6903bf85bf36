"""Caches of a class that a model's file derives from transformers' growing one, with states beside the layers.

MiniMax's has a list with a state of every layer of linear attention. A step is given an object of both classes, the
file's and `PreallocatedCache`: keys and values lie in buffers, and what the file's methods put into attributes of
their own is theirs; `runtime/decode/recurrent_state.py` keeps it at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from .layers import PreallocatedLayer
from .nested_tensors import _OF_THE_LOOP, Nested, UnknownState
from .preallocated import PreallocatedCache

_Class = TypeVar("_Class")
_MAY_DIFFER = frozenset({
    "__init__", "__len__", "__repr__", "__annotate__", "__annotate_func__", "batch_repeat_interleave",
    "batch_select_indices", "crop", "is_croppable", "reorder_cache", "reset",
})  # fmt: skip
"""What a class may define anew of a cache: a step asks none of it."""


def keeps_own_cache(kind: type) -> Callable[[type[_Class]], type[_Class]]:
    """Mark a class whose models make a cache of class `kind`, derived from transformers' growing one, of their own."""

    def mark(model_class: type[_Class]) -> type[_Class]:
        model_class._own_cache = kind  # type: ignore[attr-defined]
        return model_class

    return mark


def own_cache_of(model: Any) -> type[DynamicCache] | None:
    """Return the class of the cache that a model makes of its own; None if it takes transformers'."""
    kind: type[DynamicCache] | None = getattr(model, "_own_cache", None)
    return kind


def made_by(kind: type[DynamicCache]) -> DynamicCache | None:
    """Return an empty cache of a class; None if that wants arguments."""
    try:
        return kind()
    except TypeError:
        return None


class OwnCache(PreallocatedCache):
    """Keys and values in buffers, of which there are as many as a prompt writes, and what another class keeps beside.

    Subclasses are made by `own_like`, of that class too.
    """

    kind: type[DynamicCache]

    def __init__(self, batch_size: int, capacity: int, device: torch.device | str):
        super().__init__(0, batch_size, capacity, device)
        self._made: list[PreallocatedLayer] = []
        """Every layer that was ever written: the next text writes the same ones."""
        self.layer_class_to_replicate = self._next_layer
        self._plain = frozenset({*self.__dict__, "_plain"})
        self.own = _fresh(self.kind)

    @property
    def own(self) -> dict[str, Any]:
        """What the other class keeps in attributes, by name."""
        return {name: self.__dict__[name] for name in sorted(self.__dict__.keys() - self._plain)}

    @own.setter
    def own(self, attributes: dict[str, Any]) -> None:
        for name in self.__dict__.keys() - self._plain:
            del self.__dict__[name]
        self.__dict__.update(attributes)

    def _next_layer(self) -> PreallocatedLayer:
        if len(self.layers) == len(self._made):
            self._made.append(PreallocatedLayer(self))
        return self._made[len(self.layers)]

    def _has_layers(self, count: int) -> None:
        while len(self.layers) < count:
            self.layers.append(self._next_layer())

    @property
    def knows_length(self) -> bool:
        """Whether the first layer, which models ask for the number of tokens, has keys and values.

        Else the growing cache says 0, and the model's masks are of the tokens to come alone.
        """
        return not self.layers or bool(self.attention_layers[0].buffers)

    @property
    def length(self) -> int:
        """Number of tokens before the next one, as far as the host knows."""
        return max((layer.length for layer in self.attention_layers if layer.buffers), default=self._tokens)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, as far as the host knows; states stay as they are."""
        self._tokens = length
        for layer in self.attention_layers:
            layer.rewind(length if layer.buffers else 0)

    def clear(self) -> None:
        """Forget every token, and everything that was kept beside the layers."""
        super().clear()
        self.layers.clear()
        self.own = _fresh(self.kind)

    def free(self) -> None:
        """Give the memory back."""
        self.layers[:] = self._made
        super().free()
        self.own = {}

    def copy_from(self, other: PreallocatedCache) -> None:
        """Take over the keys and values that a smaller cache of the same model holds."""
        self._has_layers(len(other.layers))
        super().copy_from(other)

    def load(self, dynamic: DynamicCache) -> None:
        """Take over what a growing cache of the other class holds; states in memory of their own."""
        self._has_layers(len(dynamic.layers))
        super().load(dynamic)
        self.own = _copied(own_attributes(dynamic))

    def store(self, dynamic: DynamicCache, length: int, drafted: bool = False) -> None:
        """Make a growing cache of the other class hold copies of the first `length` tokens, and of the states."""
        super().store(dynamic, length, drafted)
        dynamic.__dict__.update(_copied(self.own))


def own_like(
    kind: type[DynamicCache], batch_size: int, capacity: int, device: torch.device | str
) -> PreallocatedCache | None:
    """Return a cache that is one of `kind` too; None if its methods would meet others than they know."""
    bases = [base for base in kind.__mro__ if issubclass(base, DynamicCache) and base is not DynamicCache]
    written = {name for base in bases for name, value in vars(base).items() if name[:2] != "__" or callable(value)}
    taken = {*dir(PreallocatedCache(0, 1, 1, "cpu")), *dir(OwnCache), "__getattr__", "_made", "_plain"}
    if written & taken - _MAY_DIFFER:
        return None
    fresh = made_by(kind)
    if fresh is None:
        return None
    try:
        Nested(own_attributes(fresh))
    except UnknownState:
        return None
    if own_attributes(fresh).keys() & taken or fresh.layers or fresh.layer_class_to_replicate is not DynamicLayer:
        return None
    made: OwnCache = type(kind.__name__, (OwnCache, kind), {"kind": kind, "__module__": kind.__module__})(
        batch_size, capacity, device
    )
    return made


def own_attributes(cache: DynamicCache) -> dict[str, Any]:
    """Return what a growing cache keeps besides what transformers' has."""
    plain = vars(DynamicCache()).keys() | {*_OF_THE_LOOP}
    return {name: value for name, value in vars(cache).items() if name not in plain}


def own_tensors(cache: DynamicCache) -> list[Tensor]:
    """Return the tensors that a growing cache keeps beside its layers.

    Raises:
        UnknownState: if something there may hold tensors in a way that is not known here.
    """
    return Nested(own_attributes(cache)).tensors


def _fresh(kind: type[DynamicCache]) -> dict[str, Any]:
    return own_attributes(kind())


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with tensors in memory of their own."""
    held = Nested(attributes)
    copies: dict[str, Any] = held.filled([tensor.clone() for tensor in held.tensors])
    return copies
