"""What a class has of the generation loop itself, and what of it the inherited loop can go on without.

A method that adds to the inherited one and calls it leaves the loop to it. One that prepares a step is asked for steps
that are never run (`runtime/decode/recorded_inputs.py`): it may compute, and must leave everything as it was.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.tree.module import ClassInfo, Module, names_in, of_kind, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, mutated_names, parameters

_PARTS = ("_sample", "_prefill")
_AROUND = ("_prepare_cache_for_generation", "generate")
_PREPARING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_OF_LISTS = ("append", "extend", "insert", "pop", "remove", "clear")
_TEXT = m.OneOf(m.SimpleString(), m.ConcatenatedString(), m.FormattedString())


def own_part(info: ClassInfo, module: Module) -> str | None:
    """Return the name of a method without which the inherited loop does something else, None if there is none."""
    if (part := next((name for name in _PARTS if name in info.methods), None)) is not None:
        return part
    around = (name for name in _AROUND if name in info.methods)
    if (part := next((name for name in around if not calls_inherited(info.methods[name])), None)) is not None:
        return part
    prepares = ((name, module.method(info, name)) for name in _PREPARING)
    return next((name for name, method in prepares if method is not None and acts(method)), None)


def calls_inherited(method: cst.FunctionDef) -> bool:
    """Whether a method calls the one of the same name of its bases."""
    of_base = m.Call(func=m.Attribute(value=m.Call(func=m.Name("super")), attr=m.Name(method.name.value)))
    return any(m.matches(call, of_base) for call in calls_in(method.body))


def acts(method: cst.FunctionDef) -> bool:
    """Whether a call of a method leaves something else behind than its result.

    It generates with another model, takes the next of what an iterator gives, writes into a tensor that it was given,
    or makes an attribute of the model depend on what it was.
    """
    given = {*parameters(method)} - {"self"}
    if any(_generates(call) or _takes(call) or _changes_own(call) for call in calls_in(method.body)):
        return True
    if any(_changed(node) & given for node in of_kind(method.body, cst.Call, cst.AugAssign, cst.Assign)):
        return True
    return any(_depends_on_itself(line) for line in of_kind(method.body, cst.Assign, cst.AugAssign))


def _generates(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "generate"


def _takes(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Name) and call.func.value == "next"


def _changes_own(call: cst.Call) -> bool:
    """Whether a call is that of a list's method, of a list that the model keeps."""
    function = call.func
    if not isinstance(function, cst.Attribute) or function.attr.value not in _OF_LISTS:
        return False
    return self_attribute(function.value) is not None


def _changed(node: cst.Call | cst.AugAssign | cst.Assign) -> set[str]:
    """Return the names of tensors that one call or statement writes into; `kwargs["name"] = …` is no tensor."""
    if isinstance(node, cst.AugAssign):  # a number is another one then, a tensor the same
        return names_in([node.target])
    if isinstance(node, cst.Call):
        return mutated_names(node) if _is_in_place(node) else set()
    targets = [target.target for target in node.targets]
    return names_in([target.value for target in targets if isinstance(target, cst.Subscript) and _has_places(target)])


def _is_in_place(call: cst.Call) -> bool:
    function = call.func
    named = any(argument.keyword is not None and argument.keyword.value == "out" for argument in call.args)
    return named or (isinstance(function, cst.Attribute) and function.attr.value.endswith("_"))


def _has_places(target: cst.Subscript) -> bool:
    """Whether a subscript is that of a tensor: no single text."""
    first = target.slice[0].slice
    return len(target.slice) > 1 or not (isinstance(first, cst.Index) and m.matches(first.value, _TEXT))


def _depends_on_itself(line: cst.Assign | cst.AugAssign) -> bool:
    targets = [line.target] if isinstance(line, cst.AugAssign) else [target.target for target in line.targets]
    own = {name for target in targets if (name := self_attribute(target)) is not None}
    return bool(own) and (isinstance(line, cst.AugAssign) or bool(own & _read(line.value)))


def _read(value: cst.BaseExpression) -> set[str]:
    return {name for node in walk(value) if (name := self_attribute(node)) is not None}
