"""A block that sends each token to a few experts: its router, its experts and what is added to their sum."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.step.terms import MAX_DEPTH, Step, check_calls, run_step
from rewrite.analysis.syntax.module import ClassInfo, Module, dotted
from rewrite.analysis.syntax.nodes import parameters
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import Term, constant

_DECORATOR = "integrations.use_experts_implementation"
_PARTS = ("gate_up_proj", "down_proj", "act_fn")


class OtherBlock(NotComputable):
    """The block does something else than to route, compute experts and add."""


@dataclass(frozen=True)
class Mixture:
    """The attributes of a sparse block."""

    experts: str
    router: str
    flat: bool
    """Whether the router is given `[N, H]` and not the batch as it stands."""
    shared: str | None
    """A module for all tokens, whose output is added."""
    shared_gate: str | None
    """A module whose sigmoid that output is multiplied by."""


def experts_attributes(info: ClassInfo, module: Module) -> list[str]:
    """Return the attributes that hold experts of a class that `use_experts_implementation` decorates."""
    return [
        attribute
        for attribute, values in info.assigned.items()
        if any(isinstance(v, cst.Call) and (c := class_of(v, module)) and _decorator(c, module) for v in values)
    ]


def class_of(value: cst.BaseExpression, module: Module) -> ClassInfo | None:
    """Return the class of the file that `value` builds an object of."""
    return module.classes.get(module.qualified(value.func)) if isinstance(value, cst.Call) else None


def classes_of(info: ClassInfo, attribute: str, module: Module) -> list[ClassInfo] | None:
    """Return the classes of the file that the attribute may be of; None if it may be something else."""
    found = [class_of(value, module) for value in module.assignments(info, attribute)]
    return None if not found or None in found else [f for f in found if f is not None]


def layout_of(experts: ClassInfo, module: Module) -> str | None:
    """Return what is unusual about the layout of an experts class; None for gates above ups, as nn.Linear has them."""
    decorator = _decorator(experts, module)
    if decorator is None:
        return f"{experts.name} is not decorated"
    if isinstance(decorator, cst.Call) and decorator.args:
        return ", ".join(module.code(argument) for argument in decorator.args)
    missing = [part for part in _PARTS if part not in experts.assigned]
    return f"{experts.name} has no {missing[0]}" if missing else None


def mixture(info: ClassInfo, module: Module) -> Mixture:
    """Return the parts of the sparse block `info`.

    Raises:
        NotComputable: if its `forward` does something else.
    """
    forward = info.methods["forward"]
    names = parameters(forward)[1:]
    if len(names) != 1:
        raise OtherBlock("it takes more than the hidden states")
    hidden = Term("parameter", (), names[0])
    step = Step(module, info, MAX_DEPTH)
    result = run_step(step, forward, {}, trusted=None)
    total = _bare(result)
    routed, shared = (total, None)
    if total.op == "add" and len(total.args) == 2:
        sides = [_bare(side) for side in total.args]
        routed, shared = sides if _is_routed(sides[0]) else sides[::-1]
    if not _is_routed(routed):
        raise OtherBlock("it returns something else than the experts' sum")
    experts, x, index, weights = routed.args
    if routed.op == "fused_experts":
        experts, x = x, experts
    if experts.value not in experts_attributes(info, module):
        raise OtherBlock("it returns something else than the experts' sum")
    call = index.args[0] if index.args else index
    if (index, weights) != (Term("index", (call, constant(2))), Term("index", (call, constant(1)))):
        raise OtherBlock("the experts are given something else than the router's weights and index")
    if not _is_call(call, 2) or _bare(call.args[1]) != hidden or _bare(x) != hidden:
        raise OtherBlock("the router or the experts are given something else than the hidden states")
    module_name, gate = _shared(shared, hidden)
    check_calls(step.calls, result, trusted=(experts.value, call.args[0].value))
    return Mixture(experts.value, call.args[0].value, call.args[1] != hidden, module_name, gate)


def _shared(term: Term | None, hidden: Term) -> tuple[str | None, str | None]:
    if term is None:
        return None, None
    gate: str | None = None
    if term.op == "mul" and len(term.args) == 2:
        sigmoids = [side for side in term.args if side.op.removeprefix("nn.functional.") == "sigmoid"]
        others = [side for side in term.args if side not in sigmoids]
        if len(sigmoids) != 1 or not _reads_hidden(sigmoids[0].args[0], hidden):
            raise OtherBlock("what is added is multiplied by something else than a sigmoid of the hidden states")
        gate, term = sigmoids[0].args[0].args[0].value, others[0]
    term = _bare(term)
    if not _reads_hidden(term, hidden):
        raise OtherBlock("what is added is no module's output for the hidden states")
    return term.args[0].value, gate


def _reads_hidden(term: Term, hidden: Term) -> bool:
    return _is_call(term, 2) and _bare(term.args[1]) == hidden


def _is_routed(term: Term) -> bool:
    """Whether `term` may call experts, as the file does or as the rewriter has put it."""
    fused = term.op == "fused_experts" and len(term.args) == 4 and term.args[1].op == "attribute"
    return fused or _is_call(term, 4)


def _is_call(term: Term, length: int) -> bool:
    """Whether `term` calls an attribute of `self` with `length - 1` plain arguments."""
    plain = term.op == "call" and len(term.args) == length and term.args[0].op == "attribute"
    return plain and all(argument.op != "keyword" for argument in term.args)


def _bare(term: Term) -> Term:
    """Return `term` without what only changes its shape, or its dtype to that of a parameter."""
    while term.op in ("contiguous", "view", "view_as", "reshape", "reshape_as", "flatten") or (
        term.op == "cast" and term.args[1].op == "dtype" and _bare(term.args[1].args[0]).op == "parameter"
    ):
        term = term.args[0]
    return term


def _decorator(info: ClassInfo, module: Module) -> cst.BaseExpression | None:
    for decorator in info.node.decorators:
        node = decorator.decorator
        name = node.func if isinstance(node, cst.Call) else node
        if isinstance(name, (cst.Name, cst.Attribute)):
            if module.imports.get(dotted(name), "").endswith(_DECORATOR) or module.qualified(name).endswith(
                _DECORATOR
            ):
                return node
    return None
