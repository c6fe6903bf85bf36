"""Elementwise products in every spelling: `a * b`, `torch.mul(a, b)`, `a.mul(b)`, with keywords or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.tree.module import Module, walk

_NAMES = ("mul", "multiply")


@dataclass(frozen=True)
class Product:
    """The product of two expressions, in the order in which they are evaluated."""

    node: cst.BaseExpression
    left: cst.BaseExpression
    right: cst.BaseExpression


def products_in(top: cst.CSTNode, module: Module) -> Iterator[Product]:
    """Yield every elementwise product below `top`, in source order."""
    for node in walk(top):
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
            yield Product(node, node.left, node.right)
        elif isinstance(node, cst.Call) and (sides := _sides(node, module)) is not None:
            yield Product(node, *sides)


def _sides(call: cst.Call, module: Module) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    if not isinstance(call.func, (cst.Attribute, cst.Name)) or any(argument.star for argument in call.args):
        return None
    plain = [argument.value for argument in call.args if argument.keyword is None]
    named = {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}
    if module.qualified(call.func) not in {f"torch.{name}" for name in _NAMES}:
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _NAMES:
            return None
        plain = [call.func.value, *plain]
    for key in ("input", "other"):
        if key in named and len(plain) < 2:
            plain.append(named.pop(key))
    return (plain[0], plain[1]) if len(plain) == 2 and not named else None


def resolved(node: cst.BaseExpression, values: Mapping[str, cst.BaseExpression]) -> cst.BaseExpression:
    """Return what a local that is assigned once stands for, through any number of such locals."""
    seen = set[str]()
    while isinstance(node, cst.Name) and node.value in values and node.value not in seen:
        seen.add(node.value)
        node = values[node.value]
    return node
