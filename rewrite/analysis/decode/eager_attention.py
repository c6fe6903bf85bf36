"""What a file computes where its models use `eager`: whether that is what the attention of a decode step computes.

Which attention function runs is chosen by name when the model is called. Those of transformers compute what
`decode_attention` does, and one from elsewhere may compute anything; the one that the file hands over for `eager` is
its own, and may compute anything as well. It is read with what the attention class passes to it, from its result
inwards:

    scores = q kᵀ * scaling, then softcap * tanh(scores / softcap), then + mask
    weights = softmax over the scores, and over the sink logit of the head where there is one
    result = weights v   `[B, S, H, D]`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.terms import MAX_DEPTH, NoStep, Step
from rewrite.analysis.effects import effects_of
from rewrite.analysis.patterns.expansion import HEADS_FIRST, NotAnExpansion, expansion
from rewrite.analysis.terms.computation import GATHERED, Bindings, NotComputable, subterms
from rewrite.analysis.terms.spelling import NONE, Term, constant, make
from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.nodes import parameters

QUERY, KEY, VALUE, MASK = (Term("parameter", (), name) for name in ("query", "key", "value", "mask"))
SCALING = Term("parameter", (), "scaling")
_READ = ("transformers", "torch")
"""Packages whose attention functions compute what is said above."""
_SIGNATURE = ("module", "query", "key", "value", "attention_mask")
_CHOOSING = ("native_gqa", "and", "or")
_UNCHANGED = ("contiguous", "clone", "cast", "to", "nn.functional.dropout", "dropout")
"""What the first argument comes out of as it was, but for its dtype, in evaluation."""
_SINKS = ("reshape", "view", "expand", "unsqueeze", "repeat", "cast", "to")
_AUTOCAST = m.With(
    items=[m.WithItem(item=m.Call(args=[m.ZeroOrMore(), m.Arg(keyword=m.Name("enabled"), value=m.Name("False"))]))]
)
_LAST = (constant(-1), constant(3))
_BOTH_LAST = ((constant(2), constant(3)), (constant(-1), constant(-2)), (constant(-2), constant(-1)))


def check_eager_attention(chosen: Term, given: Mapping[str, Term], module: Module) -> None:
    """Refuse an attention that may be computed by a function of the file in another way than a decode step does.

    Args:
        chosen: the attention function that is called.
        given: its arguments, by the names that transformers' attention functions have for them.
        module: the file.

    Raises:
        NoStep: saying what the function computes otherwise.
    """
    for name in sorted(_names(chosen)):
        function = module.functions.get(name.rsplit(".", 1)[-1])
        if function is None:
            if name.split(".")[0] not in _READ:
                raise NoStep("other_attention", f"{name} is not of this file")
            continue
        try:
            term = _Eager(module, None, MAX_DEPTH).function(function, _bound(function, given))
            _Reader(given).result(term.args[0] if term.op == "tuple" else term)
        except NotComputable as error:
            raise NoStep("other_attention", f"{function.name.value}: {error.what}"[:90]) from error


def reads_as_attention(term: Term) -> bool:
    """Whether a term over `QUERY`, `KEY`, `VALUE`, `MASK`, `SCALING` is what is said above, without cap and sinks."""
    try:
        _Reader({}).result(term)
    except NotComputable:
        return False
    return True


def _names(chosen: Term) -> set[str]:
    """Return the names of functions that may be what is called."""
    if chosen.op == "name":
        return {chosen.value} - {NONE.value}
    if chosen.op == "select":
        return _names(chosen.args[1]) | _names(chosen.args[2])
    if chosen.op.endswith(".get_interface") or chosen.op in _CHOOSING:
        return set().union(*map(_names, chosen.args))
    return set()


def _bound(function: cst.FunctionDef, given: Mapping[str, Term]) -> Bindings:
    """Return what the parameters are: names of their own for the tensors, else what is passed, or the default."""
    bound = dict(zip(parameters(function), (Term("self"), QUERY, KEY, VALUE, MASK), strict=False))
    for param in (*function.params.params, *function.params.kwonly_params):
        name = param.name.value
        if name in bound:
            continue
        if name == "scaling" and name in given:
            bound[name] = SCALING
        elif name in given:
            bound[name] = given[name]
        elif param.default is not None:
            bound[name] = NONE if m.matches(param.default, m.Name("None")) else Term("default", (), name)
        else:
            raise NotComputable(f"its `{name}` is not passed")
    starred = function.params.star_kwarg
    if isinstance(starred, cst.Param):
        rest = sorted({*given} - {*bound, *_SIGNATURE})
        bound[starred.name.value] = Term(GATHERED, tuple(Term("keyword", (given[name],), name) for name in rest))
    return bound


@dataclass
class _Eager(Step):
    """One execution of an attention function, whose first parameter is the attention module."""

    def block(self, statements: Sequence[cst.CSTNode], environment: Bindings) -> Term | None:
        """Execute statements; a block that turns autocast off is what stands in it."""
        flat: list[cst.CSTNode] = []
        for statement in statements:
            off = m.matches(statement, _AUTOCAST) and self._is_autocast(cst.ensure_type(statement, cst.With))
            flat += cst.ensure_type(statement, cst.With).body.body if off else [statement]
        return super().block(flat, environment)

    def _is_autocast(self, statement: cst.With) -> bool:
        call = cst.ensure_type(statement.items[0].item, cst.Call)
        return effects_of(self.module).names.resolved(call.func).rsplit(".", 1)[-1] in ("autocast", "maybe_autocast")

    def attribute(self, node: cst.Attribute, environment: Bindings) -> Term:
        """Return the term of `a.b`; of the attention module, that of its own `self.b`."""
        term = super().attribute(node, environment)
        own = term.op.startswith(".") and term.args == (Term("self"),)
        return Term("attribute", (), term.op[1:]) if own else term


@dataclass(frozen=True)
class _Reader:
    """Reads the term of an attention function; every method raises NotComputable where it finds something else."""

    given: Mapping[str, Term]

    def result(self, term: Term) -> None:
        """Read `[B, S, H, D]`: the heads behind the tokens."""
        term = _inside(term)
        if term.op != "transpose" or term.args[1:] != (constant(1), constant(2)):
            raise NotComputable(f"its result is no transpose of heads and tokens, but `{term.op}`")
        heads, gated = _inside(term.args[0]), False
        for product, factor in (heads.args, heads.args[::-1]) if heads.op == "mul" else ():
            if self._is_sink_gate(factor, product):
                heads, gated = _inside(product), True
        weights, values = _product(heads, "what it returns")
        _check_shared(values, VALUE)
        self.weights(_inside(weights), gated)

    def weights(self, term: Term, gated: bool) -> None:
        """Read the softmax, of the scores alone or of scores and sinks, unless a gate stands for those."""
        without = term.op == "index" and term.args[-1] == Term("slice", (NONE, constant(-1), NONE))
        if without:
            term = _inside(term.args[0])
        if term.op != "softmax" or len(term.args) < 2 or term.args[1] not in _LAST:
            raise NotComputable(f"its weights are no softmax over the keys, but `{term.op}`")
        if without != (scores := _without_maximum(term.args[0])).op.startswith("cat"):
            raise NotComputable("a sink that is not taken out again, or something else that is")
        if (without or gated) != (self.given.get("s_aux", NONE) != NONE) or (without and gated):
            raise NotComputable("sinks are passed and not used, or used twice")
        if without:
            parts = scores.args[0].args if scores.args[0].op == "tuple" else ()
            if len(parts) != 2 or scores.args[1:] not in ((constant(-1),), (constant(3),)):
                raise NotComputable("scores are joined with something else than sinks")
            self._check_sinks(parts[1])
            scores = parts[0]
        self.scores(_inside(scores))

    def scores(self, term: Term) -> None:
        """Read the scores with the mask, where there is one."""
        if term.op == "select" and term.args[0] == Term("is", (MASK, NONE)):
            alone, term = term.args[1], term.args[2]
            if _unmasked(term) != _inside(alone):
                raise NotComputable("its scores are others with a mask")
        self.capped(_unmasked(term))

    def capped(self, term: Term) -> None:
        """Read the scores before the mask: soft-capped by what the class passes, or as they are."""
        softcap = self.given.get("softcap", NONE)
        if term.op == "select" and term.args[0] == Term("is", (softcap, NONE)):
            alone, term = _inside(term.args[1]), _inside(term.args[2])
            uncapped = _uncapped(term, softcap)
            if uncapped != alone:
                raise NotComputable("its scores are others with a soft cap")
            term = alone
        elif softcap != NONE:
            term = _uncapped(term, softcap)
        self.scaled(term)

    def scaled(self, term: Term) -> None:
        """Read `q kᵀ * scaling`."""
        for product, scale in (term.args, term.args[::-1]) if term.op == "mul" else ():
            if _is_scaling(scale):
                query, key = _product(_inside(product), "its scores")
                key = _inside(key)
                if key.op != "transpose" or key.args[1:] not in _BOTH_LAST:
                    raise NotComputable("keys are not transposed")
                if _inside(query) != QUERY:
                    raise NotComputable("queries change before the product")
                return _check_shared(key.args[0], KEY)
        raise NotComputable(f"its scores are not `q kᵀ * scaling`, but `{term.op}`")

    def _check_sinks(self, term: Term) -> None:
        while term.op in _SINKS:
            term = term.args[0]
        if term != self.given.get("s_aux"):
            raise NotComputable("its sinks are not what the class passes as `s_aux`")

    def _is_sink_gate(self, factor: Term, heads: Term) -> bool:
        """Whether a factor is sigmoid(logsumexp(scores) - sink): with it, `heads` have the sink in their softmax."""
        while factor.op in (*_UNCHANGED, "unsqueeze"):
            factor = factor.args[0]
        gate = _inside(factor.args[0]) if factor.op == "sigmoid" else factor
        if gate.op != "add" or gate.args[0].op != "logsumexp" or gate.args[1].op != "neg":
            return False
        self._check_sinks(gate.args[1].args[0])
        (summed, *over), softmaxes = gate.args[0].args, {t.args[0] for t in subterms(heads) if t.op == "softmax"}
        return softmaxes == {summed} and over in ([constant(-1)], [Term("keyword", (constant(-1),), "dim")])


def _inside(term: Term) -> Term:
    """Return what a term is made of where it only changes dtype or memory."""
    while term.op in _UNCHANGED:
        term = term.args[0]
    return term


def _product(term: Term, what: str) -> tuple[Term, Term]:
    if term.op not in ("matmul", "grouped_matmul", "bmm"):
        raise NotComputable(f"{what} is no product, but `{term.op}`")
    return term.args[0], term.args[1]


def _check_shared(term: Term, tensor: Term) -> None:
    """Check that `term` is a tensor, or its heads repeated for those that share them."""
    term = _inside(term)
    if term == tensor:
        return
    try:
        found = expansion(term)
    except NotAnExpansion as error:
        raise NotComputable(f"its {tensor.value}s are changed: {error.detail}") from error
    if found.heads != HEADS_FIRST:
        raise NotComputable(f"its {tensor.value}s are changed: dimension {found.heads} is repeated")
    if found.tensor != tensor:
        raise NotComputable(f"its {tensor.value}s are something else")


def _without_maximum(scores: Term) -> Term:
    """Return what a softmax is of, before its largest value was taken away, which a softmax does not see."""
    scores = _inside(scores)
    if scores.op == "add" and scores.args[1].op == "neg":
        largest = scores.args[1].args[0]
        while largest.op in (".values", "index", "max", "amax"):
            if largest.op in ("max", "amax") and largest.args[0] == scores.args[0]:
                return scores.args[0]
            largest = largest.args[0]
    return scores


def _unmasked(term: Term) -> Term:
    """Return what the mask is added to."""
    term = _inside(term)
    for mask, scores in (term.args, term.args[::-1]) if term.op == "add" else ():
        while mask.op in (*_UNCHANGED, "index"):
            mask = mask.args[0]
        if mask == MASK:
            return _inside(scores)
    return term


def _uncapped(term: Term, softcap: Term) -> Term:
    """Return x of `softcap * tanh(x / softcap)`."""
    for factor, bent in (term.args, term.args[::-1]) if term.op == "mul" else ():
        if factor == softcap and _inside(bent).op == "tanh":
            quotient = _inside(_inside(bent).args[0])
            if quotient.op == "div" and quotient.args[1] == softcap:
                return _inside(quotient.args[0])
    raise NotComputable("its soft cap is another one")


def _is_scaling(term: Term) -> bool:
    if term.op == "select" and term.args[0] == make("is", SCALING, NONE):
        term = term.args[2]
    return term == SCALING
