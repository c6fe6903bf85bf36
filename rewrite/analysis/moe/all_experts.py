"""Experts that are all computed, of tokens times their weights, most of which are zero."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.blocks.terms import MAX_DEPTH, values_of, why_not_read
from rewrite.analysis.effects import effects_of
from rewrite.analysis.moe.gating import OtherForm, Reader
from rewrite.analysis.moe.ways import Ways
from rewrite.analysis.terms.computation import Bindings, NotComputable, body
from rewrite.analysis.terms.spelling import FLOAT32, Term, constant, make
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import called_attribute, calls_in, parameters

_ZERO, _ONE, _REST = constant(0), constant(1), constant(-1)
_SHAPED = ("view", "reshape")
_NONE_OF_IT = make("float", Term("constant", (), '"-inf"'))


@dataclass(frozen=True)
class EveryExpert:
    """A call of experts that are given each token times its weight for every expert, one expert after the other."""

    call: cst.Call
    scores: str
    """The local that holds the weights, `[N, E]`."""
    top_k: str
    """How many of a token's weights are not zero at most."""


def every_form(experts: ClassInfo, module: Module) -> tuple[str, ...]:
    """Return the arguments of the `ExpertsForm` of a class that computes every expert.

    Raises:
        NotComputable: if it does not: two batched products, the weights with their columns last, and a gate between.
    """
    forward = experts.methods.get("forward")
    if forward is None or len(parameters(forward)) != 2:
        raise OtherForm("it takes more than the hidden states")
    if why := why_not_read(experts, forward, module):
        raise OtherForm(why)
    given = Term("parameter", (), parameters(forward)[1])
    term = body(forward, module, experts)
    down = term.args[0] if term.op in _SHAPED and len(term.args) == 3 and term.args[1] == _REST else term
    gated = _product(down, "down_proj")
    packed = next((t for t in _below(gated) if t.op == "bmm"), gated)
    entered = _product(packed, "gate_up_proj")
    if entered.op not in _SHAPED or entered.args[0] != given or len(entered.args) != 4 or entered.args[2] != _REST:
        raise OtherForm("its input is not one batch of tokens for each expert")
    reader = Reader(packed)
    reader.read(gated)
    return (*reader.arguments(module), "transposed=True", "every_expert=True")


def _product(term: Term, weight: str) -> Term:
    if term.op != "bmm" or len(term.args) != 2 or term.args[1] != Term("attribute", (), weight):
        raise OtherForm(f"no batched product with {weight}")
    return term.args[0]


def _below(term: Term) -> list[Term]:
    return [term, *(inner for argument in term.args for inner in _below(argument))]


def every_expert(info: ClassInfo, module: Module) -> EveryExpert | None:
    """Return the call of such experts in a block's `forward`; None if there is none, or it is given something else."""
    forward = info.methods.get("forward")
    if forward is None or why_not_read(info, forward, module):
        return None
    for call in calls_in(forward.body):
        experts = _class_of(called_attribute(call), info, module)
        if experts is None or len(call.args) != 1 or call.args[0].keyword is not None:
            continue
        try:
            every_form(experts, module)
            return _read(call, forward, info, module)
        except NotComputable:
            continue
    return None


def _class_of(attribute: str | None, info: ClassInfo, module: Module) -> ClassInfo | None:
    values = values_of(attribute, info, module) if attribute is not None else ()
    built = values[0] if len(values) == 1 else None
    return module.classes.get(module.qualified(built.func)) if isinstance(built, cst.Call) else None


def _read(call: cst.Call, forward: cst.FunctionDef, info: ClassInfo, module: Module) -> EveryExpert:
    """Execute what stands before the call, and read what it is given."""
    statements = list(forward.body.body)
    place = next((i for i, s in enumerate(statements) if any(node is call for node in walk(s))), 0)
    run = Ways(module, info, MAX_DEPTH)
    run.scope = effects_of(module).scope(forward, info)
    environment: Bindings = {name: Term("parameter", (), name) for name in parameters(forward)[1:]}
    if run.scope.unknown or run.block(statements[:place], environment) is not None:
        raise OtherForm(run.scope.unknown or "a return before the experts")
    scores = _scores(run.expression(call.args[0].value, environment))
    router = _class_of(scores.args[0].args[0].value, info, module)
    name = next((name for name, value in environment.items() if value == scores), None)
    if router is None or name is None:
        raise OtherForm("the weights are no local, or of no router of the file")
    return EveryExpert(call, name, f"self.{scores.args[0].args[0].value}.{_chosen(router, module)}")


def _scores(given: Term) -> Term:
    """Return the weights `[N, E]` of `tokens.repeat(E, 1) * weights.T.reshape(-1, 1)`, which a router returned."""
    for repeated, shares in (given.args, given.args[::-1]) if given.op == "mul" and len(given.args) == 2 else ():
        if shares.op not in _SHAPED or shares.args[1:] != (_REST, _ONE) or not shares.args[0].args:
            continue
        turned = shares.args[0]
        scores = turned.args[0]
        returned = scores.op == "index" and scores.args[1:] == (_ZERO,) and scores.args[0].op == "call"
        columns = Term("index", (Term("shape", (scores,)), _ONE))
        if turned != Term("transpose", (scores, _ZERO, _ONE)) or repeated.op != "repeat" or not returned:
            continue
        if repeated.args[1:] == (columns, _ONE) and scores.args[0].args[1:] == (repeated.args[0],):
            return scores
    raise OtherForm("the experts are given something else than each token times its weights")


def _chosen(router: ClassInfo, module: Module) -> str:
    """Return the attribute of a router that says how many of its weights are not zero.

    Raises:
        NotComputable: if the first that it returns is not the sigmoid of its largest logits and of -∞.
    """
    forward = router.methods.get("forward")
    if forward is None or (why := why_not_read(router, forward, module)):
        raise OtherForm("no router" if forward is None else why)
    names = parameters(forward)[1:]
    result = Ways(module, router, MAX_DEPTH).function(forward, {name: Term("parameter", (), name) for name in names})
    first = result.args[0] if result.op == "tuple" and result.args else result
    inner = _uncast(first)
    spread = _uncast(inner.args[0]) if inner.op in ("sigmoid", "nn.functional.sigmoid") else inner
    if spread.op != "scatter" or len(spread.args) != 4 or spread.args[1] not in (_ONE, _REST):
        raise OtherForm("the weights are not those of the largest logits")
    start, _, index, values = spread.args
    largest = index.args[0]
    same = (index, values) == (Term("index", (largest, _ONE)), Term("index", (largest, _ZERO)))
    if not same or largest.op != "topk" or start != Term("full_like", (largest.args[0], _NONE_OF_IT)):
        raise OtherForm("the weights are not those of the largest logits")
    if largest.args[2:] not in ((_ONE,), (_REST,), ()) or largest.args[1].op != "attribute":
        raise OtherForm("the weights are not those of the largest logits")
    return largest.args[1].value


def _uncast(term: Term) -> Term:
    while term.op == "cast" and (term.args[1] == FLOAT32 or term.args[1].op == "dtype"):
        term = term.args[0]
    return term
