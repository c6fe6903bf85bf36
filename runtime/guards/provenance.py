"""Whose code stands where it is found: the one that was written there, or one that somebody put in its place.

An operator computes what the code did that it was made from, and a second method what `forward` does. Both hold
for that code alone. It is known by where it was written: by the globals of a function, which are those of its module,
and by its qualified name. Nothing is remembered, so that it does not matter who came first, and a decorator that calls
itself by the name of what it wraps is somebody's all the same.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from .code_names import attends
from .place import PREFIX

SECOND_FORMS = ("decode", "decode_residual", "rule")
"""Methods that rewritten classes have beside their `forward`, and that say or compute the same."""
CALLS = ("__call__", "_call_impl")
"""Methods of `nn.Module` through which `forward` is called."""
_LIBRARIES = frozenset({"torch", "transformers", "functools", "contextlib"})
"""Whose decorators leave a function what it is."""

_PLAIN_MODULES = frozenset(sys.stdlib_module_names) - {"math"}
"""Modules of which no function is a part of what a model computes."""
_CALL: Callable[[Any], Any] = itemgetter(*CALLS)
_KNOWN: dict[Any, tuple[Any, list[tuple[Callable[[Any], Any], Mapping[str, Any], Any]]]] = {}
"""The `forward` of each class that was found to be the written one, with the functions that it reads."""
_MOST_KNOWN = 4096
_METHODS: tuple[dict[str, Any], bool] = ({}, True)
"""What `vars(Tensor)` was when it was asked last, and whether all of it was torch's."""


def home_of(function: FunctionType) -> str:
    """Return the name of the module in which a function was written."""
    return str(function.__globals__.get("__name__", ""))


def library_of(module: str) -> str:
    """Return the package at the top of a module's name."""
    return module.partition(".")[0]


def is_runtime(module: str) -> bool:
    """Return whether a module is of this runtime."""
    return module.startswith(PREFIX)


def is_library(module: str) -> bool:
    """Return whether a module is of those whose decorators leave a function what it is."""
    return library_of(module) in _LIBRARIES or is_runtime(module)


def plain(value: Any) -> Any:
    """Return the function of a method, a static method or a class method; anything else as it is."""
    return value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value


def is_written(value: Any, module: str, qualname: str) -> bool:
    """Return whether a function is the one of that name in a module's text, decorated by its own file or a library."""
    value = plain(value)
    if not isinstance(value, FunctionType):
        inner = getattr(value, "__wrapped__", None) if type(value).__module__ == "functools" else None  # `lru_cache`
        return inner is not None and is_written(inner, module, qualname)
    home, inner = home_of(value), value.__dict__.get("__wrapped__")
    if inner is None:
        return home == module and value.__qualname__ == qualname
    return (home == module or is_library(home)) and is_written(inner, module, qualname)


def owner_of(kind: type, name: str) -> type | None:
    """Return the class in whose dictionary a class finds an attribute."""
    return next((above for above in kind.__mro__ if name in above.__dict__), None)


def has_second_form(kind: type) -> bool:
    """Return whether a class has a method that repeats its `forward`, or one of a class that it derives from; or an
    operator that stands for a function of its file.
    """
    return any(hasattr(kind, name) for name in SECOND_FORMS) or attends(kind)


def stands(kind: type, name: str) -> bool:
    """Return whether a method of a class is the written one, and no other than its second forms were made from."""
    owner = owner_of(kind, name)
    if owner is None or not _is_in_place(owner, name):
        return False
    second = [above for form in SECOND_FORMS if (above := owner_of(kind, form)) is not None]
    return all(above is owner or above.__module__ == owner.__module__ or issubclass(above, owner) for above in second)


def _is_in_place(owner: type, name: str) -> bool:
    """Return whether a class has the method that is written in its body, or one that a library gave it."""
    value = plain(owner.__dict__[name])
    if is_written(value, owner.__module__, f"{owner.__qualname__}.{name}"):
        return True
    if not isinstance(value, FunctionType) or (name == "forward" and owner is not nn.Module):
        return False
    return all(home == owner.__module__ or is_library(home) for home in _homes_of(value))


def _homes_of(value: Any) -> Iterator[str]:
    """Yield where a function was written, and those that it wraps."""
    while isinstance(value, FunctionType):
        yield home_of(value)
        value = plain(value.__dict__.get("__wrapped__"))


def runs_as_written(kind: type) -> bool:
    """Return whether the `forward` of a class is the one for which operators and second forms may stand."""
    forward = getattr(kind, "forward", None)
    return is_compiling() or _is_known(kind, forward) or (_stands_called(kind) and _know(kind, forward))


def _stands_called(kind: type) -> bool:
    return stands(kind, "forward") and all(stands(kind, name) for name in CALLS)


def is_intact(function: Any) -> bool:
    """Return whether the functions are own ones that a function of a library reads by name, as of torch."""
    return is_compiling() or _is_known(function, function) or _know(function, function)


def _is_known(key: Any, function: Any) -> bool:
    known = _KNOWN.get(key)
    if known is None or known[0] is not function:
        return False
    for get, held, then in known[1]:  # noqa: SIM110 (each operator asks)
        if get(held) != then:
            return False
    return True


def _know(key: Any, function: Any) -> bool:
    """Remember a function with those that it reads, if these are own ones."""
    inner = plain(function)
    while (wrapped := getattr(inner, "__wrapped__", None)) is not None:
        inner = wrapped
    read: list[tuple[Callable[[Any], Any], Mapping[str, Any], Any]] = []
    if isinstance(key, type):
        read.append((_CALL, vars(nn.Module), _CALL(vars(nn.Module))))
    for module, held, names in reads(inner) if isinstance(inner, FunctionType) else ():
        called = sorted(n for n in names if isinstance(held[n], (FunctionType, BuiltinFunctionType)))
        if not all(is_own(held[name], module, name) for name in called):
            return False
        if called:
            get: Callable[[Any], Any] = itemgetter(*called)
            read.append((get, held, get(held)))
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[key] = (function, read)
    return True


def has_own_methods() -> bool:
    """Return whether the methods of tensors are torch's, those behind `+` and `[]` among them."""
    global _METHODS
    held = vars(Tensor)
    if _METHODS[0] != held:  # a microsecond
        _METHODS = dict(held), all(_is_own_method(value, name) for name, value in held.items())
    return _METHODS[1]


def _is_own_method(value: Any, name: str) -> bool:
    """Return whether torch put something among the methods of tensors, or somebody beside them: `Tensor.show`."""
    value = plain(value.fget if isinstance(value, property) else value)
    is_operator = name.startswith("__") and name in vars(operator)
    if not is_operator and (name.startswith("__") or not hasattr(Tensor.__base__, name)):
        return True
    if isinstance(value, FunctionType):
        return all(map(is_library, _homes_of(value)))
    return not callable(value) or is_operator or _alike(getattr(value, "__name__", ""), name)


def reads(function: FunctionType) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Yield what a function reads by name: of its own module, and of modules found there, as `nn.functional`."""
    names = set(names_of(function.__code__))
    waiting, met = [(home_of(function), function.__globals__)], set()
    while waiting:
        module, held = waiting.pop()
        if id(held) in met:
            continue
        met.add(id(held))
        found = names & held.keys()
        yield module, held, found
        waiting += [(held[name].__name__, vars(held[name])) for name in sorted(found) if _is_followed(held[name])]


def _is_followed(value: Any) -> bool:
    return isinstance(value, ModuleType) and library_of(value.__name__) not in _PLAIN_MODULES


def names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function, and in those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def is_own(value: Any, holder: str, name: str) -> bool:
    """Return whether what a module finds under a name may be what its text puts there: judged where it is a function.

    That is one of its own by that name, one of a file beside it, or one of a library: of torch's own, by their names.
    A module of transformers has functions of what transformers is installed with too.
    """
    value = plain(value)
    if isinstance(value, BuiltinFunctionType):
        inside = f"{holder.rpartition('.')[2]}_{name}"  # `torch.linalg.norm`
        return library_of(holder) != "torch" or _alike(value.__name__, name) or _alike(value.__name__, inside)
    if not isinstance(value, FunctionType):
        return isinstance(value, type) or not callable(value) or is_library(type(value).__module__)
    if home_of(value) == holder and not _alike(value.__name__, name):
        return False
    folder = holder.rpartition(".")[0]
    beside = _dependencies() if library_of(holder) == "transformers" else frozenset()
    return all(
        home == holder
        or is_library(home)
        or library_of(home) in beside
        or library_of(home) in sys.stdlib_module_names - {"__main__"}
        or (folder != "" and home.rpartition(".")[0] == folder)
        for home in _homes_of(value)
    )


@cache
def _dependencies() -> frozenset[str]:
    """Return the packages that every transformers is installed with: `safetensors` is one."""
    try:
        needed = requires("transformers") or []
    except PackageNotFoundError:  # run from its sources
        return frozenset()
    names = (re.match(r"[\w.-]+", line) for line in needed if "extra ==" not in line)
    return frozenset(name[0].lower().replace("-", "_") for name in names if name is not None)


def _alike(name: str, other: str) -> bool:
    """Return whether two names are one but for underscores: torch has `_threshold` and `log_sigmoid`."""
    return name.replace("_", "") == other.replace("_", "")
