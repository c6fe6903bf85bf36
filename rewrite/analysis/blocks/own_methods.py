"""Which methods of a class are ours, and whether a name is free for one."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst

from rewrite.analysis.blocks.terms import canonical
from rewrite.analysis.effects import effects_of
from rewrite.analysis.tree.module import ClassInfo, Module, without_runtime
from rewrite.analysis.tree.nodes import parameters
from rewrite.offers import is_of_runtime

_LAST = ("linear", "fused_experts", "fp8_linear", "RoutingRule", "ExpertsForm")
"""What the methods of blocks, norms, routers and experts return the result of."""


def why_taken(info: ClassInfo, name: str, module: Module) -> str | None:
    """Say what else in the file a method called `name` would stand for or replace; None if nothing."""
    names = effects_of(module).names
    for other in (*names.owners(info), *names.heirs(info)):
        own = is_own_method(other.methods.get(name), None, module)
        if name in other.assigned or names.class_names(other)[name] > own:
            return f"{other.name}.{name}"
    if name in names.stored or "*" in names.stored:
        return f"{name} is set from outside"
    return names.why_strange(info) or None


def is_own_method(method: cst.FunctionDef | None, wanted: Collection[str] | None, module: Module) -> bool:
    """Whether a method takes what is wanted, and ends in a call of the runtime as those that a rule has put in."""
    if method is None or (wanted is not None and canonical(parameters(method)[1:]) != [*wanted]):
        return False
    last = method.body.body[-1]
    returned = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else None
    call = returned.value if isinstance(returned, cst.Return) else None
    if not isinstance(call, cst.Call) or without_runtime(module.qualified(call.func)) not in _LAST:
        return False
    name = module.qualified(call.func)
    return is_of_runtime(name) or not effects_of(module).names.is_bound(name)
