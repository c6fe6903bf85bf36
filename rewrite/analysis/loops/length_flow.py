"""Which parameters of a file's functions are handed a number of cached tokens, by callers in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute
from rewrite.analysis.tree.nodes import calls_in

_Function = tuple[cst.FunctionDef, "ClassInfo | None"]
Holds = Callable[[cst.FunctionDef, frozenset[str]], Callable[[cst.BaseExpression], bool]]
"""Tells which expressions in a function hold what is looked for, where these parameters of the function do."""


def handed_on(module: Module, holds: Holds) -> dict[int, frozenset[str]]:
    """Return the names of such parameters by the `id` of their function, handed on through any number of calls."""
    functions: list[_Function] = [(function, None) for function in module.functions.values()]
    functions += [(method, owner) for owner, _, method in module.methods()]
    found: dict[int, frozenset[str]] = {id(function): frozenset() for function, _ in functions}
    waiting = functions
    while waiting:
        function, owner = waiting.pop()
        held = holds(function, found[id(function)])
        for call in calls_in(function.body):
            given = [argument for argument in call.args if not argument.star and held(argument.value)]
            for callee, its_owner in _called(call, owner, module) if given else ():
                names = frozenset(name for argument in given if (name := _parameter(call, argument, callee)))
                if names - found[id(callee)]:
                    found[id(callee)] |= names
                    waiting.append((callee, its_owner))
    return found


def _called(call: cst.Call, owner: ClassInfo | None, module: Module) -> Iterator[_Function]:
    """Yield the functions of the file that a call may run: by name, a method, what a module of a class runs."""
    if isinstance(call.func, cst.Name) and call.func.value in module.functions:
        yield module.functions[call.func.value], None
    name = self_attribute(call.func)
    if name is None or owner is None:
        return
    if (method := module.method(owner, name)) is not None:
        yield method, owner
    for value in module.assignments(owner, name):
        info = module.classes.get(module.qualified(value.func)) if isinstance(value, cst.Call) else None
        forward = module.method(info, "forward") if info is not None else None
        if forward is not None:
            yield forward, info


def _parameter(call: cst.Call, argument: cst.Arg, function: cst.FunctionDef) -> str:
    """Return the parameter that takes an argument of a call, `""` where that cannot be seen."""
    params = function.params
    places = [param.name.value for param in (*params.posonly_params, *params.params)]
    names = [*places, *(param.name.value for param in params.kwonly_params)]
    if argument.keyword is not None:
        return argument.keyword.value if argument.keyword.value in names else ""
    plain = [name for name in places if name not in ("self", "cls")]
    place = next(place for place, given in enumerate(call.args) if given is argument)
    starred = any(before.star for before in call.args[:place])
    return plain[place] if place < len(plain) and not starred else ""
