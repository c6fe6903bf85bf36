"""What an attention may read, the broad notion: by where a value goes, whatever is done to it on its way."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.effects import Scope
from rewrite.analysis.effects.name_bindings import dotted_end
from rewrite.analysis.tree.module import self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, names_bound_by

_PRODUCTS = ("matmul", "bmm", "einsum", "scaled_dot_product_attention")
_FEWEST = 3
"""Queries, keys and values."""


def is_attended(node: cst.BaseExpression, scope: Scope) -> bool:
    """Whether what an expression gives, or a local made of it, is read by a product of matrices, or handed to a
    function that the file does not define together with two other values at least.
    """
    line = scope.module.statement(node)
    if not isinstance(line, cst.SimpleStatementLine):
        return False
    held = set[str]().union(*(names_bound_by(small) for small in line.body)) | {
        name for inner in walk(line) for name in names_bound_by(inner)
    }
    own = {id(inner) for inner in walk(line)}
    inside = {id(above) for above in scope.module.ancestors(node)}
    for other in walk(scope.function.body):
        if id(other) not in own and isinstance(other, cst.SimpleStatementLine) and _reads(other, held):
            held |= {name for inner in walk(other) for name in names_bound_by(inner)}
        if isinstance(other, cst.BinaryOperation) and isinstance(other.operator, cst.MatrixMultiply):
            if id(other) in inside or _reads(other, held):
                return True
    calls = (call for call in calls_in(scope.function.body) if _attends(call, scope))
    return any(id(call) in inside or any(_reads(a.value, held) for a in call.args if _is_heads(a)) for call in calls)


def _is_heads(argument: cst.Arg) -> bool:
    """Whether an argument may be queries, keys or values: no mask that has a keyword."""
    return argument.keyword is None or argument.keyword.value.startswith(("q", "k", "v", "input", "other", "mat"))


def _reads(node: cst.CSTNode, names: set[str]) -> bool:
    return any(isinstance(inner, cst.Name) and inner.value in names for inner in walk(node))


def _attends(call: cst.Call, scope: Scope) -> bool:
    """Whether a call is one of torch's products, or of a function of another file, or one that was looked up."""
    func = call.func
    if dotted_end(func) in _PRODUCTS:
        return True
    if not isinstance(func, cst.Name) or len(call.args) < _FEWEST:
        return False
    name = func.value
    if name in scope.locals:
        return name not in scope.functions and self_attribute(scope.single.get(name, func)) is None
    return name in scope.module.imports and not scope.module.imports[name].startswith("torch")
