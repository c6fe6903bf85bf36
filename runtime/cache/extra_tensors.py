"""Layers of a class of a model's file that keep more tensors beside keys and values, which grow by the same tokens.

MiniMax M3's have the keys of an indexer. The class is marked with the methods that grow something: each is given the
part of the new tokens and returns all there is, as `update` does with keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .layers import CacheFull, PreallocatedLayer, choose_rows

if TYPE_CHECKING:
    from .preallocated import PreallocatedCache

_Class = TypeVar("_Class")
_Grown = Mapping[str, tuple[str, int]]
_KNOWN: dict[type, _Grown] = {}
"""By the class of a layer, the attribute and dimension that each of its methods grows."""


def grows_in_layers(kind: type, **grown: tuple[str, int]) -> Callable[[type[_Class]], type[_Class]]:
    """Mark a class whose caches may have layers of class `kind`, which grow more than keys and values.

    What chooses by it may choose padding alone, which it is not told of. Attention then reads every key with the same
    weight, and in a buffer there are more of them: the loop takes rows without padding.

    Args:
        kind: of the layers.
        grown: by the name of a method, the attribute that it grows and the dimension of tokens.
    """
    _KNOWN[kind] = grown

    def mark(model_class: type[_Class]) -> type[_Class]:
        model_class._takes_padding = False  # type: ignore[attr-defined]
        return model_class

    return mark


def takes_padding(model: Any) -> bool:
    """Return whether a step of a model reads padded rows as the model does with a growing cache."""
    return getattr(model, "_takes_padding", True)


def grown_by(kind: type) -> _Grown | None:
    """Return what layers of a class grow; None if nothing is known of it.

    The class that a cache's layers are of may be that of the original file, whose code is the same: a layer's class
    registers itself by the kind of attention, and the last one that was imported stands there.
    """
    if kind in _KNOWN:
        return _KNOWN[kind]
    return next((grown for known, grown in _KNOWN.items() if _is_same(kind, known)), None)


def _is_same(one: type, other: type) -> bool:
    """Return whether two classes of one name have the same code."""
    if one.__name__ != other.__name__ or one.__bases__ != other.__bases__:
        return False
    codes = [
        {name: _code(value.__code__) for name, value in vars(kind).items() if callable(value)} for kind in (one, other)
    ]
    return codes[0] == codes[1]


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return what a function does, wherever it stands."""
    constants = [_code(value) if isinstance(value, CodeType) else (type(value), value) for value in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


class GrownLayer(PreallocatedLayer):
    """One layer's keys and values, and tensors that grow beside them by methods of other names.

    A step gives the model every slot; those that hold no token are its to mask.
    """

    def __init__(self, cache: PreallocatedCache, grown: _Grown):
        super().__init__(cache)
        self.grown = grown
        self.beside: dict[str, Tensor] = {}
        """A buffer by the method that grows it."""
        self.lengths = dict.fromkeys(grown, 0)
        for method in grown:
            setattr(self, method, partial(self._grow, method))

    def _grow(self, method: str, new: Tensor) -> Tensor:
        """Write what new tokens bring behind what is there; return all that may be read."""
        dimension = self.grown[method][1]
        buffer = self._buffer(method, new)
        if self.cache.stepping:
            return buffer.index_copy_(dimension, self.cache.slots, new)
        start = self.lengths[method]
        end = self.lengths[method] = start + new.shape[dimension]
        if end > self.cache.capacity:
            raise CacheFull(end, self.cache.capacity)
        buffer.narrow(dimension, start, end - start).copy_(new)
        return new if start == 0 else buffer.narrow(dimension, 0, end)

    def _buffer(self, method: str, like: Tensor) -> Tensor:
        """Return the buffer of a method, zeroed where there was none, for what has the form of `like`."""
        if method not in self.beside:
            shape = list(like.shape)
            shape[self.grown[method][1]] = self.cache.capacity
            with torch.inference_mode(False):
                self.beside[method] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self.beside[method]

    def free(self) -> None:
        """Give the buffers back."""
        super().free()
        self.beside.clear()
        self.lengths = dict.fromkeys(self.grown, 0)

    @property
    def buffers(self) -> list[Tensor]:
        """Everything with a slot for each token that has been written."""
        return [*super().buffers, *self.beside.values()]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens, as far as the host knows."""
        super().rewind(length)
        self.lengths = {method: length if method in self.beside else 0 for method in self.grown}

    def spoil(self, start: int, value: float) -> None:
        """Fill the values, and what grows beside them, of every slot from `start` on."""
        super().spoil(start, value)
        for method, buffer in self.beside.items():
            buffer.narrow(self.grown[method][1], start, self.cache.capacity - start).fill_(value)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose rows, those of what grows beside keys too."""
        super().reorder_cache(beam_idx)
        for buffer in self.beside.values():
            choose_rows(buffer, beam_idx)

    def take(self, other: Any, length: int) -> None:
        """Take over what another layer holds of the first `length` tokens."""
        super().take(other, length)
        for method, (attribute, dimension) in self.grown.items():
            theirs = other.beside.get(method) if isinstance(other, GrownLayer) else getattr(other, attribute, None)
            if theirs is not None and length:
                mine = self._buffer(method, theirs)
                mine.narrow(dimension, 0, length).copy_(theirs.narrow(dimension, 0, length))
        self.rewind(length)

    def give(self, growing: Any, start: int, stop: int) -> None:
        """Make a growing layer of the model's file hold copies of the tokens from `start` to `stop`."""
        super().give(growing, start, stop)
        for method, buffer in self.beside.items():
            attribute, dimension = self.grown[method]
            setattr(growing, attribute, buffer.narrow(dimension, start, stop - start).clone())
