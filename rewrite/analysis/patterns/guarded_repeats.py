"""Heads that are repeated on a condition, and in their own place: without it they are repeated once."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects import Scope
from rewrite.analysis.patterns.readers import held_by
from rewrite.analysis.tree.nodes import expression

_MORE = (cst.NotEqual, cst.GreaterThan)
_TURNED: dict[type[cst.BaseCompOp], type[cst.BaseCompOp]] = {cst.NotEqual: cst.NotEqual, cst.LessThan: cst.GreaterThan}
"""Comparisons that say the same with their sides exchanged."""


@dataclass(frozen=True)
class Guarded:
    """`if …:` around `x = repeated(x, times)`, with nothing for the other case."""

    guard: cst.If
    times: cst.BaseExpression
    """How often heads are repeated in both cases: once where the condition does not hold."""


def guarded(node: cst.Call, scope: Scope, compact: cst.BaseExpression, times: cst.BaseExpression) -> Guarded | None:
    """Return the condition on which an expression repeats heads, None where it stands on none, or on another one."""
    module = scope.module
    line = module.statement(node)
    guard = module.parent(module.parent(line))
    if not isinstance(guard, cst.If) or guard.orelse is not None or not is_all_of(node, line):
        return None
    if not isinstance(module.parent(guard), cst.IndentedBlock):
        return None
    target = held_by(node, scope)
    if not isinstance(compact, cst.Name) or target is None or target.value != compact.value:
        return None
    both = _by_attribute(guard.test, times, scope) or _by_number(guard.test, times, scope)
    return Guarded(guard, both) if both is not None else None


def is_all_of(node: cst.CSTNode, line: cst.CSTNode) -> bool:
    """Whether a statement does nothing but assign an expression to one name."""
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return False
    small = line.body[0]
    return isinstance(small, (cst.Assign, cst.AnnAssign)) and small.value is node


def _by_attribute(test: cst.BaseExpression, times: cst.BaseExpression, scope: Scope) -> cst.BaseExpression | None:
    """`hasattr(module, "groups")`, where `module.groups` says how often."""
    if not isinstance(times, cst.Attribute) or not isinstance(times.value, cst.Name) or not isinstance(test, cst.Call):
        return None
    if not all(_is_builtin(name, scope) for name in ("hasattr", "getattr")):
        return None
    if scope.module.code(test.func) != "hasattr" or len(test.args) != 2:
        return None
    asked, name = test.args[0].value, test.args[1].value
    if not isinstance(asked, cst.Name) or asked.value != times.value.value:
        return None
    if not isinstance(name, cst.SimpleString) or name.raw_value != times.attr.value:
        return None
    return expression(f'getattr({asked.value}, "{times.attr.value}", 1)')


def _by_number(test: cst.BaseExpression, times: cst.BaseExpression, scope: Scope) -> cst.BaseExpression | None:
    """`times != 1` or `times > 1`; of `a // b` also `a != b` or `a > b`."""
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return None
    kind, left, right = type(test.comparisons[0].operator), test.left, test.comparisons[0].comparator
    if kind not in _MORE or _is_one(left):
        if kind not in _TURNED:
            return None
        kind, left, right = _TURNED[kind], right, left
    whole = _same(left, times) and _is_one(right)
    parts = isinstance(times, cst.BinaryOperation) and isinstance(times.operator, cst.FloorDivide)
    if parts and isinstance(times, cst.BinaryOperation):
        whole = whole or (_same(left, times.left) and _same(right, times.right))
    if not whole:
        return None
    if kind is cst.NotEqual:
        return times
    return expression(f"max({scope.module.code(times)}, 1)") if _is_builtin("max", scope) else None


def _is_builtin(name: str, scope: Scope) -> bool:
    return scope.names.means(name) and name not in scope.locals


def _is_one(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Integer) and node.value == "1"


def _same(one: cst.BaseExpression, other: cst.BaseExpression) -> bool:
    return one.with_changes(lpar=[], rpar=[]).deep_equals(other.with_changes(lpar=[], rpar=[]))
