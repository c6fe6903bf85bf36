"""States that a model carries from call to call without a cache: kept by its modules, or handed on with the outputs.

A module may keep a state on itself: an attribute that each call makes anew from what it was (RecurrentGemma). Or
`forward` takes states by a name, and gives them back by the same one (RWKV). In a step both lie at fixed addresses:
the model is given buffers, and what it made of them is copied into them. Neither can go back to an earlier token.

The classes are marked by `keeps_states` and `hands_on_states`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..core.target import CARRIED

OFFERS: dict[str, dict[str, str]] = {
    "keeps_states": {},
    "hands_on_states": {},
}

_Class = TypeVar("_Class")


def keeps_states(*names: str) -> Callable[[type[_Class]], type[_Class]]:
    """Mark a class whose modules keep states between calls, in attributes of these names."""

    def mark(model_class: type[_Class]) -> type[_Class]:
        model_class._keeps_states = names  # type: ignore[attr-defined]
        return model_class

    return mark


def hands_on_states(name: str) -> Callable[[type[_Class]], type[_Class]]:
    """Mark a class whose `forward` takes a list of states by this name and gives it back by the same one."""

    def mark(model_class: type[_Class]) -> type[_Class]:
        model_class._hands_on_states = name  # type: ignore[attr-defined]
        return model_class

    return mark


class UnknownState(TypeError):
    """What a model carries is no tensor of a fixed form."""

    def __init__(self, found: object):
        what = f"{tuple(found.shape)} in {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        super().__init__(f"a state that the model carries from call to call cannot lie at a fixed address: {what}")


def argument_of_states(model: Any) -> str:
    """Return the name by which `forward` takes states and gives them back; empty if it takes none."""
    name: str = getattr(model, "_hands_on_states", "")
    return name


def carries(model: Any) -> bool:
    """Return whether a model carries states without a cache."""
    return bool(argument_of_states(model) or getattr(model, "_keeps_states", ()))


def are_handed_on(model: Any) -> bool:
    """Return whether the generation loop gives `forward` the states that it gave back, by the same name.

    transformers' own did so by `state` before release 5.24; a class may do it by itself.
    """
    name, states = argument_of_states(model), [torch.zeros(())]
    outputs = ModelOutput()
    outputs[name] = states
    given = {"use_cache": True, "cache_position": torch.zeros(1, dtype=torch.int64)}  # which release 5.0 counts
    next_given = model._update_model_kwargs_for_generation(outputs, given, is_encoder_decoder=False)
    return next_given.get(name) is states


class NoStates:
    """What most models carry: nothing."""

    def __init__(self) -> None:
        self.argument = ""
        """The name by which `forward` takes states; empty if it takes none."""
        self.always_outlive = False
        """Whether states are there after a call, whatever it returns."""
        self.buffers: list[Tensor] = []

    def __bool__(self) -> bool:
        return False

    @property
    def arguments(self) -> dict[str, Any]:
        """What a step's forward is given."""
        return {}

    def forget(self) -> None:
        """Let the next prompt be the first."""

    def load(self, outputs: Any) -> None:
        """Take over what a prompt left."""

    def advance(self, outputs: Any) -> None:
        """Take over what a step made of the buffers."""

    def held(self) -> AbstractContextManager[None]:
        """Leave the states as they are, whatever is run inside."""
        return contextlib.nullcontext()

    def copy_from(self, other: Any) -> None:
        """Go on where another graph of the same model ended."""

    def leave(self) -> Any:
        """Leave modules with states of their own; return those that are handed on."""

    def free(self) -> None:
        """Give the memory back."""


def carried_by(model: nn.Module) -> NoStates:
    """Return where the states of a model lie that it carries from call to call, of one batch size."""
    if CARRIED and carries(model):
        return CarriedStates(model)
    return NoStates()


def restoring(model: nn.Module, inputs: dict[str, Any]) -> AbstractContextManager[None]:
    """Put what a model carries back where the block raises; `inputs` are those of a call."""
    if CARRIED and carries(model):
        return put_back(model, inputs.get(argument_of_states(model)))
    return contextlib.nullcontext()


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that keep states, each with the name of an attribute."""
    names: tuple[str, ...] = getattr(model, "_keeps_states", ())
    return [(module, name) for module in model.modules() for name in names if name in vars(module)]


@contextlib.contextmanager
def put_back(model: nn.Module, given: object = None) -> Iterator[None]:
    """Put what modules keep, and the states `given` to a call, back where the block raises.

    Whoever runs instead begins where the block began.
    """
    kept = [(module, name, getattr(module, name)) for module, name in _places(model)]
    held = [value for _, _, value in kept] + (list(given) if isinstance(given, (list, tuple)) else [])
    copies = [(value, value.clone()) for value in held if isinstance(value, Tensor)]
    try:
        yield
    except BaseException:
        for module, name, value in kept:
            setattr(module, name, value)
        for tensor, before in copies:
            if not torch.equal(tensor, before):
                tensor.copy_(before)
        raise


class CarriedStates(NoStates):
    """The states of one batch size, in buffers; falsy where no module has them. It holds no module alive."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._kept = [(weakref.ref(module), name) for module, name in _places(model)]
        self.argument = argument_of_states(model)
        self.always_outlive = bool(self._kept)
        self._form: type = list
        self._given: Any = []
        """The list in which a prompt's states were handed on."""
        self._in_place = False
        """Whether a step writes to the states that it is given."""

    def __bool__(self) -> bool:
        return bool(self._kept or self.argument)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a step's forward is given."""
        return {self.argument: self._form(self.buffers[len(self._kept) :])} if self.argument else {}

    def forget(self) -> None:
        """Let the next prompt be the first."""
        for module, name in self._kept:
            setattr(_alive(module), name, None)

    def load(self, outputs: Any) -> None:
        """Take over what a prompt left.

        Raises:
            UnknownState: if it is no list of tensors, or of another form than before.
        """
        self._given = []
        if self.argument:
            handed = outputs.get(self.argument)
            if type(handed) not in (list, tuple):
                raise UnknownState(handed)
            self._form, self._given = type(handed), handed
        values = [*self._values(), *self._given]
        if not self.buffers and all(isinstance(value, Tensor) for value in values):
            with torch.inference_mode(False):
                self.buffers = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]
        self._take(values)

    def advance(self, outputs: Any) -> None:
        """Take over what a step made of the buffers.

        Raises:
            UnknownState: if it is of another form than before.
        """
        handed: Any = outputs.get(self.argument) if self.argument else []
        if type(handed) not in (list, tuple):
            raise UnknownState(handed)
        own = self.buffers[len(self._kept) :]
        self._in_place = all(map(_is_same, own, handed))
        self._take([*self._values(), *handed])

    def _values(self) -> list[Any]:
        return [getattr(_alive(module), name) for module, name in self._kept]

    def _take(self, values: list[Any]) -> None:
        """Copy values into the buffers, and let the modules keep these."""
        if len(values) != len(self.buffers):
            raise UnknownState(values)
        for buffer, value in zip(self.buffers, values, strict=True):
            form = (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None
            if form != (buffer.shape, buffer.dtype, buffer.device):
                raise UnknownState(value)
        own = {buffer.untyped_storage().data_ptr() for buffer in self.buffers}
        moved = [not _is_same(*both) for both in zip(self.buffers, values, strict=True)]
        found = [  # a part of a buffer is read before any of them is written
            value.clone() if move and value.untyped_storage().data_ptr() in own else value
            for value, move in zip(values, moved, strict=True)
        ]
        for buffer, value, move in zip(self.buffers, found, moved, strict=True):
            if move:
                buffer.copy_(value)
        self._give(self.buffers)

    def _give(self, values: list[Tensor]) -> None:
        for (module, name), value in zip(self._kept, values, strict=False):
            setattr(_alive(module), name, value)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Leave the states as they are, whatever is run inside."""
        copies = [buffer.clone() for buffer in self.buffers]
        try:
            yield
        finally:
            for buffer, before in zip(self.buffers, copies, strict=True):
                buffer.copy_(before)
            self._give(self.buffers)

    def copy_from(self, other: CarriedStates) -> None:
        """Go on where another graph of the same model ended."""
        if not self.buffers:
            with torch.inference_mode(False):
                self.buffers = [torch.empty_like(buffer) for buffer in other.buffers]
        self._form, self._given, self._in_place = other._form, other._given, other._in_place
        self._take(list(other.buffers))

    def leave(self) -> Any:
        """Leave modules with states of their own, which no later call writes; return those that are handed on.

        A model that writes to what it is given has written to what the prompt handed on, which are the caller's.
        """
        self._give([buffer.clone() for buffer in self.buffers[: len(self._kept)]])
        own = self.buffers[len(self._kept) :]
        if not self._in_place:
            return self._form(buffer.clone() for buffer in own)
        for tensor, buffer in zip(self._given, own, strict=True):
            tensor.copy_(buffer)
        return self._given

    def free(self) -> None:
        """Give the memory back."""
        self.buffers, self._given = [], []


def _alive(module: weakref.ref[nn.Module]) -> nn.Module:
    found = module()
    if found is None:
        raise ReferenceError("a module of this graph's model is gone")
    return found


def _is_same(one: Tensor, other: Any) -> bool:
    """Return whether two tensors of the same form are the same memory."""
    if one is other:
        return True
    return isinstance(other, Tensor) and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
