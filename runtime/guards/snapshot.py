"""What a captured call depends on besides its arguments, and whether any of it has changed since.

A graph keeps the addresses of weights and whatever Python decided while it was captured. A snapshot holds both: where
every parameter and buffer lies, every attribute of every module, of its configuration and of other objects that it
holds, the class of each module, and the code that those run (`code_guard`). Comparing costs no Python for each module:
lists of values are compared whole, by identity first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.cache_utils import Cache

from .code_guard import CodeGuard, code_of
from .tensor_version import version_of

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
_OF_CALLS = (GenerationConfig, Cache)
"""What calls bring along or leave behind: no forward is decided by it."""
_PLAIN = frozenset({bool, int, float, str, NoneType, torch.dtype, torch.device, dict, OrderedDict, list, set, tuple})
_NOTHING = object()
KNOWN = (Tensor, bool, int, float, str, NoneType, torch.dtype, torch.device)
"""What a model's code leaves on modules, as a rule."""
_MOST_NESTED = 4
"""How deep containers inside containers are looked into."""


class Snapshot:
    """A model as it was when its forward was captured; it holds its parts, but is not to hold the model itself.

    Args:
        model: whose modules are compared.
        left: attributes that the model's own code leaves on modules, and that are no part of this.
    """

    def __init__(self, model: nn.Module, left: frozenset[str] = frozenset()):
        self.is_complete = True
        """Whether every object that the model holds could be looked into."""
        self.refers_to_itself = False
        """Whether a part knows the model by an attribute: what holds it is compared by identity alone."""
        self._model, self._left = weakref.ref(model), left
        self._empty: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        self._single: list[tuple[dict[str, Any], str, Tensor]] = []
        self._states: list[dict[str, Any]] = []
        self._copies: list[dict[str, Any]] = []
        self._one_by_one: list[tuple[weakref.ref[Any], dict[str, Any]]] = []
        """The model, and modules on which something is left: their attributes are read by name."""
        self._modules: list[nn.Module] = []
        self._held: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        for module in model.modules():
            self._add(module)
        self._kind, self._kinds = type(model), list(map(type, self._modules))
        self._values = list(chain.from_iterable(map(dict.values, self._copies)))
        self._entries = [dict(registry) for registry in self._filled]
        self._tensors = list(self._held.values())
        self._addresses = self._now()
        elsewhere = any(tensor.device.type != "cpu" for tensor in self._tensors)
        self._host = [(tensor, version_of(tensor)) for tensor in self._tensors if elsewhere and is_of_host(tensor)]
        """Tensors that a model on a device holds on the host: a graph has copies of what they were."""
        self.code: CodeGuard = code_of({self._kind, *self._kinds}, self._chosen())
        """What its classes run."""

    @property
    def tensors(self) -> list[Tensor]:
        """Every parameter and buffer, and every tensor that is an attribute."""
        return self._tensors

    def is_mapped(self) -> bool:
        """Return whether every tensor still lies where it did, so that a replay reads nobody else's memory."""
        return self._now() == self._addresses

    def is_current(self) -> bool:
        """Return whether nothing was replaced, hooked, switched or set to another value, and no code is another one.

        0.06 ms for the 215 modules of Llama 1B; looking at each in Python takes ten times that.
        """
        if any(self._empty) or any(registry.get(name) is not tensor for registry, name, tensor in self._single):
            return False
        if type(self._model()) is not self._kind or list(map(type, self._modules)) != self._kinds:
            return False
        if any(version_of(tensor) != then for tensor, then in self._host):
            return False
        try:
            return (
                self._filled == self._entries
                and list(chain.from_iterable(map(dict.values, self._states))) == self._values
                and all(self._read(owner()) == then for owner, then in self._one_by_one)
                and self.code.is_current()
            )
        except (KeyError, RuntimeError, ValueError, TypeError):  # replaced tensors and arrays have no single truth
            return False

    @property
    def attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Every dictionary of attributes, parameters, buffers, parts and hooks, each with what it held."""
        held = [
            (now, {name: value for name, value in then.items() if name not in REGISTRIES})
            for now, then in zip(self._states, self._copies, strict=True)
        ]
        for owner, then in self._one_by_one:
            now = vars(owner())
            same = {n: v for n, v in now.items() if not is_other(_weakly(v), then.get(n, _NOTHING))}
            others = {n: _strongly(v) for n, v in then.items() if n not in same}
            held.append((now, {n: v for n, v in {**others, **same}.items() if n not in REGISTRIES}))
        registries = [*zip(self._filled, self._entries, strict=True), *((registry, {}) for registry in self._empty)]
        return [*held, *registries]

    def left_since(self) -> frozenset[str]:
        """Return which attributes of modules have other tensors or plain values now, or were not there."""
        if self.is_current():
            return frozenset()
        owners = {id(vars(module)) for module in (self._model(), *self._modules)}
        return frozenset(
            name
            for now, then in self.attributes
            if id(now) in owners
            for name in now.keys() - REGISTRIES - self._left
            if is_other(now[name], then.get(name, _NOTHING)) and all(isinstance(p, KNOWN) for p in parts([now[name]]))
        )

    def replaced_tensors(self) -> frozenset[str]:
        """Return the names of the attributes of modules that hold another tensor now, if nothing else has changed."""
        if not self.code.is_current() or list(map(type, self._modules)) != self._kinds:
            return frozenset()
        owners = {id(vars(module)) for module in (self._model(), *self._modules)}
        found = set()
        for now, then in self.attributes:
            for name in (now.keys() | then.keys()) - REGISTRIES - self._left:
                value, before = now.get(name, _NOTHING), then.get(name, _NOTHING)
                if not is_other(value, before):
                    continue
                if id(now) not in owners or not _is_tensor_or_none(value, before):
                    return frozenset()
                found.add(name)
        return frozenset(found)

    def versions(self) -> list[int | None]:
        """Return how often each tensor was written in place; those of inference mode do not count."""
        return list(map(version_of, self._tensors))

    def _now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._tensors))

    def _read(self, owner: Any) -> dict[str, Any]:
        """Return the attributes of a module by name, what might hold the model weakly."""
        found = {n: v if type(v) in _PLAIN else _weakly(v) for n, v in vars(owner).items()}
        for name in self._left & found.keys():
            del found[name]
        return found

    def _add(self, owner: Any) -> None:
        """Take over the attributes of a module, or of an object that one holds, and of what that holds."""
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        state, is_model = vars(owner), owner is self._model()
        own = state
        if isinstance(owner, nn.Module):
            own = {name: value for name, value in state.items() if name not in REGISTRIES}
            for registry in [state[name] for name in _REGISTRIES if name in state]:
                self._register(registry)
            if not is_model:
                self._modules.append(owner)
        if is_model or (isinstance(owner, nn.Module) and not self._left.isdisjoint(state)):
            then = {name: value if name in REGISTRIES else copied(value) for name, value in self._read(owner).items()}
            self._one_by_one.append((weakref.ref(owner), then))
        else:
            self._states.append(state)
            self._copies.append({name: copied(own[name]) if name in own else state[name] for name in state})
        for name, value in own.items():
            for part in parts([value]):
                self._add_part(part, with_objects=isinstance(owner, nn.Module))
            if isinstance(value, Tensor) and value.numel() == 1:
                self._single.append((state, name, value))

    def _register(self, registry: dict[str, Any]) -> None:
        (self._filled if registry else self._empty).append(registry)
        for name, value in registry.items():
            if isinstance(value, Tensor):
                self._held[id(value)] = value
                if value.numel() == 1:  # equal to another one of the same value
                    self._single.append((registry, name, value))

    def _add_part(self, part: Any, *, with_objects: bool) -> None:
        if isinstance(part, Tensor):
            self._held[id(part)] = part
        elif isinstance(part, nn.Module):  # one that is kept from being registered
            found = list(part.modules())
            if any(module is self._model() for module in found):
                self.refers_to_itself = True
            else:
                for module in found:
                    self._add(module)
        elif with_objects and _is_looked_into(part) and id(part) not in self._seen:
            for owner in self._objects_in(part):
                self._add(owner)

    def _objects_in(self, first: Any) -> list[Any]:
        """Return an object and those that it holds; none if one of them holds the model."""
        found, seen = [first], {id(first)}
        level = [first]
        for _ in range(_DEEPEST + 1):
            level, above = [], level
            for part in parts(value for owner in above for value in vars(owner).values()):
                if isinstance(part, nn.Module) and any(module is self._model() for module in part.modules()):
                    self.refers_to_itself = True
                    return []
                if _is_looked_into(part) and id(part) not in seen and id(part) not in self._seen:
                    seen.add(id(part))
                    level.append(part)
            found += level
        if level or len(self._seen) + len(found) > _MOST_OBJECTS:
            self.is_complete = False
        return found[: max(0, _MOST_OBJECTS - len(self._seen))]

    def _chosen(self) -> set[str]:
        """Return the names of implementations that configurations choose: of attention, of experts."""
        chosen = {"eager"}  # what runs where nothing is chosen
        for name, value in chain.from_iterable(map(dict.items, self._copies)):
            if isinstance(name, str) and "_implementation" in name:
                chosen |= {part for part in parts([value]) if isinstance(part, str)}
        return chosen


def _is_looked_into(part: Any) -> bool:
    """Return whether the attributes of an object are compared, which is no tensor and no module."""
    if isinstance(part, (Tensor, nn.Module, *_OF_CALLS, *_CODE)):
        return False
    return hasattr(part, "__dict__")


def _weakly(value: Any) -> Any:
    """Return what equals this as long as it is what it is: a function or an object may hold the model."""
    if isinstance(value, MethodType):
        return weakref.WeakMethod(value)
    if isinstance(value, (Tensor, nn.Module, PretrainedConfig)):
        return value
    if isinstance(value, _OF_CALLS):
        return _OF_CALLS
    if type(value).__weakrefoffset__ == 0:
        return (type(value), id(value)) if hasattr(value, "__dict__") else value
    return weakref.ref(value)


def _strongly(value: Any) -> Any:
    return value() if isinstance(value, weakref.ref) else value


def copied(value: Any) -> Any:
    """Return a container of the same contents, and so for those inside it; anything else as it is."""
    kind = type(value)
    if kind is dict:
        return {name: copied(part) for name, part in value.items()}
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    return value.copy() if kind in (set, OrderedDict, defaultdict, deque) else value


def parts(values: Iterable[Any], depth: int = _MOST_NESTED) -> Iterator[Any]:
    """Yield values, and the contents of those that are containers."""
    for value in values:
        if depth and isinstance(value, dict):
            yield from parts(value.values(), depth - 1)
        elif depth and isinstance(value, (list, tuple, set, frozenset)):
            yield from parts(value, depth - 1)
        else:
            yield value


def is_other(value: Any, before: Any) -> bool:
    """Return whether a value is not what it was: a tensor is another one, anything else differs."""
    if value is before:
        return False
    try:
        return isinstance(value, Tensor) or not bool(value == before)
    except (RuntimeError, ValueError, TypeError):  # tensors and arrays in it have no single truth
        return True


def unfit_weights(tensors: list[Tensor], device: torch.device) -> bool:
    """Return whether a tensor is of a class of its own (quantised, distributed) or on another device.

    What is no parameter may lie on the host: a forward copies it from there.
    """
    kinds = (Tensor, nn.Parameter)
    return any(type(tensor) not in kinds or (tensor.device != device and not is_of_host(tensor)) for tensor in tensors)


def is_of_host(tensor: Tensor) -> bool:
    """Return whether a tensor lies on the host, and is no parameter."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def _is_tensor_or_none(*values: Any) -> bool:
    plain = (value for value in values if value is not None)
    return all(isinstance(value, Tensor) and not isinstance(value, nn.Parameter) for value in plain)
