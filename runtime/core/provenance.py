"""Whose code stands where it is found: the one that was written there, or one that somebody put in its place.

An operator computes what the code did that it was made from, and a layer's `decode` what its `forward` does. Both hold
for that code alone. It is known by where it was written: by the globals of a function, which are those of its module,
and by its qualified name. Nothing is remembered, so that it does not matter who came first, and a decorator that calls
itself by the name of what it wraps is somebody's all the same.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

OFFERS: dict[str, dict[str, str]] = {}

SECOND_FORMS = ("decode", "decode_residual", "add_forward", "prologue", "rule")
"""Methods that rewritten classes have beside their `forward`, and that say or compute the same."""
ROOT = __name__.rpartition(".core")[0]
"""The runtime, by the name of its module."""
_LIBRARIES = frozenset({"torch", "transformers", "functools", "contextlib"})

_KNOWN: dict[type, Any] = {}
"""The `forward` of each class that was found to be the written one."""
_MOST_KNOWN = 4096


def home_of(function: FunctionType) -> str:
    """Return the name of the module in which a function was written."""
    return str(function.__globals__.get("__name__", ""))


def library_of(module: str) -> str:
    """Return the package at the top of a module's name."""
    return module.partition(".")[0]


def is_runtime(module: str) -> bool:
    """Return whether a module is of this runtime."""
    return module == ROOT or module.startswith(f"{ROOT}.")


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
    """Return whether a class has a method that repeats its `forward`, or one of a class that it derives from."""
    return any(hasattr(kind, name) for name in SECOND_FORMS)


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
    if not isinstance(value, FunctionType) or value.__dict__.get("__wrapped__") is not None:
        return False
    if owner is nn.Module:  # has some under two names
        return home_of(value) == owner.__module__
    return name != "forward" and is_library(home_of(value))


def runs_as_written(kind: type) -> bool:
    """Return whether the `forward` of a class is the one for which operators and second forms may stand."""
    if is_compiling():
        return True
    forward = getattr(kind, "forward", None)
    if forward is not None and _KNOWN.get(kind) is forward:
        return True
    if forward is None or not stands(kind, "forward"):
        return False
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[kind] = forward
    return True


def is_own(value: Any, holder: str, name: str) -> bool:
    """Return whether what a module finds under a name may be what its text puts there: judged where it is a function.

    That is one of its own by that name, one of a file beside it, or one of a library: of torch's own, by their names.
    """
    value = plain(value)
    if isinstance(value, BuiltinFunctionType):
        return library_of(holder) != "torch" or value.__name__ == name
    if not isinstance(value, FunctionType):
        return isinstance(value, type) or not callable(value) or is_library(type(value).__module__)
    if home_of(value) == holder and value.__name__ != name:
        return False
    folder = holder.rpartition(".")[0]
    while isinstance(value, FunctionType):
        home = home_of(value)
        if not (home == holder or is_library(home) or (folder and home.rpartition(".")[0] == folder)):
            return False
        value = plain(value.__dict__.get("__wrapped__"))
    return True
