"""States that a model carries from call to call without a cache (`runtime/decode/carried.py`).

A module may keep one on itself: an attribute that `forward` makes from what it was. Or `forward` takes states by a
name, gives them back by the same one, and the generation loop hands them on.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.syntax.module import MOVES, ClassInfo, Module, of_kind, parts, self_attribute, walk
from rewrite.analysis.syntax.nodes import calls_in, given, parameters

_HANDED_ON = ("state",)
"""What transformers' loop hands on by the name by which it is given back, besides a cache."""
_UPDATES = "_update_model_kwargs_for_generation"
_DESCRIBE = frozenset({"shape", "dtype", "device", "ndim", "is_cuda"})
_BLANK = ("torch.zeros", "torch.empty", "torch.ones", "torch.full")
_RENAMES = frozenset({*MOVES, "type", "type_as", "contiguous", "detach"})


def kept_states(module: Module) -> tuple[list[str], str | None]:
    """Return the attributes in which modules of a file keep states, and one that cannot be given a buffer, if any.

    A state is None before the first call. One that is zeros, or of which nothing is said, would have to be known how
    to forget; what begins as anything else is a table or a number, and no state.
    """
    names: set[str] = set()
    for info in module.classes.values():
        for name in _recurring(info):
            values = _first_values(info, name, module)
            if all(m.matches(value, m.Name("None")) for value in values) and values:
                names.add(name)
            elif all(_is_blank(value, module) for value in values):
                return [], name
    return sorted(names), None


def handed_states(info: ClassInfo, module: Module) -> str | None:
    """Return the argument by which `forward` of a class takes the states that it gives back and the loop hands on."""
    forward = module.method(info, "forward")
    if forward is None:
        return None
    taken = {*parameters(forward)}
    for call in calls_in(forward.body):
        for argument in call.args:
            name = argument.keyword.value if argument.keyword is not None else ""
            if name in taken and _gives_back(argument.value, name) and _is_handed_on(name, info, module):
                return name
    return None


def _gives_back(value: cst.BaseExpression, name: str) -> bool:
    """Whether a value is what a part of the model gave back by a name: `outputs.name`."""
    return isinstance(value, cst.Attribute) and value.attr.value == name and self_attribute(value) is None


def _is_handed_on(name: str, info: ClassInfo, module: Module) -> bool:
    own = module.method(info, _UPDATES)
    if own is None:
        return name in _HANDED_ON
    key = m.Subscript(
        slice=[m.SubscriptElement(m.Index(m.SimpleString(value=m.MatchIfTrue(lambda v: v[1:-1] == name))))]
    )
    lines = (line for line in of_kind(own.body, cst.Assign) if _gives_back(line.value, name))
    return any(m.matches(target.target, key) for line in lines for target in line.targets)


def _recurring(info: ClassInfo) -> Iterator[str]:
    """Yield the attributes that a call of `forward` makes from what they were; moved to a device is the same."""
    methods = _called(info)
    written = {
        name
        for method in methods
        for target in of_kind(method.body, cst.AssignTarget)
        if (name := self_attribute(target.target)) is not None
    }
    yield from sorted(name for name in written if any(_recurs(method, name) for method in methods))


def _called(info: ClassInfo) -> list[cst.FunctionDef]:
    """Return `forward` and the methods of the class that it calls, these too."""
    found: dict[str, cst.FunctionDef] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in info.methods and name not in found:
            found[name] = info.methods[name]
            waiting += [called for call in calls_in(found[name].body) if (called := self_attribute(call.func))]
    return list(found.values())


def _recurs(method: cst.FunctionDef, name: str) -> bool:
    """Whether a method assigns `self.<name>` what it computes from it, through any locals."""
    lines = [*of_kind(method.body, cst.Assign)]
    computed, same = set[str](), {""}  # locals that were computed from it, and that are it
    while True:
        before = len(computed), len(same)
        for line in lines:
            for target, value in given(line):
                bound = {node.value for node in walk(target) if isinstance(node, cst.Name)}
                renamed = _unmoved(value)
                if self_attribute(renamed) == name or (isinstance(renamed, cst.Name) and renamed.value in same):
                    same |= bound if isinstance(target, cst.Name) else set()
                elif _reads(value, name, computed | same):
                    if self_attribute(target) == name:
                        return True
                    computed |= bound - {"self"}
                if self_attribute(target) == name and _reads(value, "", computed):
                    return True
        if (len(computed), len(same)) == before:
            return False


def _unmoved(value: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value in _RENAMES:
        value = value.func.value
    return value


def _reads(node: cst.CSTNode, name: str, names: set[str]) -> bool:
    """Whether code reads what is in `self.<name>` or in one of several locals; its shape and the like aside."""
    if isinstance(node, cst.Attribute) and node.attr.value in _DESCRIBE:
        return False
    if isinstance(node, cst.Attribute):
        return self_attribute(node) == name or _reads(node.value, name, names)
    if isinstance(node, cst.Name):
        return node.value in names
    if isinstance(node, cst.Arg):
        return _reads(node.value, name, names)
    return any(_reads(part, name, names) for part in parts(node))


def _first_values(info: ClassInfo, name: str, module: Module) -> list[cst.BaseExpression]:
    """Return what `__init__` sets an attribute to."""
    init = module.method(info, "__init__")
    lines = [*of_kind(init.body, cst.Assign)] if init is not None else []
    return [value for line in lines for target, value in given(line) if self_attribute(target) == name]


def _is_blank(value: cst.BaseExpression, module: Module) -> bool:
    """Whether a value is nothing yet: None, or a tensor of one number, in a buffer or not."""
    if isinstance(value, cst.Call) and module.qualified(value.func).endswith(".Buffer") and value.args:
        value = value.args[0].value
    called = module.qualified(value.func) if isinstance(value, cst.Call) else ""
    return m.matches(value, m.Name("None")) or called in _BLANK
