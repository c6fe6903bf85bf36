"""What a captured call depends on besides its arguments, and whether any of it has changed since.

A graph keeps the addresses of weights and whatever Python decided while it was captured. A snapshot holds both: where
every parameter and buffer lies, and every attribute of every module, of its configuration and of other objects that
it holds. Comparing costs no Python for each module: dictionaries are compared whole, by identity first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .written import version_of

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
"""The dictionaries of a module whose entries matter."""
REGISTRIES = frozenset(
    {
        *_REGISTRIES,
        "_backward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_non_persistent_buffers_set",
        "_is_full_backward_hook",
    }
)
_DEEPEST, _MOST_OBJECTS = 4, 20_000
"""How deep objects inside objects are looked into, and how many of them with all modules; models need far less."""
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class Snapshot:
    """A model as it was when its forward was captured; it holds its parts, but is not to hold the model itself."""

    def __init__(self, model: nn.Module):
        self.is_complete = True
        """Whether every object that the model holds could be looked into."""
        self.refers_to_itself = False
        """Whether a part knows the model by an attribute: whoever keeps the snapshot would keep the model alive."""
        self._model_id = id(model)
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        self._single: list[tuple[dict[str, Any], str, Tensor]] = []
        self._states: list[dict[str, Any]] = []
        self._own: list[tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = []
        self._values: list[Any] = []
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        held: dict[int, Tensor] = {}
        seen: set[int] = set()
        for module in model.modules():
            self._add(module, held, seen, 0)
        self._entries = [dict(registry) for registry in self._filled]
        self._lengths = self._sizes()
        self._tensors = list(held.values())
        self._addresses = self._now()

    @property
    def tensors(self) -> list[Tensor]:
        """Every parameter and buffer, and every tensor that is an attribute."""
        return self._tensors

    def is_mapped(self) -> bool:
        """Return whether every tensor still lies where it did, so that a replay reads nobody else's memory."""
        return self._now() == self._addresses

    def is_current(self) -> bool:
        """Return whether nothing was replaced, hooked, switched or set to another value.

        0.15 ms for the 450 modules of BERT-large on a slow CPU; looking at each in Python took seven times that.
        """
        if any(self._empty) or self._sizes() != self._lengths:
            return False
        if any(registry.get(name) is not tensor for registry, name, tensor in self._single):
            return False
        try:
            return self._filled == self._entries and [get(state) for get, state in self._own] == self._values
        except (KeyError, RuntimeError, ValueError, TypeError):  # replaced tensors and arrays have no single truth
            return False

    @property
    def attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Every dictionary of attributes, parameters, buffers, parts and hooks, each with what it held."""
        registries = [*zip(self._filled, self._entries, strict=True), *((registry, {}) for registry in self._empty)]
        return [*self._held, *registries]

    def versions(self) -> list[int | None]:
        """Return how often each tensor was written in place; those of inference mode do not count."""
        return list(map(version_of, self._tensors))

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _sizes(self) -> list[int]:
        return list(map(len, self._states))

    def _add(self, owner: Any, held: dict[int, Tensor], seen: set[int], depth: int) -> None:
        """Take over the attributes of a module, or of an object that one holds, and of what that holds."""
        if id(owner) in seen:
            return
        if depth > _DEEPEST or len(seen) > _MOST_OBJECTS:
            self.is_complete = False
            return
        seen.add(id(owner))
        state = vars(owner)
        own = state
        if isinstance(owner, nn.Module):
            own = {name: value for name, value in state.items() if name not in REGISTRIES}
            for registry in [state[name] for name in _REGISTRIES if name in state]:
                self._register(registry, held)
        self._states.append(state)
        copies = {name: copied(value) for name, value in own.items()}
        self._held.append((state, copies))
        if own:
            get = itemgetter(*own)
            self._own.append((get, state))
            self._values.append(get(copies))
        for name, value in own.items():
            for part in parts([value]):
                self._add_part(part, held, seen, depth)
            if isinstance(value, Tensor) and value.numel() == 1:
                self._single.append((state, name, value))

    def _register(self, registry: dict[str, Any], held: dict[int, Tensor]) -> None:
        (self._filled if registry else self._empty).append(registry)
        for name, value in registry.items():
            self.refers_to_itself |= id(value) == self._model_id
            if isinstance(value, Tensor):
                held[id(value)] = value
                if value.numel() == 1:  # equal to another one of the same value
                    self._single.append((registry, name, value))

    def _add_part(self, part: Any, held: dict[int, Tensor], seen: set[int], depth: int) -> None:
        if isinstance(part, Tensor):
            held[id(part)] = part
        elif isinstance(part, nn.Module):  # one that is kept from being registered
            self.refers_to_itself |= id(part) == self._model_id
            for module in part.modules():
                self._add(module, held, seen, 0)
        elif hasattr(part, "__dict__") and not isinstance(part, _CODE):
            self._add(part, held, seen, depth + 1)


def copied(value: Any) -> Any:
    """Return a container of the same contents, anything else as it is."""
    return value.copy() if type(value) in (dict, list, set) else value


def parts(values: Any) -> Iterator[Any]:
    """Yield values, and the contents of those that are containers."""
    for value in values:
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            yield from value
        else:
            yield value


def unfit_weights(tensors: list[Tensor], device: torch.device) -> bool:
    """Return whether a tensor is of a class of its own (quantised, distributed) or on another device."""
    return any(type(tensor) not in (Tensor, nn.Parameter) or tensor.device != device for tensor in tensors)
