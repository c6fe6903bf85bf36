"""What a model tells its layers beside what they take by name: it comes to the attention function in `**kwargs`.

A decode step passes no such keywords on, so none may mean something to the attention function.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.decode.attention_step import KEYWORDS, TOLD
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import parameters

_TENSORS = 5
"""How many arguments every attention function takes first: its module, queries, keys, values and the mask."""


def told_beside(model: ClassInfo, layer: cst.FunctionDef, module: Module) -> str:
    """Return what a model gives its layers, which have no name for it, and an attention function reads; "" for none.

    Args:
        model: the class that builds the layers.
        layer: their `forward`.
        module: their file.
    """
    if not isinstance(layer.params.star_kwarg, cst.Param):
        return ""
    read = _read_by_attention(module) - {*parameters(layer)}
    for method in model.methods.values():
        turns = {name.value for node in walk(method.body) for name in _turns(node)}
        for node in walk(method.body):
            if beside := sorted({*_given(node, turns)} & read):
                return beside[0]
    return ""


def _read_by_attention(module: Module) -> set[str]:
    """Return the keywords that transformers' attention functions act on, and those that the file's own take."""
    found = {*KEYWORDS}
    for function in module.functions.values():
        taken = parameters(function)
        if len(taken) > _TENSORS and {"scaling", "dropout"} & {*taken}:
            found |= {*taken[_TENSORS:]}
    return found - TOLD


def _turns(node: cst.CSTNode) -> Iterator[cst.Name]:
    if isinstance(node, (cst.For, cst.CompFor)):
        yield from (name for name in walk(node.target) if isinstance(name, cst.Name))


def _given(node: cst.CSTNode, turns: set[str]) -> Iterator[str]:
    """Yield the keywords that a layer is called with, or that a mapping gets."""
    if isinstance(node, cst.Call) and _is_layer(node.func, turns):
        yield from (argument.keyword.value for argument in node.args if argument.keyword is not None)
    yield from _items(node)


def _is_layer(function: cst.BaseExpression, turns: set[str]) -> bool:
    """Whether a call is of what a loop runs over, or of an item of an attribute."""
    if isinstance(function, cst.Subscript):
        return self_attribute(function.value) is not None
    return isinstance(function, cst.Name) and function.value in turns


def _items(node: cst.CSTNode) -> Iterator[str]:
    """Yield the keys that a dictionary is made with, or that are put into one."""
    key: cst.BaseExpression | None = None
    if m.matches(node, m.Call(func=m.Name("dict") | m.Name("partial") | m.Attribute(attr=m.Name("partial")))):
        yield from (a.keyword.value for a in cst.ensure_type(node, cst.Call).args if a.keyword is not None)
    elif isinstance(node, cst.DictElement):
        key = node.key
    elif m.matches(node, m.AssignTarget(m.Subscript(slice=[m.SubscriptElement(m.Index(m.SimpleString()))]))):
        target = cst.ensure_type(cst.ensure_type(node, cst.AssignTarget).target, cst.Subscript)
        key = cst.ensure_type(target.slice[0].slice, cst.Index).value
    elif m.matches(node, m.Call(func=m.Attribute(attr=m.Name("update") | m.Name("setdefault")))):
        call = cst.ensure_type(node, cst.Call)
        yield from (argument.keyword.value for argument in call.args if argument.keyword is not None)
        key = call.args[0].value if call.args else None
    if isinstance(key, cst.SimpleString):
        yield str(key.evaluated_value)
