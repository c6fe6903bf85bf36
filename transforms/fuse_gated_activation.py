"""`activation(gate) * up` becomes one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import libcst as cst

from rewrite.analysis.effects import HEAP, Effect, Scope, between, effects_of, why_not_move
from rewrite.analysis.effects.identity import Identity
from rewrite.analysis.patterns.as_written import why_replaced
from rewrite.analysis.projections.activations import Gated, gated_products, held, products_in_place
from rewrite.analysis.projections.elementwise_products import products_in
from rewrite.analysis.projections.strides import reads_of
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import block_of, expression
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Transform


class FuseGatedActivation(Transform):
    """The product of an activated gate and another tensor becomes one kernel.

    What it does:
        `self.act_fn(gate) * up` becomes `gated_activation(gate, up, self.act_fn)`. Which activation it is may be known
        only from the config (`ACT2FN[config.hidden_act]`): the operator looks when it runs.

    Why:
        Eager torch reads and writes the widest tensor of a layer twice; the kernel reads each half and writes once.

    What it needs:
        A product, in whatever spelling, of which one side is a call of an activation: an attribute built from
        `ACT2FN` or an activation module of torch, or torch's own silu, gelu or relu. SiLU and GELU written out, or in
        a function of the file, are told by their values. Neither side, nor what stands between them, writes what the
        other reads.

    Numerics:
        Reordered: the activation is not rounded before the product. SiLU, GELU (erf and tanh), ReLU and ReLU² are
        fused, any other activation is computed as written.

    Known limits:
        A hook on the activation module makes the operator call it as it is.
    """

    name: ClassVar[str] = "fuse_gated_activation"
    summary: ClassVar[str] = "`act(gate) * up` becomes one kernel, for the activation that the config names."
    numerics: ClassVar[Numerics] = Numerics.REORDERED
    after: ClassVar[tuple[str, ...]] = ("fuse_gate_up", "fuse_gated_norm", "fuse_qkv")
    reasons: ClassVar[dict[str, str]] = {
        "not_proven": "the activation, the factors, or what stands between them, may write what another reads",
        "other_form": "the activation or the product is in a form that the operator does not take, or read elsewhere",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every product with an activation on one side."""
        for owner, name, method in module.methods():
            if not any(True for _ in products_in(method.body, module)) and not _multiplies_in_place(method):
                continue
            scope = effects_of(module).scope(method, owner)
            for number, gated in enumerate(gated_products(scope)):
                label = module.code(gated.function) + (f" #{number + 1}" if number else "")
                yield Candidate(gated.product.node, f"{owner.name}.{name}", label)
            for number, line in enumerate(products_in_place(scope)):
                label = module.code(line.target) + (f" #{number + 1}" if number else "")
                yield Candidate(line, f"{owner.name}.{name}", f"{label} *=")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Replace the product by the operator, and drop the local that held the activated gate."""
        owner, method = _place(candidate, module)
        scope = effects_of(module).scope(method, owner)
        gated = next((g for g in gated_products(scope) if g.product.node is candidate.node), None)
        if gated is None or gated.gate is None or _is_number(gated.other):
            return Skip("other_form", module.code(candidate.node))
        if (skip := _unsafe(gated, scope)) is not None:
            return skip
        attribute = self_attribute(gated.function)
        if attribute and (why := why_replaced(attribute, (gated.gate, gated.other), owner, scope)):
            return Skip("not_proven", why)
        arguments = ", ".join(module.code(_bare(node)) for node in (gated.gate, gated.other, gated.function))
        arguments += f", approximate={gated.approximate}" if gated.approximate else ""
        edits = [Edit(gated.product.node, (expression(f"gated_activation({arguments})"),))]
        if gated.local is not None:
            edits.append(Edit(module.statement(gated.activated), ()))
        return Found(tuple(edits), ("gated_activation",))


def _place(candidate: Candidate, module: Module) -> tuple[ClassInfo, cst.FunctionDef]:
    owner, method = candidate.where.split(".")
    return module.classes[owner], module.classes[owner].methods[method]


def _multiplies_in_place(method: cst.FunctionDef) -> bool:
    return any(isinstance(node, cst.MultiplyAssign) for node in walk(method.body))


def _is_number(node: cst.BaseExpression) -> bool:
    inner = node.expression if isinstance(node, cst.UnaryOperation) else node
    return isinstance(inner, cst.BaseNumber)


def _bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an argument without the parentheses that it had as an operand, unless it needs them."""
    return (
        node if isinstance(node, (cst.Tuple, cst.GeneratorExp, cst.NamedExpr)) else node.with_changes(lpar=[], rpar=[])
    )


def _unsafe(gated: Gated, scope: Scope) -> Skip | None:
    """Return why the factors may not be computed in the operator's order, None if they may."""
    assert gated.gate is not None
    activated, gate, other = (scope.of(node) for node in (gated.activated, gated.gate, gated.other))
    if scope.memory(activated.writes) - scope.memory(gate.writes):
        return Skip("not_proven", scope.module.code(gated.activated))
    if activated.anything and not gate.anything:
        return Skip("not_proven", activated.anything)
    if gated.local is not None and (skip := _local_stays(gated, scope, activated)) is not None:
        return skip
    return _operands(gated, scope, activated, other)


def _operands(gated: Gated, scope: Scope, activated: Effect, other: Effect) -> Skip | None:
    """The gate is computed, then the other factor, then the activation: compare with the order that was written."""
    if other.is_pure and activated.is_pure:
        return None
    if gated.local is None and gated.product.left is gated.side:  # only the activation itself comes later
        roots = scope.value(gated.gate).roots if gated.gate is not None else frozenset()
        activated = scope.of(gated.function) | Effect(reads=roots - {HEAP})
    why = why_not_move(scope, activated, other)
    return Skip("not_proven", why) if why is not None else None


def _local_stays(gated: Gated, scope: Scope, activated: Effect) -> Skip | None:
    """Return why the activation may not move down to the product."""
    local, module = gated.local, scope.module
    assert local is not None
    line = module.statement(gated.activated)
    if held(local, scope) is not gated.activated or not _is_all_of(line):
        return Skip("other_form", module.code(line))
    if sum(_reads_from(line, read, scope) for read in reads_of(local.value, scope)) != 1:
        return Skip("other_form", f"`{local.value}` is read elsewhere")
    block = list(block_of(line, module))
    after = block[next(i for i, statement in enumerate(block) if statement is line) + 1 :]
    past = between(scope, after[0], gated.product.node) if after else None
    if past is None:
        return Skip("not_proven", "the product stands in another block")
    if (why := why_not_move(scope, activated, replace(past, leaves=frozenset()))) is not None:
        return Skip("not_proven", why)
    return None


def _reads_from(line: cst.BaseStatement, read: cst.Name, scope: Scope) -> bool:
    """Whether a local may be read that a statement has bound."""
    if read.value in scope.single or any(isinstance(a, _LATER) for a in _inside(read, scope)):
        return True
    made = Identity(scope).assignment(read.value, read, strict=True)
    return made is line or isinstance(made, cst.BaseCompoundStatement)


def _inside(node: cst.CSTNode, scope: Scope) -> Iterator[cst.CSTNode]:
    """Yield what stands around a node within the method."""
    for above in scope.module.ancestors(node):
        if above is scope.function:
            return
        yield above


_LATER = (cst.Lambda, cst.FunctionDef, cst.GeneratorExp)
"""What may run when the local is bound to something else."""


def _is_all_of(line: cst.BaseStatement) -> bool:
    """Whether a statement is one assignment to one name."""
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) != 1:
        return False
    small = line.body[0]
    return not isinstance(small, cst.Assign) or len(small.targets) == 1
