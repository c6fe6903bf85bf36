"""A feed-forward block in a decode step: `residual + self(norm(hidden_states))` as two products."""

from __future__ import annotations

import libcst as cst

from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import computed_in_step, is_linear
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import Term, constant
from rewrite.analysis.tree.methods import MODULE, TENSOR, Method
from rewrite.analysis.tree.module import ClassInfo, Module
from rewrite.analysis.tree.nodes import parameters
from rewrite.analysis.tree.replacement import call_statement
from rewrite.operators import offer

NAME = "decode_residual"
"""What blocks of a layer call their method for one token a row: it returns the residual with their output added."""
PARAMETERS = {"hidden_states": TENSOR, "norm": f"{MODULE} | None", "residual": f"{TENSOR} | None"}


def mlp_method(info: ClassInfo, module: Module) -> Method | None:
    """Return the method of a class whose `forward(x)` is two products with an activation between, else None."""
    found = mlp_statements(info, module)
    if found is None:
        return None
    statements, uses = found
    text = "Returns `residual + self(norm(hidden_states))` for one token a row."
    return Method(info.methods["forward"], NAME, PARAMETERS, TENSOR, text, statements, uses)


def mlp_statements(
    info: ClassInfo, module: Module
) -> tuple[tuple[cst.SimpleStatementLine, cst.SimpleStatementLine], tuple[str, ...]] | None:
    """Return the two products of `forward(x)` as statements, and what they call; None for another form."""
    forward = info.methods.get("forward")
    if forward is None or len(parameters(forward)) != 2:
        return None
    try:
        term = computed_in_step(forward, module, info)
        first = _first_product(term, Term("parameter", (), parameters(forward)[1]), info, module)
    except NotComputable:
        return None
    if first is None:
        return None
    statement, use = first
    last = call_statement(
        "return ", "linear", ["hidden_states", source(term.args[0], module), "residual=residual"], module
    )
    return (statement, last), tuple(sorted({use, "linear"}))


def _first_product(
    term: Term, hidden: Term, info: ClassInfo, module: Module
) -> tuple[cst.SimpleStatementLine, str] | None:
    """Return the statement up to the activation, for the input of the last product."""
    if term.op != "call" or len(term.args) != 2 or not is_linear(term.args[0], info, module):
        return None
    inner = term.args[1]
    if inner.op == "gated_activation" and len(inner.args) == 3:
        gate, up, activation = inner.args
        projections = _gated(gate, up, hidden, info, module)
        if projections is None:
            return None
        packed = ", ".join(source(p, module) for p in projections) + ("," if len(projections) == 1 else "")
        arguments = ["hidden_states", f"({packed})", source(activation, module), "norm=norm"]
        form = offer(inner.op).step
        return call_statement("hidden_states = ", form, arguments, module), form
    if inner.op == "call" and len(inner.args) == 2 and inner.args[0].op == "attribute":
        activation, product = inner.args
        if _projection(product, hidden, info, module) is not None and not is_linear(activation, info, module):
            projected = f"linear(hidden_states, {source(product.args[0], module)}, norm=norm)"
            return (
                call_statement("hidden_states = ", source(activation, module), [projected], module),
                "linear",
            )
    return None


def _gated(gate: Term, up: Term, hidden: Term, info: ClassInfo, module: Module) -> list[Term] | None:
    if gate.op == up.op == "index" and gate.args[0] == up.args[0] and gate.args[0].op == "chunk":
        chunk = gate.args[0]
        halves = (gate.args[1:], up.args[1:]) == ((constant(0),), (constant(1),))
        if not halves or chunk.args[1:] != (constant(2), constant(-1)):
            return None
        packed = _projection(chunk.args[0], hidden, info, module)
        return None if packed is None else [packed]
    projections = [_projection(term, hidden, info, module) for term in (gate, up)]
    return None if None in projections else [p for p in projections if p is not None]


def _projection(term: Term, hidden: Term, info: ClassInfo, module: Module) -> Term | None:
    """Return the linear module whose product with the block's input `term` is."""
    if term.op == "call" and term.args[1:] == (hidden,) and is_linear(term.args[0], info, module):
        return term.args[0]
    return None
