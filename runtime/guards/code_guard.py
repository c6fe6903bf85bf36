"""The code that models of some classes run, and whether any of it has been replaced since.

Classes are compared whole: every dictionary in the order of resolution, torch's and transformers' among them. Of
modules it is the names that functions read, followed from each `forward` on: what they call in their own module, in
torch and in transformers, and the mappings in which transformers looks functions up, whatever those are called. Of
torch's functions in C it is also those that the runtime reads: of them its operators' plain forms are made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from .code_names import attends
from .provenance import (
    CALLS,
    SECOND_FORMS,
    has_second_form,
    home_of,
    is_library,
    is_own,
    is_runtime,
    library_of,
    names_of,
    owner_of,
    plain,
    reads,
    stands,
)

_KEPT = 16
"""Sets of classes whose code is known; a process has few kinds of models."""
_NOT_FOLLOWED = frozenset({"torch", "numpy", *sys.stdlib_module_names}) - {"__main__"}
_IN_C = frozenset(
    f"{module.__name__}.{name}"
    for module in (torch, torch.nn.functional)
    for name, value in vars(module).items()
    if isinstance(value, BuiltinFunctionType)
)
"""Functions of torch that are not written in Python."""
_guards: dict[Any, CodeGuard] = {}
_making = threading.Lock()


class CodeGuard:
    """The code of models whose modules are of some classes.

    Args:
        kinds: of the modules.
        chosen: names of implementations that configurations choose, under which mappings hold functions.
    """

    def __init__(self, kinds: Iterable[type], chosen: frozenset[str]):
        self._kinds, self._chosen = frozenset(kinds), chosen
        owners = (owner_of(kind, form) for kind in self._kinds for form in SECOND_FORMS)
        self._own = {owner.__module__ for owner in owners if owner is not None}
        self._own |= {kind.__module__ for kind in self._kinds if attends(kind)}
        """Modules in which second forms are written, or operators that stand for a function of the file."""
        above = {above.__module__ for kind in self._kinds for above in kind.__mro__}
        self._homes = {"transformers", *map(library_of, above)} - _NOT_FOLLOWED
        self._names: set[str] = {"forward", *CALLS, *SECOND_FORMS}
        """Attributes that some function reads, the names of methods among them."""
        self._places: dict[int, tuple[str, dict[str, Any], set[str]]] = {}
        """By the id of a module's dictionary: the module's name, the dictionary, and which names are read."""
        self._mappings: dict[int, Mapping[Any, Any]] = {}
        """Dictionaries of classes, and of objects that are mappings, by their ids: compared whole."""
        self._tables: dict[int, dict[Any, Any]] = {}
        """What a process adds to as it goes: what is there stays, and nothing is added under `chosen`."""
        self._entries: list[tuple[str, str, Any]] = []
        """What mappings hold under `chosen`: the module that reads it, the place, the value."""
        self._seen: set[int] = set()
        self._waiting: list[FunctionType] = []
        for kind in self._kinds:
            self._add_class(kind)
        self._follow()
        read = {*_read_by_the_runtime()}
        for held in (torch, torch.nn.functional):
            self._see(held.__name__, vars(held), {n for n in read if f"{held.__name__}.{n}" in _IN_C})
        self._live = list(self._mappings.values())
        self._then = [_items(mapping) for mapping in self._live]
        self._read: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
            (itemgetter(*sorted(names)), held) for _, held, names in self._places.values() if names
        ]
        self._read += [(itemgetter(*table), table) for table in self._tables.values() if table]
        self._absent = [(table, name) for table in self._tables.values() for name in chosen - table.keys()]
        self._values = self._now()
        self._others: list[str] | None = None

    def is_current(self) -> bool:
        """Return whether all of it is what it was."""
        try:
            if any(name in table for table, name in self._absent):
                return False
            return self._live == self._then and self._now() == self._values
        except (KeyError, RuntimeError, ValueError, TypeError):
            return False

    @property
    def others(self) -> list[str]:
        """Where other code stands than was written there."""
        if self._others is None:
            self._others = sorted({*self._other_methods(), *self._other_names()})
        return self._others

    @property
    def of_torch(self) -> list[str]:
        """What of it is torch's: modes of torch's functions call it by its name, and the runtime calls it too."""
        return [place for place in self.others if library_of(place) == "torch"]

    @property
    def of_masks(self) -> list[str]:
        """What of it makes masks: transformers' functions for that, and what is registered for them."""
        return [place for place in self.others if "mask" in place.lower()]

    def _now(self) -> list[Any]:
        return [get(held) for get, held in self._read]

    def _other_methods(self) -> Iterator[str]:
        """Yield methods that are others: of classes with second forms, and each `forward` of a class that is known."""
        for kind in self._kinds:
            for name in self._names if has_second_form(kind) else ("forward",):
                owner = owner_of(kind, name)
                if owner is None or not isinstance(plain(owner.__dict__[name]), FunctionType):
                    continue
                if (has_second_form(kind) or self._is_judged(owner.__module__)) and not stands(kind, name):
                    yield f"{kind.__qualname__}.{name}"

    def _other_names(self) -> Iterator[str]:
        for module, held, names in self._places.values():
            if self._is_judged(module):
                yield from (f"{module}.{name}" for name in names if not is_own(held[name], module, name))
        for module, place, value in self._entries:
            if not is_own(value, module, getattr(plain(value), "__name__", "")):
                yield place

    def _is_judged(self, module: str) -> bool:
        """Return whether second forms stand for code of a module: torch's, transformers', or that of their classes."""
        return module in self._own or is_library(module)

    def _add_class(self, kind: type) -> None:
        for above in kind.__mro__:
            if library_of(above.__module__) not in sys.stdlib_module_names or above.__module__ == "__main__":
                self._mappings.setdefault(id(above), vars(above))

    def _follow(self) -> None:
        """See what the functions that are reached read, until no name of a method is new."""
        asked: set[str] = set()
        while self._waiting or self._names - asked:
            while self._waiting:
                self._see_function(self._waiting.pop())
            for name in sorted(self._names - asked):
                asked.add(name)
                for kind in self._kinds:
                    if (owner := owner_of(kind, name)) is not None:
                        self._wait(owner.__dict__[name], always=name == "forward")

    def _wait(self, value: Any, *, always: bool = False) -> None:
        """Have a function looked at, where it is to be followed."""
        value = plain(value)
        if isinstance(value, property):
            value = value.fget
        while value is not None:
            if isinstance(value, FunctionType) and id(value) not in self._seen:
                if always or _is_followed(home_of(value)):
                    self._seen.add(id(value))
                    self._waiting.append(value)
            value = getattr(value, "__wrapped__", None)

    def _see_function(self, function: FunctionType) -> None:
        self._names.update(names_of(function.__code__))
        for module, held, names in reads(function):
            self._see(module, held, names)
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        for value in (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._wait(value)
            if isinstance(value, Mapping) and not isinstance(value, dict):
                self._see_mapping(value, home_of(function), type(value).__name__)

    def _see(self, module: str, held: dict[str, Any], names: set[str]) -> None:
        """Remember names that are read of a module."""
        known = self._places.setdefault(id(held), (module, held, set()))[2]
        for name in sorted(names - known):
            value = held[name]
            if isinstance(value, Mapping):
                self._see_mapping(value, module, f"{module}.{name}")
            elif isinstance(value, type):
                if library_of(value.__module__) in self._homes:
                    self._add_class(value)
            else:
                self._wait(value)
        known |= names

    def _add_dictionary(self, held: dict[Any, Any]) -> None:
        if type(held).__getitem__ is dict.__getitem__:
            self._tables.setdefault(id(held), held)
        else:  # may make what it is asked for
            self._mappings.setdefault(id(held), held)

    def _see_mapping(self, mapping: Mapping[Any, Any], module: str, place: str) -> None:
        """Remember a mapping: its entries, or the dictionaries in which an object of another class holds them."""
        if isinstance(mapping, dict):
            self._add_dictionary(mapping)
        else:
            own: list[Mapping[str, Any]] = [vars(mapping)] if hasattr(mapping, "__dict__") else []
            for above in type(mapping).__mro__[:-1]:
                if _is_followed(above.__module__):
                    own.append(vars(above))
            for held in own:
                self._mappings.setdefault(id(held), held)
                for inner in held.values():
                    if isinstance(inner, dict):
                        self._add_dictionary(inner)
        for name in sorted(self._chosen):
            if name in mapping:
                self._entries.append((module, f"{place}[{name!r}]", mapping[name]))
                self._wait(mapping[name])


def code_of(kinds: Iterable[type], chosen: Iterable[str]) -> CodeGuard:
    """Return the code of some classes as it is now; models of the same classes share it."""
    key = (frozenset(kinds), frozenset(chosen))
    with _making:
        guard = _guards.get(key)
        if guard is None or not guard.is_current():
            while len(_guards) >= _KEPT:
                del _guards[next(iter(_guards))]
            guard = _guards[key] = CodeGuard(*key)
        return guard


def _items(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what a mapping holds; one that makes what it is asked for is not asked."""
    return dict(dict.items(mapping) if isinstance(mapping, dict) else mapping.items())


def _is_followed(module: str) -> bool:
    """Return whether functions of a module are looked into: not those of torch, and not the runtime's own."""
    return library_of(module) not in _NOT_FOLLOWED and not is_runtime(module)


def _read_by_the_runtime() -> Iterator[str]:
    """Yield the names that functions and methods of the runtime read, as far as it is imported."""
    for name, module in [*sys.modules.items()]:
        if is_runtime(name):
            kinds = (vars(value) for value in vars(module).values() if isinstance(value, type))
            for value in (value for held in (vars(module), *kinds) for value in held.values()):
                if isinstance(function := plain(value), FunctionType):
                    yield from names_of(function.__code__)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it was never filled
        return None
