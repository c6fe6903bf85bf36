"""What a decode step changes of its model, or finds there of the prompt: nothing, or there is no graph.

A replay runs no Python. What a step leaves on a module, counts, or writes to a tensor of the model would stay as it
was when it was captured; states that classes are marked for (`recurrent_state`) lie in buffers and are none of it. And
what a prompt leaves on a module is read by a replay as the prompt left it that was read before the capture.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..guards.snapshot import KNOWN, REGISTRIES, Snapshot, copied, is_other, parts

_NOTHING = object()


class Changes(NamedTuple):
    """What a step changed."""

    names: list[tuple[dict[str, Any], str]]
    """Attributes, each with the dictionary that has it."""
    tensors: list[Tensor]
    """What was written in place."""

    def named(self, model: nn.Module) -> str:
        """Return the attributes by their places in a model."""
        places = {id(vars(module)): f"{path}." if path else "" for path, module in model.named_modules()}
        return ", ".join(f"{places.get(id(now), '')}{name}" for now, name in self.names)


class Before:
    """A model before a step, or before a call that begins with one.

    Args:
        model: in evaluation mode.
        besides: tensors that a step may write.
        keeps: whether the contents of tensors are kept, which are no parameters.
        layers: of a cache, on which a model may put something as on its modules; what is in buffers is none of it.
    """

    def __init__(self, model: nn.Module, besides: list[Tensor], *, keeps: bool = False, layers: Iterable[object] = ()):
        self._snapshot = Snapshot(model)
        self._layers = [(vars(layer), dict(vars(layer))) for layer in layers]
        self._versions = self._snapshot.versions()
        self._besides = {id(tensor) for tensor in besides}
        held = (tensor for tensor in self._snapshot.tensors if keeps and not isinstance(tensor, nn.Parameter))
        self._contents = {id(tensor): tensor.clone() for tensor in held}

    def changes(self) -> Changes | None:
        """Return what was changed since; None for nothing."""
        known = self._snapshot
        both = zip(known.tensors, self._versions, known.versions(), strict=True)
        written = [tensor for tensor, before, now in both if before != now and id(tensor) not in self._besides]
        on_layers = [(now, name) for now, before in self._layers for name in _others(now, before)]
        if known.is_current() and not written and not on_layers:
            return None
        return Changes([*self._names({id(tensor) for tensor in written}), *on_layers], written)

    def _names(self, written: set[int]) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the attributes that have another value now, or hold a tensor that was written."""
        for now, before in self._snapshot.attributes:
            for name in sorted(now.keys() - REGISTRIES | before.keys()):
                value = now.get(name, _NOTHING)
                if is_other(value, before.get(name, _NOTHING)) or any(id(part) in written for part in parts([value])):
                    yield now, name

    @torch.no_grad()
    def put_back(self, changes: Changes) -> None:
        """Set to what it was here what turned out to change later; what was not there is taken away."""
        held = {id(now): before for now, before in self._snapshot.attributes}
        values: list[Any] = []
        for now, name in changes.names:
            if name in (before := held.get(id(now), {})):
                now[name] = before[name]
                values.append(before[name])
            else:
                now.pop(name, None)
        for tensor in [*changes.tensors, *parts(values)]:
            if (contents := self._contents.get(id(tensor))) is not None:
                tensor.copy_(contents)


def _others(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    names = sorted(now.keys() | before.keys())
    return [name for name in names if is_other(now.get(name, _NOTHING), before.get(name, _NOTHING))]


class Kept:
    """What modules keep behind a prompt, tensors and plain values, as it was when a step was proved.

    It holds no module alive.
    """

    def __init__(self, model: nn.Module):
        self._held = [
            (weakref.ref(module), _held(vars(module)), frozenset(vars(module))) for module in model.modules()
        ]
        self._unread: set[tuple[int, str]] = set()

    def watch(self, step: Callable[[], object]) -> None:
        """Run a step and note which tensors it leaves unread: a prompt makes anew what it keeps of itself."""
        held = [(module, values) for reference, values, _ in self._held if (module := reference()) is not None]
        named = ((module, name, parts([value])) for module, values in held for name, value in values.items())
        self._look(step, [(module, name) for module, name, inside in named if any(map(torch.is_tensor, inside))])

    def is_read(self, step: Callable[[], object]) -> bool:
        """Return whether a step reads, of what modules keep, anything that is another one now.

        The step is run once to see it, for each attribute that is met as another one.
        """
        others = [(module, name) for module, name in self._others() if (id(module), name) not in self._unread]
        return bool(others) and self._look(step, others)

    def _look(self, step: Callable[[], object], places: list[tuple[nn.Module, str]]) -> bool:
        """Run a step and return whether it reads one of the attributes; what it does not read is looked for once."""
        with _reading(places) as found:
            step()
        self._unread |= {(id(module), name) for module, name in places} - found
        return bool(found)

    def _others(self) -> Iterator[tuple[nn.Module, str]]:
        for reference, values, names in self._held:
            module = reference()
            if module is None:
                continue
            now = vars(module)
            for name, value in values.items():
                if (new := now.get(name, _NOTHING)) is not value and is_other(new, value):
                    yield module, name
            if now.keys() != names:
                new_names = ((name, value) for name, value in _held(now).items() if name not in names)
                yield from ((module, name) for name, value in new_names if is_other(value, _of_class(module, name)))


def _of_class(module: nn.Module, name: str) -> Any:
    return getattr(type(module), name, _NOTHING)


def _held(state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are tensors or plain values, containers copied."""
    own = ((name, state[name]) for name in state.keys() - REGISTRIES)
    return {name: copied(value) for name, value in own if all(isinstance(part, KNOWN) for part in parts([value]))}


@contextlib.contextmanager
def _reading(places: list[tuple[nn.Module, str]]) -> Iterator[set[tuple[int, str]]]:
    """Yield which attributes are read inside, by module and name."""
    found: set[tuple[int, str]] = set()
    sought: dict[nn.Module, set[str]] = {}
    for module, name in places:
        sought.setdefault(module, set()).add(name)
    kinds = {module: type(module) for module in sought}
    for module, kind in kinds.items():

        def read(self: nn.Module, name: str, kind: Any = kind, names: set[str] = sought[module]) -> Any:
            if name in names:
                found.add((id(self), name))
            return kind.__getattribute__(self, name)

        module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})
    try:
        yield found
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
