"""Which arguments a model's `forward` takes: those that it names, and those that it hands on as keywords."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, get_args

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def arguments_of(model: Any) -> tuple[str, ...]:
    """The names that `forward` of a model takes, in the order of its signature.

    Those of its `**kwargs` are the keys that its annotation lists, and the arguments of every function and module that
    it hands them on to and can be found by its name: a loss function's keywords, a base model's. What the caller
    passes to those itself is not counted.
    """
    return tuple(_taken(type(model).forward, model, set()))


def _taken(function: Callable[..., Any], owner: Any, seen: set[Any]) -> dict[str, None]:
    """The names as keys, so that their order stays."""
    function = inspect.unwrap(function)
    if function in seen:
        return {}
    seen.add(function)
    parameters = list(inspect.signature(function).parameters.values())
    own = parameters[1:] if parameters and parameters[0].name == "self" else parameters
    names = {parameter.name: None for parameter in own if parameter.kind in NAMED}
    rest = next((parameter for parameter in own if parameter.kind is inspect.Parameter.VAR_KEYWORD), None)
    if rest is None:
        return names
    for part in _annotated(rest.annotation, function):
        names |= dict.fromkeys(getattr(part, "__annotations__", {}))
    for call in _handing_on(function, rest.name):
        callee, whose = _found(call.func, function, owner)
        if callee is not None:
            names |= _left_to_others(call, callee, _taken(callee, whose, seen))
    return names


def _annotated(annotation: Any, function: Callable[..., Any]) -> Iterator[Any]:
    """What stands in the brackets of `Unpack[…]`, which may be a text."""
    if isinstance(annotation, str):
        known = getattr(function, "__globals__", {})
        yield from (known[name] for name in re.findall(r"\w+", annotation) if name in known)
    else:
        yield from get_args(annotation)


def _handing_on(function: Callable[..., Any], keywords: str) -> Iterator[ast.Call]:
    """The calls in a function that pass its `**keywords` on."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # built in, or made at run time: there is nothing to read
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == keywords
            for keyword in node.keywords
        ):
            yield node


def _found(name: ast.expr, function: Callable[..., Any], owner: Any) -> tuple[Callable[..., Any] | None, Any]:
    """The function that an expression calls and the object it belongs to; (None, None) where only running tells."""
    if isinstance(name, ast.Name):
        value = getattr(function, "__globals__", {}).get(name.id)
        return (value, None) if inspect.isfunction(value) else (None, None)
    path: list[str] = []
    while isinstance(name, ast.Attribute):
        path.insert(0, name.attr)
        name = name.value
    if not (isinstance(name, ast.Name) and name.id == "self" and owner is not None):
        return None, None
    value, parent = owner, owner
    for part in path:
        parent, value = value, getattr(value, part, None)
    if inspect.ismethod(value):
        return value.__func__, value.__self__
    if inspect.isfunction(value):
        return value, parent
    forward = getattr(type(value), "forward", None)
    return (forward, value) if forward is not None else (None, None)


def _left_to_others(call: ast.Call, callee: Callable[..., Any], taken: dict[str, None]) -> dict[str, None]:
    """The names that a call does not pass by itself."""
    given = {keyword.arg for keyword in call.keywords}
    names = [name for name in inspect.signature(inspect.unwrap(callee)).parameters if name != "self"]
    given |= set(names[: sum(not isinstance(argument, ast.Starred) for argument in call.args)])
    return {name: None for name in taken if name not in given}
