"""What a model tells its layers beside what they take by name: it comes to the attention function in `**kwargs`.

A decode step passes no such keywords on, so none may mean something to the attention function.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.step.attention_step import KEYWORDS, TOLD
from rewrite.analysis.syntax.module import ClassInfo, self_attribute, walk
from rewrite.analysis.syntax.nodes import parameters

_READ = KEYWORDS - TOLD
"""What an attention function acts on."""


def told_beside(model: ClassInfo, layer: cst.FunctionDef) -> str:
    """Return a keyword that a model gives its layers, or puts into a mapping, and they have no name for; "" for none.

    Args:
        model: the class that builds the layers.
        layer: their `forward`.
    """
    if not isinstance(layer.params.star_kwarg, cst.Param):
        return ""
    named = {*parameters(layer), *TOLD}
    for method in model.methods.values():
        turns = {name.value for node in walk(method.body) for name in _turns(node)}
        for node in walk(method.body):
            if isinstance(node, cst.Call) and _is_layer(node.func, turns):
                given = {argument.keyword.value for argument in node.args if argument.keyword is not None}
            else:
                given = {*_items(node)} & _READ
            if beside := sorted(given - named):
                return beside[0]
    return ""


def _turns(node: cst.CSTNode) -> Iterator[cst.Name]:
    if isinstance(node, (cst.For, cst.CompFor)):
        yield from (name for name in walk(node.target) if isinstance(name, cst.Name))


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
