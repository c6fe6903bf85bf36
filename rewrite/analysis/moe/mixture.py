"""A block that sends each token to a few experts: its router, its experts and what is added to their sum."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.blocks.called import check_calls
from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import MAX_DEPTH, run_step
from rewrite.analysis.moe.gating import OtherForm, experts_form
from rewrite.analysis.moe.ways import Ways
from rewrite.analysis.terms.computation import NotComputable
from rewrite.analysis.terms.spelling import NONE, Term, constant
from rewrite.analysis.tree.module import ClassInfo, Module, dotted
from rewrite.analysis.tree.nodes import parameters

_DECORATOR = "integrations.use_experts_implementation"


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
    given: tuple[str, ...] = ()
    """What the router is given besides the hidden states."""
    scaling: str | None = None
    """What the experts' sum is multiplied by."""
    may_lack_shared: bool = False
    """Whether the module for all tokens may be None, of which nothing is added then."""
    shared_flat: bool = False
    """Whether the module for all tokens, and its gate, are given `[N, H]` and not the batch as it stands."""


def experts_attributes(info: ClassInfo, module: Module) -> list[str]:
    """Return the attributes that hold experts of a class that `use_experts_implementation` decorates."""
    return [
        attribute
        for attribute, values in info.assigned.items()
        if any(isinstance(v, cst.Call) and (c := class_of(v, module)) and decorator_of(c, module) for v in values)
    ]


def class_of(value: cst.BaseExpression, module: Module) -> ClassInfo | None:
    """Return the class of the file that `value` builds an object of."""
    return module.classes.get(module.qualified(value.func)) if isinstance(value, cst.Call) else None


def classes_of(info: ClassInfo, attribute: str, module: Module) -> list[ClassInfo] | None:
    """Return the classes of the file that the attribute may be of; None if it may be something else."""
    found = [class_of(value, module) for value in module.assignments(info, attribute)]
    return None if not found or None in found else [f for f in found if f is not None]


def form_of(experts: ClassInfo, module: Module) -> tuple[str, ...]:
    """Return the arguments of the `ExpertsForm` of a class of experts; none for packed weights and `act_fn`.

    Raises:
        NotComputable: if it computes something that `ExpertsForm` does not describe.
    """
    decorator = decorator_of(experts, module)
    if decorator is None:
        raise OtherForm(f"{experts.name} is not decorated")
    return experts_form(experts, decorator, module)


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
    step = Ways(module, info, MAX_DEPTH)
    result = run_step(step, forward, {}, trusted=None)
    # What it returns besides is not computed in a step; a layer that reads it has none.
    total = _bare(result.args[0] if result.op == "tuple" and result.args else result)
    total, lacking = _with_shared(total)
    routed, shared = (total, None)
    if total.op == "add" and len(total.args) == 2:
        sides = [_bare(side) for side in total.args]
        routed, shared = sides if _is_routed(_unscaled(sides[0])[0]) else sides[::-1]
    routed, scaling = _unscaled(routed)
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
    if not _is_call(call) or len(call.args) < 2 or _bare(call.args[1]) != hidden or _bare(x) != hidden:
        raise OtherBlock("the router or the experts are given something else than the hidden states")
    given = call.args[2:]
    if any(argument.op != "attribute" for argument in given):
        raise OtherBlock("the router is given more than hidden states and what the block holds")
    module_name, gate, shared_flat = _shared(shared, hidden)
    if lacking is not None and module_name != lacking:
        raise OtherBlock("another module than the one that is added may be None")
    check_calls(step.calls, result, trusted=(experts.value, call.args[0].value))
    return Mixture(
        experts.value, call.args[0].value, call.args[1] != hidden, module_name, gate,
        tuple(source(argument, module) for argument in given),
        None if scaling is None else source(scaling, module), lacking is not None, shared_flat,
    )  # fmt: skip


def _with_shared(total: Term) -> tuple[Term, str | None]:
    """Return the sum with the module for all tokens, and its attribute where nothing is added if it is None."""
    if total.op != "select" or total.args[0].op != "is" or total.args[0].args[1] != NONE:
        return total, None
    (held, _), lone, both = total.args[0].args, *map(_bare, total.args[1:])
    if held.op != "attribute" or both.op != "add" or lone not in map(_bare, both.args):
        raise OtherBlock("it returns different things")
    return both, held.value


def _unscaled(term: Term) -> tuple[Term, Term | None]:
    """Return what is multiplied by an attribute or a number, and that factor."""
    if term.op == "mul" and len(term.args) == 2:
        for factor, rest in (term.args, term.args[::-1]):
            if factor.op in ("attribute", "constant"):
                return _bare(rest), factor
    return term, None


def _shared(term: Term | None, hidden: Term) -> tuple[str | None, str | None, bool]:
    """Return the module for all tokens, its gate, and whether they are given `[N, H]`."""
    if term is None:
        return None, None, False
    gate: Term | None = None
    if term.op == "mul" and len(term.args) == 2:
        sigmoids = [side for side in term.args if side.op.removeprefix("nn.functional.") == "sigmoid"]
        others = [side for side in term.args if side not in sigmoids]
        if len(sigmoids) != 1 or not _reads_hidden(sigmoids[0].args[0], hidden):
            raise OtherBlock("what is added is multiplied by something else than a sigmoid of the hidden states")
        gate, term = sigmoids[0].args[0], others[0]
    term = _bare(term)
    if not _reads_hidden(term, hidden):
        raise OtherBlock("what is added is no module's output for the hidden states")
    flat = _is_flat(term.args[1])
    if gate is not None and _is_flat(gate.args[1]) != flat:
        raise OtherBlock("the module for all tokens and its gate are given different shapes")
    return term.args[0].value, None if gate is None else gate.args[0].value, flat


def _is_flat(term: Term) -> bool:
    """Whether the last change of a term's shape is that to `[N, H]`."""
    while term.op in ("contiguous", "cast"):
        term = term.args[0]
    rows = term.op in ("view", "reshape") and len(term.args) == 3 and term.args[1] == constant(-1)
    return rows or term.op == "flatten"


def _reads_hidden(term: Term, hidden: Term) -> bool:
    return _is_call(term) and len(term.args) == 2 and _bare(term.args[1]) == hidden


def _is_routed(term: Term) -> bool:
    """Whether `term` may call experts, as the file does or as the rewriter has put it."""
    fused = term.op == "fused_experts" and len(term.args) == 4 and term.args[1].op == "attribute"
    return fused or (_is_call(term) and len(term.args) == 4)


def _is_call(term: Term) -> bool:
    """Whether `term` calls an attribute of `self` with plain arguments."""
    plain = term.op == "call" and term.args[0].op == "attribute"
    return plain and all(argument.op != "keyword" for argument in term.args)


def _bare(term: Term) -> Term:
    """Return `term` without what only changes its shape, or its dtype to that of a parameter."""
    while term.op in ("contiguous", "view", "view_as", "reshape", "reshape_as", "flatten") or (
        term.op == "cast" and term.args[1].op == "dtype" and _bare(term.args[1].args[0]).op == "parameter"
    ):
        term = term.args[0]
    return term


def decorator_of(info: ClassInfo, module: Module) -> cst.BaseExpression | None:
    """Return what decorates a class of experts: the decorator itself, or its call."""
    for decorator in info.node.decorators:
        node = decorator.decorator
        name = node.func if isinstance(node, cst.Call) else node
        if isinstance(name, (cst.Name, cst.Attribute)):
            if module.imports.get(dotted(name), "").endswith(_DECORATOR) or module.qualified(name).endswith(
                _DECORATOR
            ):
                return node
    return None
