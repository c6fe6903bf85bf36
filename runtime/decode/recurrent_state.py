"""States that a model carries from call to call beside a cache of transformers', or without one.

A module may keep a state on itself: an attribute that each call makes anew from what it was (RecurrentGemma). Or
`forward` takes states by a name, and gives them back by the same one: in a list (RWKV), or in an object of a class of
the model's file (xLSTM, Mamba of transformers 5.4). In a step all lie at fixed addresses: the model is given buffers,
and what it made of them is copied into them. None can go back to an earlier token.

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

from ..cache.nested_tensors import Nested, UnknownState, shares

_Class = TypeVar("_Class")
_Held = TypeVar("_Held")


def keeps_states(*names: str) -> Callable[[type[_Class]], type[_Class]]:
    """Mark a class whose modules keep states between calls, in attributes of these names."""

    def mark(model_class: type[_Class]) -> type[_Class]:
        model_class._keeps_states = names  # type: ignore[attr-defined]
        return model_class

    return mark


def hands_on_states(name: str, kind: type | None = None) -> Callable[[type[_Class]], type[_Class]]:
    """Mark a class whose `forward` takes states by this name and gives them back by the same one.

    Args:
        name: of the argument, and in the outputs.
        kind: a class whose objects hold the states in their attributes; None for lists.
    """

    def mark(model_class: type[_Class]) -> type[_Class]:
        model_class._hands_on_states, model_class._held_by = name, kind  # type: ignore[attr-defined]
        return model_class

    return mark


def argument_of_states(model: Any) -> str:
    """Return the name by which `forward` takes states and gives them back; empty if it takes none."""
    name: str = getattr(model, "_hands_on_states", "")
    return name


def class_of_states(model: Any) -> type | None:
    """Return the class whose objects hold what `forward` takes and gives back; None if those are lists, or nothing."""
    kind: type | None = getattr(model, "_held_by", None)
    return kind


def carries(model: Any) -> bool:
    """Return whether a model carries states beside a cache of transformers', or without one."""
    return bool(argument_of_states(model) or getattr(model, "_keeps_states", ()))


def are_handed_on(model: Any) -> bool:
    """Return whether the generation loop gives `forward` the states that it gave back, by the same name.

    transformers' own did so by `state` before release 5.24; a class may do it by itself.
    """
    name, states = argument_of_states(model), [torch.zeros((), device=model.device)]
    outputs = ModelOutput()
    outputs[name] = states
    positions = torch.zeros(1, dtype=torch.int64, device=model.device)
    given = {"use_cache": True, "cache_position": positions}  # which release 5.0 counts
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
    if carries(model):
        return CarriedStates(model)
    return NoStates()


def restoring(model: nn.Module, inputs: dict[str, Any], always: bool = False) -> AbstractContextManager[None]:
    """Put what a model carries back where the block raises, or always; `inputs` are those of a call."""
    if carries(model):
        return put_back(model, inputs.get(argument_of_states(model)), always)
    return contextlib.nullcontext()


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that keep states, each with the name of an attribute."""
    names: tuple[str, ...] = getattr(model, "_keeps_states", ())
    return [(module, name) for module in model.modules() for name in names if name in vars(module)]


@contextlib.contextmanager
def put_back(model: nn.Module, given: object = None, always: bool = False) -> Iterator[None]:
    """Put what modules keep, and the states `given` to a call, back where the block raises, or always.

    Whoever runs instead begins where the block began.
    """
    kept = [(module, name, getattr(module, name)) for module, name in _places(model)]
    kind = class_of_states(model)
    held = Nested(given, kind) if isinstance(given, (list, tuple, kind or list)) else Nested([])
    whole = held.filled(held.tensors)
    copies = [(value, value.clone()) for value in [*(one for *_, one in kept), *held.tensors] if _is_tensor(value)]
    done = False
    try:
        yield
        done = not always
    finally:
        if not done:
            for module, name, value in kept:
                setattr(module, name, value)
            if kind is not None and isinstance(given, kind):
                vars(given).clear()
                vars(given).update(vars(whole))
            for tensor, before in copies:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


class CarriedStates(NoStates):
    """The states of one batch size, in buffers; falsy where nothing has them. It holds no module alive."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._kept = [(weakref.ref(module), name) for module, name in _places(model)]
        self.argument = argument_of_states(model)
        self.always_outlive = bool(self._kept)
        self._kind = class_of_states(model)
        self._form = Nested([])
        """What a step is handed, with the buffers in it."""
        self._given = Nested([])
        """What a prompt handed on."""
        self._in_place: list[bool] = []
        """Which of the states that it is handed a step writes into."""
        self._shared = False
        """Whether two states of a prompt were one tensor."""

    def __bool__(self) -> bool:
        return bool(self._kept or self.argument)

    @property
    def arguments(self) -> dict[str, Any]:
        """What a step's forward is given."""
        return {self.argument: self._form.filled(self._handed_on)} if self.argument else {}

    @property
    def _handed_on(self) -> list[Tensor]:
        return self.buffers[len(self.buffers) - len(self._form.tensors) :]

    def forget(self) -> None:
        """Let the next prompt be the first."""
        for module, name in self._kept:
            setattr(_alive(module), name, None)

    def load(self, outputs: Any) -> None:
        """Take over what a prompt left.

        Raises:
            UnknownState: if it has no form that stays, or another one than before.
        """
        self._given = self._handed(outputs)
        values = [*self._values(), *self._given.tensors]
        if not self.buffers and all(isinstance(value, Tensor) for value in values):
            self._shared = shares(self._given.tensors)
            with torch.inference_mode(False):
                self.buffers = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in values]
            self._form = self._given
            self._refer_to_buffers()
        self._check(self._given)
        self._take(values)

    def advance(self, outputs: Any) -> None:
        """Take over what a step made of the buffers.

        Raises:
            UnknownState: if it is of another form than before.
        """
        found = self._handed(outputs)
        self._check(found)
        handed = found.tensors
        self._in_place = list(map(_is_same, self._handed_on, handed))
        if self._shared and any(self._in_place):
            raise UnknownState(found.value)  # what is written into one of them is not seen in the other
        self._take([*self._values(), *handed])

    def _handed(self, outputs: Any) -> Nested:
        """Return what outputs hand on."""
        handed: Any = outputs.get(self.argument) if self.argument else []
        if not isinstance(handed, self._kind or (list, tuple)):
            raise UnknownState(handed)
        return Nested(handed, self._kind)

    def _check(self, handed: Nested) -> None:
        if handed.form != self._form.form:
            raise UnknownState(handed.value)

    def _refer_to_buffers(self) -> None:
        """Keep the form with the buffers in it, and no tensor of a prompt's."""
        self._form = Nested(self._form.filled(self._handed_on), self._kind)

    def _values(self) -> list[Any]:
        return [getattr(_alive(module), name) for module, name in self._kept]

    def _take(self, values: list[Any]) -> None:
        """Copy values into the buffers, and let modules keep these."""
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
            self._form = other._form
            self._refer_to_buffers()
        self._check(other._form)
        self._given, self._in_place, self._shared = other._given, other._in_place, other._shared
        self._take(list(other.buffers))

    def leave(self) -> Any:
        """Leave modules with states of their own, which no later call writes; return those that are handed on.

        A model that writes to what it is given has written to what the prompt handed on, which are the caller's; so
        is an object that it gives back.
        """
        for (module, name), buffer in zip(self._kept, self.buffers, strict=False):
            setattr(_alive(module), name, buffer.clone())
        given, left = self._given, []
        for tensor, buffer, same in zip(given.tensors, self._handed_on, self._in_place, strict=True):
            left.append(tensor.copy_(buffer) if same else buffer.clone())
        if self._kind is not None:
            vars(given.value).update(vars(given.filled(left)))
        return given.value if self._kind is not None or all(self._in_place) else given.filled(left)

    def free(self) -> None:
        """Give the memory back."""
        self.buffers, self._given, self._form = [], Nested([]), Nested([])


def _alive(reference: weakref.ref[_Held]) -> _Held:
    found = reference()
    if found is None:
        raise ReferenceError("a module of this graph's model is gone")
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_same(one: Tensor, other: Any) -> bool:
    """Return whether two tensors of the same form are the same memory."""
    if one is other:
        return True
    return isinstance(other, Tensor) and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
