"""Whether positions that a rotary embedding is given are those of the cache's slots.

Tables that are computed once have a row for each slot, so a model that reckons with its positions reads beyond them.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.tree.module import Module, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, given_names

_POSITIONS = "position_ids"
_SAME = frozenset(
    {
        "unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "repeat", "to", "long", "int", "type_as",
        "contiguous", "clone", "clamp", "clamp_min", "clamp_max", "masked_fill", "masked_fill_", "cumsum", "detach",
    }
)  # fmt: skip
"""Methods after which positions are what they were, or no greater ones."""
_OTHER = frozenset({"mul", "multiply", "div", "sub", "neg", "pow", "flip", "mul_", "sub_", "div_", "neg_"})
_COUNTED = m.BinaryOperation(operator=m.Subtract(), right=m.Integer("1"))


def reckoned_positions(given: cst.BaseExpression, rotary: str, function: cst.FunctionDef, module: Module) -> str:
    """Return the source of what makes other positions than those of slots, empty where nothing is seen to.

    Args:
        given: what the rotary embedding is given.
        rotary: the attribute that is the embedding.
        function: the function that calls it.
        module: its file, of which any function may hand positions down.
    """
    found = _reckoned(given, _values(function), frozenset())
    for _, _, other in module.methods() if found is None else ():
        for call in calls_in(other.body):
            named = {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}
            if _POSITIONS in named and called_attribute(call) != rotary and found is None:
                found = _reckoned(named[_POSITIONS], _values(other), frozenset())
    return "" if found is None else module.code(found)


def _values(function: cst.FunctionDef) -> dict[str, list[cst.CSTNode]]:
    """Return what a function gives each local; a statement where it changes the local."""
    values: dict[str, list[cst.CSTNode]] = {}
    for node in walk(function.body):
        for name, value in given_names(node).items():
            values.setdefault(name, []).append(value)
        if isinstance(node, (cst.NamedExpr, cst.AnnAssign, cst.AugAssign)) and isinstance(node.target, cst.Name):
            changed = node if isinstance(node, cst.AugAssign) else node.value
            if changed is not None:
                values.setdefault(node.target.value, []).append(changed)
    return values


def _reckoned(
    node: cst.CSTNode, values: dict[str, list[cst.CSTNode]], seen: frozenset[str], number: bool = False
) -> cst.CSTNode | None:
    """Return the part of an expression by which positions are no slots; a `number` is one that is added to them."""
    if isinstance(node, cst.Name):
        inner = values.get(node.value, ()) if node.value not in seen else ()
        parts: Iterator[cst.CSTNode] = iter(inner)
        seen |= {node.value}
    elif isinstance(node, cst.BinaryOperation):
        if m.matches(node, _COUNTED) and any(
            m.matches(c.func, m.Attribute(attr=m.Name("cumsum"))) for c in calls_in(node)
        ):
            return None
        if not isinstance(node.operator, cst.Add):
            return node
        parts, number = iter((node.left, node.right)), True
    elif isinstance(node, cst.AugAssign):
        if not isinstance(node.operator, cst.AddAssign):
            return node
        parts, number = iter((node.value,)), True
    elif isinstance(node, (cst.UnaryOperation, cst.Float)):
        return node
    elif isinstance(node, cst.Integer):
        return node if number and node.value != "0" else None
    elif isinstance(node, cst.IfExp):
        parts = iter((node.body, node.orelse))
    elif isinstance(node, (cst.Subscript, cst.NamedExpr)):
        parts = iter((node.value,))
    elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name = node.func.attr.value
        if name in _OTHER:
            return node
        plain = [argument.value for argument in node.args if argument.keyword is None]
        if name in ("add", "add_"):
            parts, number = iter((node.func.value, *plain)), True
        elif name == "arange":
            parts, number = iter(plain[:1] if len(plain) > 1 else ()), True
        else:
            parts = iter((node.func.value,) if name in _SAME else ())
    else:
        return None
    return next((found for part in parts if (found := _reckoned(part, values, seen, number)) is not None), None)
