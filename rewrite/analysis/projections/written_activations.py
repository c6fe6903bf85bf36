"""Activations that a file writes out, or has a function of its own for."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects import Scope
from rewrite.analysis.terms.computation import NotComputable, Run, body
from rewrite.analysis.terms.curve import activation_written
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import names_in, self_attribute
from rewrite.analysis.tree.nodes import parameters

_FUNCTIONAL = "torch.nn.functional"
_OF = Term("parameter", (), "gate")


@dataclass(frozen=True)
class Written:
    """An activation that is no call of one."""

    gate: cst.BaseExpression
    """What is activated."""
    function: str
    """The source of torch's function that computes it."""
    approximate: str
    """The source of GELU's argument of that name; empty for none."""


def written(value: cst.BaseExpression, scope: Scope) -> Written | None:
    """Return the activation that an expression computes of a local, or by a function of the file of its argument."""
    found = _by_function(value, scope) if isinstance(value, cst.Call) else None
    found = found or _of_a_local(value, scope)
    functional = _name_of_functional(scope)
    if found is None or functional is None:
        return None
    gate, kind = found
    tanh = kind == "gelu_tanh"
    return Written(gate, f"{functional}.{'gelu' if tanh else kind}", '"tanh"' if tanh else "")


def _of_a_local(value: cst.BaseExpression, scope: Scope) -> tuple[cst.BaseExpression, str] | None:
    """Return what an expression of one local activates, and the activation."""
    if not isinstance(value, (cst.BinaryOperation, cst.Call)):
        return None
    names = names_in([value]) & scope.locals
    if len(names) != 1 or "self" in names:
        return None
    name = next(iter(names))
    try:
        term = Run(scope.module, None, 0).expression(value, {name: _OF})
    except NotComputable:
        return None
    kind = activation_written(term, _OF)
    return None if kind is None else (cst.Name(name), kind)


def _by_function(call: cst.Call, scope: Scope) -> tuple[cst.BaseExpression, str] | None:
    """Return what a function or method of the file activates, its only argument, and the activation."""
    if len(call.args) != 1 or call.args[0].star or isinstance(call.args[0].value, cst.GeneratorExp):
        return None
    names, owner = scope.effects.names, None
    if isinstance(call.func, cst.Name) and call.func.value not in scope.locals:
        function = scope.module.functions.get(call.func.value)
        plain = function is not None and names.means(call.func.value)
    else:
        owner, method = scope.owner, self_attribute(call.func)
        function = scope.module.method(owner, method) if owner is not None and method is not None else None
        plain = owner is not None and method is not None and names.method_is_plain(owner, method)
    if function is None or not plain or function.decorators:
        return None
    given = [name for name in parameters(function) if name != "self"]
    if len(given) != 1 or (call.args[0].keyword is not None and call.args[0].keyword.value != given[0]):
        return None
    try:
        term = body(function, scope.module, owner)
    except NotComputable:
        return None
    kind = activation_written(term, Term("parameter", (), given[0]))
    return None if kind is None else (call.args[0].value, kind)


def _name_of_functional(scope: Scope) -> str | None:
    """Return what the file calls torch's module of functions."""
    imports = scope.module.imports
    for name, imported in imports.items():
        rest = _FUNCTIONAL.removeprefix(imported)
        if (
            rest != _FUNCTIONAL
            and rest[:1] in ("", ".")
            and name not in scope.locals
            and scope.effects.names.means(name)
        ):
            return name + rest
    return None
