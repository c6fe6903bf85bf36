"""Products of which one factor is an activation of something, in any spelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects import Scope, attribute
from rewrite.analysis.effects.identity import Identity
from rewrite.analysis.projections.elementwise_products import Product, products_in, resolved
from rewrite.analysis.projections.written_activations import written
from rewrite.analysis.tree.module import walk
from rewrite.analysis.tree.nodes import expression

FUNCTIONS = ("silu", "gelu", "relu")
_MODULES = ("SiLU", "GELU", "ReLU")


@dataclass(frozen=True)
class Gated:
    """A product with an activation on one side."""

    product: Product
    activated: cst.BaseExpression
    gate: cst.BaseExpression | None
    """What is activated, None where the call has other arguments than that."""
    function: cst.BaseExpression
    """What computes the activation: `self.act_fn`, `F.silu`."""
    side: cst.BaseExpression
    """The factor that is the activation, or the local that holds it."""
    other: cst.BaseExpression
    approximate: str = ""
    """The source of GELU's argument of that name, where the call has one."""

    @property
    def local(self) -> cst.Name | None:
        """The local that held the activated gate, if the product reads it through one."""
        return self.side if isinstance(self.side, cst.Name) else None


def gated_products(scope: Scope) -> Iterator[Gated]:
    """Yield every product in a method with an activation on one side, in source order.

    One that a statement computes beside other values has no gate that could be put into the product.
    """
    for product in products_in(scope.function.body, scope.module):
        for side, other in ((product.left, product.right), (product.right, product.left)):
            value = held(side, scope)
            beside = isinstance(scope.module.parent(value), cst.Element)
            if isinstance(value, cst.Call) and (function := _activation(value, scope)) is not None:
                gate, approximate = (None, "") if beside else _gate(value, function, scope)
                yield Gated(product, value, gate, function, side, other, approximate)
                break
            if not beside and (found := written(value, scope)) is not None:
                yield Gated(product, value, found.gate, expression(found.function), side, other, found.approximate)
                break


def held(node: cst.BaseExpression, scope: Scope) -> cst.BaseExpression:
    """Return what a local stands for where it is read: its only value, or that of the line that bound it last."""
    value = resolved(node, scope.single)
    line = last_bound(value, scope) if isinstance(value, cst.Name) else None
    return line.value if line is not None else value


def last_bound(name: cst.Name, scope: Scope) -> cst.Assign | None:
    """Return the assignment `name = value` that certainly bound a local last, where several do."""
    if name.value not in scope.locals or name.value in scope.single:
        return None
    line = Identity(scope).assignment(name.value, name, strict=True)
    small = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    if not isinstance(small, cst.Assign) or len(small.targets) != 1:
        return None
    target = small.targets[0].target
    return small if isinstance(target, cst.Name) and target.value == name.value else None


def products_in_place(scope: Scope) -> Iterator[cst.AugAssign]:
    """Yield every `x *= activation(gate)`."""
    for node in walk(scope.function.body):
        if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.MultiplyAssign):
            value = resolved(node.value, scope.single)
            if isinstance(value, cst.Call) and _activation(value, scope) is not None:
                yield node


def _activation(call: cst.Call, scope: Scope) -> cst.BaseExpression | None:
    """Return what is called if that is an activation: an attribute made one, a local for it, or torch's function."""
    function = resolved(call.func, scope.single)
    name = function.attr.value if isinstance(function, cst.Attribute) and _is_own(function) else None
    if name is not None and scope.owner is not None:
        values = attribute(scope.owner, name, scope.names).values or scope.module.assignments(scope.owner, name)
        return function if any(_builds_activation(value, scope) for value in values) else None
    parts = scope.module.qualified(function).split(".")
    return function if parts[0] == "torch" and parts[-1] in FUNCTIONS else None


def _is_own(function: cst.Attribute) -> bool:
    return isinstance(function.value, cst.Name) and function.value.value == "self"


def _builds_activation(value: cst.BaseExpression, scope: Scope, depth: int = 3) -> bool:
    """Whether an activation is built somewhere in a value, or in a local of `__init__` that stands in it."""
    init = scope.owner.methods.get("__init__") if scope.owner is not None else None
    made = scope.effects.scope(init, scope.owner).single if init is not None else {}
    for node in walk(value):
        local = made.get(node.value) if isinstance(node, cst.Name) and depth else None
        if local is not None and _builds_activation(local, scope, depth - 1):
            return True
        if isinstance(node, cst.Subscript) and scope.module.qualified(node.value).endswith("activations.ACT2FN"):
            return True
        if isinstance(node, (cst.Attribute, cst.Name)):
            parts = scope.module.qualified(node).split(".")
            if parts[0] == "torch" and parts[-1] in (*FUNCTIONS, *_MODULES):
                return True
    return False


def _gate(call: cst.Call, function: cst.BaseExpression, scope: Scope) -> tuple[cst.BaseExpression | None, str]:
    """Return the only argument of an activation, `inplace=False` left out, and how torch's GELU is approximated."""
    plain = [argument for argument in call.args if argument.keyword is None or argument.keyword.value == "input"]
    others = [argument for argument in call.args if argument not in plain]
    if len(plain) != 1 or plain[0].star or isinstance(plain[0].value, cst.GeneratorExp):
        return None, ""
    of_torch = scope.module.qualified(function) == "torch.nn.functional.gelu"
    if of_torch and len(others) == 1 and others[0].keyword is not None and others[0].keyword.value == "approximate":
        if isinstance(others[0].value, cst.SimpleString):
            return plain[0].value, scope.module.code(others[0].value)
    harmless = all(
        a.keyword is not None
        and a.keyword.value == "inplace"
        and isinstance(a.value, cst.Name)
        and a.value.value == "False"
        for a in others
    )
    return plain[0].value if harmless else None, ""
