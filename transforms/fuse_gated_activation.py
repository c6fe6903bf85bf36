"""`activation(gate) * up` becomes one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import libcst as cst

from rewrite.analysis.syntax.module import ClassInfo, Module, names_in, self_attribute, walk
from rewrite.analysis.syntax.nodes import (
    block_of,
    bound_names,
    expression,
    mutated_names,
    single_argument,
    single_assignments,
)
from rewrite.analysis.syntax.replacement import name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform

_FUNCTIONS = ("silu", "gelu", "relu")
_MODULES = ("SiLU", "GELU", "ReLU")


@dataclass(frozen=True)
class _Product:
    node: cst.BinaryOperation
    activated: cst.Call
    other: cst.BaseExpression
    local: cst.Name | None
    """The local that held `activation(gate)`, if the product reads it through one."""


class FuseGatedActivation(Transform):
    """The product of an activated gate and another tensor becomes one kernel.

    What it does:
        `self.act_fn(gate) * up` becomes `gated_activation(gate, up, self.act_fn)`. Which activation it is may be known
        only from the config (`ACT2FN[config.hidden_act]`): the operator looks when it runs.

    Why:
        Eager torch reads and writes the widest tensor of a layer twice; the kernel reads each half and writes once.

    What it needs:
        A product of which one side is a call of an activation: an attribute built from `ACT2FN` or an activation
        module of torch, or torch's own silu, gelu or relu.

    Numerics:
        Reordered: the activation is not rounded before the product. SiLU, GELU (erf and tanh), ReLU and ReLU² are
        fused, any other activation is computed as written.

    Known limits:
        A hook on the activation module makes the operator call it as it is.
    """

    name: ClassVar[str] = "fuse_gated_activation"
    summary: ClassVar[str] = "`act(gate) * up` becomes one kernel, for the activation that the config names."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    after: ClassVar[tuple[str, ...]] = ("fuse_gate_up", "fuse_qkv")
    reasons: ClassVar[dict[str, str]] = {
        "activation_read_twice": "the activated gate is also read elsewhere",
        "values_change": "a value that the product reads is written between the activation and the product",
        "name_taken": "the file has a name `gated_activation` of its own",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every product with an activation on one side."""
        for owner, name, method in module.methods():
            for number, product in enumerate(_products(module, owner, method)):
                label = module.code(product.activated.func) + (f" #{number + 1}" if number else "")
                yield Candidate(product.node, f"{owner.name}.{name}", label)

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the product by the operator, and drop the local that held the activated gate."""
        owner, method = _place(candidate, module)
        product = next(p for p in _products(module, owner, method) if p.node is candidate.node)
        if not name_is_free("gated_activation", module, method):
            return Skip("name_taken")
        gate = single_argument(product.activated)
        if gate is None:
            raise TypeError("an activation without an argument")
        arguments = ", ".join(module.code(node) for node in (gate, product.other, product.activated.func))
        fused = expression(f"gated_activation({arguments})")
        edits = [Edit(product.node, (fused,))]
        if product.local is not None:
            if (skip := _cannot_move(product, method, module)) is not None:
                return skip
            edits.append(Edit(module.statement(product.activated), ()))
        return Found(tuple(edits), ("products.gated_activation",))


def _place(candidate: Candidate, module: Module) -> tuple[ClassInfo, cst.FunctionDef]:
    owner, method = candidate.where.split(".")
    return module.classes[owner], module.classes[owner].methods[method]


def _products(module: Module, owner: ClassInfo, method: cst.FunctionDef) -> Iterator[_Product]:
    values = single_assignments(method)
    for node in walk(method.body):
        if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Multiply):
            continue
        for side, other in ((node.left, node.right), (node.right, node.left)):
            local = side if isinstance(side, cst.Name) and side.value in values else None
            value = values[local.value] if local is not None else side
            if isinstance(value, cst.Call) and _is_activation(module, owner, value):
                yield _Product(node, value, other, local)
                break


def _is_activation(module: Module, owner: ClassInfo, call: cst.Call) -> bool:
    if single_argument(call) is None:
        return False
    if (attribute := self_attribute(call.func)) is not None:
        return any(_builds_activation(module, value) for value in module.assignments(owner, attribute))
    parts = module.qualified(call.func).split(".")
    return parts[0] == "torch" and parts[-1] in _FUNCTIONS


def _builds_activation(module: Module, value: cst.BaseExpression) -> bool:
    for node in walk(value):
        if isinstance(node, cst.Subscript) and module.qualified(node.value).endswith("activations.ACT2FN"):
            return True
        if isinstance(node, (cst.Attribute, cst.Name)):
            parts = module.qualified(node).split(".")
            if parts[0] == "torch" and parts[-1] in (*_FUNCTIONS, *_MODULES):
                return True
    return False


def _cannot_move(product: _Product, method: cst.FunctionDef, module: Module) -> Skip | None:
    local = product.local
    if local is None:
        return None
    reads = [n for n in walk(method.body) if isinstance(n, cst.Name) and n.value == local.value]
    if len(reads) != 2:  # the assignment's target and the product
        return Skip("activation_read_twice", local.value)
    block = list(block_of(product.activated, module))
    here = module.statement(product.activated)
    there = module.statement(product.node)
    if not any(line is there for line in block):
        return Skip("values_change", "the product stands in another block")
    start, end = (next(i for i, line in enumerate(block) if line is s) for s in (here, there))
    read = names_in([product.activated])
    between = block[start + 1 : end]
    if read & set().union(*(bound_names(line) for line in between)):
        return Skip("values_change", module.code(product.activated))
    if any(mutated_names(line) for line in between):
        return Skip("values_change", "another name may mean the same tensor")
    return None
