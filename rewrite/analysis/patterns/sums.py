"""Sums of two tensors, however they are spelled, and where a name gets one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import libcst as cst

from rewrite.analysis.effects.bound import targets
from rewrite.analysis.effects.name_bindings import dotted_end
from rewrite.analysis.tree.module import Module, walk

_ADDS = ("torch.add",)
_BINDING = (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.CompFor, cst.Del)


@dataclass(frozen=True)
class Sum:
    """An expression or a statement that adds two tensors."""

    left: cst.BaseExpression
    right: cst.BaseExpression
    reason: str = ""
    """Why it is not to be fused, a reason of the transform; empty if nothing at the sum itself speaks against it."""
    detail: str = ""


@dataclass(frozen=True)
class Assigned:
    """What a statement gives a name."""

    value: Sum | str | None
    """A sum, the name that it is a copy of, or something else."""
    others: tuple[str, ...] = ()
    """Further names that the same statement gives the same value."""


def sum_of(node: cst.CSTNode, module: Module) -> Sum | None:
    """Return the sum that an expression is; None if it is something else, a sum with a number included."""
    found = _spelled(node, module)
    if found is not None and any(isinstance(n, (cst.NamedExpr, cst.Await, cst.Yield)) for n in walk(node)):
        return replace(found, reason="order", detail="the sum binds a name or waits while it is evaluated")
    if found is None and isinstance(node, cst.NamedExpr) and (inner := _spelled(node.value, module)) is not None:
        return replace(inner, reason="order", detail="the sum is named inside of the call")
    if found is None and isinstance(node, cst.IfExp):
        ways = [s for way in (node.body, node.orelse) if (s := _spelled(way, module)) is not None]
        return replace(ways[0], reason="conditional", detail="the sum is one of two values") if ways else None
    return found


def _spelled(node: cst.CSTNode, module: Module) -> Sum | None:
    if isinstance(node, cst.BinaryOperation):
        return _of(node.left, node.right) if isinstance(node.operator, cst.Add) else None
    if not isinstance(node, cst.Call) or dotted_end(node.func) not in ("add", "add_"):
        return None
    given = [argument.value for argument in node.args if argument.keyword is None and not argument.star]
    words = {argument.keyword.value: argument.value for argument in node.args if argument.keyword is not None}
    if module.qualified(node.func) not in _ADDS and isinstance(node.func, cst.Attribute):
        given = [node.func.value, *given]
    given += [words.pop(name) for name in ("input", "other")[len(given) :] if name in words]
    if len(given) != 2:
        return None
    found = _of(*given)
    if found is not None and ("out" in words or dotted_end(node.func) == "add_"):
        return replace(found, reason="in_place", detail=module.code(node))
    if found is not None and (words or any(argument.star for argument in node.args)):
        return replace(found, reason="order", detail=f"{module.code(node)} is more than a sum")
    return found


def _of(left: cst.BaseExpression, right: cst.BaseExpression) -> Sum | None:
    numbers = (cst.BaseNumber, cst.BaseString, cst.List, cst.Tuple, cst.ListComp)
    bare = [side.expression if isinstance(side, cst.UnaryOperation) else side for side in (left, right)]
    return None if any(isinstance(side, numbers) for side in bare) else Sum(left, right)


def assigned_by(statement: cst.CSTNode, name: str, module: Module) -> Assigned | None:
    """Return what a statement gives `name`; None if it leaves the name alone."""
    if not isinstance(statement, cst.SimpleStatementLine):
        if name not in rebound(statement):
            return None
        lines = (line for line in walk(statement) if isinstance(line, cst.SimpleStatementLine))
        inside = (assigned_by(line, name, module) for line in lines)
        sums = [given.value for given in inside if given is not None and isinstance(given.value, Sum)]
        if not sums:
            return Assigned(None)
        return Assigned(replace(sums[0], reason="conditional", detail="not every way leads through the sum"))
    for small in reversed(statement.body):
        given = _by_small(small, name, module)
        if given is None:
            continue
        if len(statement.body) > 1 and isinstance(given.value, Sum):
            return Assigned(replace(given.value, reason="order", detail="several statements on one line"))
        return given if len(statement.body) == 1 else Assigned(None)
    return None


def _by_small(small: cst.BaseSmallStatement, name: str, module: Module) -> Assigned | None:
    if isinstance(small, cst.AugAssign) and _is(small.target, name):
        adds = isinstance(small.operator, cst.AddAssign) and _of(small.target, small.value) is not None
        return Assigned(Sum(small.target, small.value, "in_place", module.code(small)) if adds else None)
    if isinstance(small, cst.AnnAssign) and _is(small.target, name) and small.value is not None:
        return Assigned(_value(small.value, module))
    if isinstance(small, cst.Expr) and _writes(small.value, name):
        found = sum_of(small.value, module)
        return Assigned(found) if found is not None and found.reason == "in_place" else None
    if isinstance(small, cst.Assign):
        targets = [target.target for target in small.targets]
        if any(_is(target, name) for target in targets):
            others = tuple(t.value for t in targets if isinstance(t, cst.Name) and t.value != name)
            value = _value(small.value, module)
            if isinstance(value, Sum) and len(others) != len(targets) - 1:
                value = replace(value, reason="order", detail="the sum is assigned to more than names")
            return Assigned(value, others)
        for element in _together(targets, small.value, name):
            value = _value(element, module)
            apart = "it is assigned together with others"
            return Assigned(replace(value, reason="order", detail=apart) if isinstance(value, Sum) else None)
    return Assigned(None) if name in rebound(small) else None


def _writes(node: cst.CSTNode, name: str) -> bool:
    """Whether `node` is `name.add_(…)` or a call with `out=name`."""
    if not isinstance(node, cst.Call):
        return False
    outs = [a.value for a in node.args if a.keyword is not None and a.keyword.value == "out"]
    held = [node.func.value] if isinstance(node.func, cst.Attribute) and dotted_end(node.func) == "add_" else []
    return any(_is(written, name) for written in (*outs, *held))


def _value(node: cst.BaseExpression, module: Module) -> Sum | str | None:
    return node.value if isinstance(node, cst.Name) else sum_of(node, module)


def _together(
    targets: Sequence[cst.BaseExpression], value: cst.BaseExpression, name: str
) -> Iterator[cst.BaseExpression]:
    """Yield the value that `a, b = x, y` gives `name`."""
    for target in targets:
        if isinstance(target, cst.Tuple) and isinstance(value, cst.Tuple):
            for element, given in zip(target.elements, value.elements, strict=False):
                if _is(element.value, name):
                    yield given.value


def _is(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def rebound(node: cst.CSTNode) -> set[str]:
    """Return the names that running `node` may give other values, those left out whose tensor it only writes."""
    found: set[str] = set()
    for inner in walk(node):
        if isinstance(inner, _BINDING):
            found |= set(targets(inner.target))
        elif isinstance(inner, (cst.AsName, cst.MatchAs, cst.MatchStar)) and inner.name is not None:
            found |= set(targets(inner.name))
        elif isinstance(inner, (cst.FunctionDef, cst.ClassDef)):
            found.add(inner.name.value)
    return found
