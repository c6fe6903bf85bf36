"""What the router of a sparse mixture of experts computes: the arguments of the runtime's `RoutingRule`."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.step.terms import MAX_DEPTH, Step, source
from rewrite.analysis.syntax.module import ClassInfo, Module
from rewrite.analysis.syntax.nodes import parameters
from rewrite.analysis.terms.computation import Bindings, NotComputable, Pattern, operation, unify
from rewrite.analysis.terms.spelling import BINARY, FLOAT32, Term, constant, dtype_of, make

_SIGNATURES = {
    "gather": ("input", "dim", "index"),
    "linear": ("input", "weight", "bias"),
    "masked_fill": ("input", "mask", "value"),
    "sigmoid": ("input",),
    "softmax": ("input", "dim"),
    "sum": ("input", "dim", "keepdim"),
    "topk": ("input", "k", "dim"),
}
_VIEWS = ("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "chunk", "split")
_LAST = (constant(-1), constant(1))
_IN_PLACE = {f"{operator.__name__}Assign": name for operator, name in BINARY.items()}

_GROUPS = Pattern(
    """
class Router:
    def forward(self, scores):
        in_groups = scores.view(-1, self.num_group, self.num_experts // self.num_group)
        group_scores = in_groups.topk(2, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(-1, self.num_group, self.num_experts // self.num_group)
            .reshape(-1, self.num_experts)
        )
        return ~score_mask.bool()
"""
)
"""Which experts are in none of the chosen groups: none at all where there is one group."""


class OtherRouter(NotComputable):
    """The router computes something that `RoutingRule` has no words for."""


@dataclass
class _Routing(Step):
    """A symbolic execution in which a local that nothing else means may be changed in place."""

    def small(self, small: cst.BaseSmallStatement, environment: Bindings) -> None:
        """Execute one simple statement."""
        if isinstance(small, cst.AugAssign) and isinstance(small.target, cst.Name):
            operator = _IN_PLACE.get(type(small.operator).__name__.replace("Assign", "") + "Assign")
            if operator is None:
                raise NotComputable("an operation in place")
            value = self.alone(small.target.value, environment)
            environment[small.target.value] = make(operator, value, self.expression(small.value, environment))
        elif (changed := _changed_in_place(small)) is not None:
            name, function, call = changed
            plain = [self.expression(a.value, environment) for a in call.args if a.keyword is None]
            keywords = {a.keyword.value: self.expression(a.value, environment) for a in call.args if a.keyword}
            environment[name] = operation(function, [self.alone(name, environment), *plain], keywords)
        else:
            super().small(small, environment)

    def alone(self, name: str, environment: Bindings) -> Term:
        """Return the value of a local that shares its memory with no other local and no parameter."""
        value = environment.get(name)
        if value is None:
            raise NotComputable("an operation in place")
        memory = _memory(value)
        others = (_memory(term) for other, term in environment.items() if other != name)
        if memory.op in ("parameter", "attribute") or memory in others:
            raise NotComputable("an operation in place")
        return value


def _changed_in_place(small: cst.BaseSmallStatement) -> tuple[str, str, cst.Call] | None:
    """Return `x`, `op` and the call of the statement `x.op_(...)`."""
    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        return None
    function = small.value.func
    if not isinstance(function, cst.Attribute) or not isinstance(function.value, cst.Name):
        return None
    name = function.attr.value
    return (function.value.value, name[:-1], small.value) if name.endswith("_") and name[:-1] else None


def _memory(term: Term) -> Term:
    """Return the term whose memory `term` may share: that of a view is what it is a view of."""
    while term.op in _VIEWS or (term.op == "index" and term.args[0].op != "topk"):
        term = term.args[0]
    return term


def routing_rule(info: ClassInfo, module: Module) -> tuple[str, ...]:
    """Return the arguments of the `RoutingRule` of what the router class `info` computes.

    Raises:
        NotComputable: if that is something else than a `RoutingRule` describes.
    """
    forward = info.methods["forward"]
    names = parameters(forward)[1:]
    if len(names) != 1:
        raise OtherRouter("it takes more than the hidden states")
    hidden = Term("parameter", (), names[0])
    result = _Routing(module, info, MAX_DEPTH).function(forward, {names[0]: hidden})
    if result.op != "tuple" or len(result.args) != 3:
        raise OtherRouter("it returns something else than logits, weights and index")
    return _Reader(hidden, module).rule(*result.args[1:])


@dataclass
class _Reader:
    """Reads weights and index of experts as a `RoutingRule`."""

    hidden: Term
    module: Module

    def rule(self, weights: Term, index: Term) -> tuple[str, ...]:
        """Return the arguments of the rule."""
        in_fp32, weights = self.rounding(weights)
        options: list[str] = []
        scaling: Term | None = None
        if weights.op == "mul" and len(weights.args) == 2:
            scaling, weights = self.scaling(weights)
        normalize, eps, weights = self.normalised(weights)
        chosen, core = self.chosen(weights, index)
        scores, keys = core
        if chosen.op == "softmax of chosen":
            normalize = "True"
        kind, logits, scores_in_fp32 = self.scores(scores)
        projected, logits_in_fp32, bias = self.logits(logits)
        correction, groups = self.keys(keys, scores)
        if kind == "softmax" and correction is not None:
            raise OtherRouter("a correction of a softmax")
        if not (scores_in_fp32 or logits_in_fp32):
            if chosen.op != "softmax of chosen" or scaling is not None:
                raise OtherRouter("scores in the dtype of the hidden states")
            in_fp32 = False
        options += [] if kind == "softmax" else [f'scores="{kind}"']
        options += [] if normalize == "True" else [f"normalize={normalize}"]
        options += [] if eps is None else [f"eps={eps}"]
        named = {"scaling": scaling, "bias": bias, "correction_bias": correction, "num_group": groups}
        options += [f"{name}={source(term, self.module)}" for name, term in named.items() if term is not None]
        options += ["logits_in_fp32=True"] if logits_in_fp32 else []
        options += ["weights_in_fp32=True"] if in_fp32 else []
        top_k = source(chosen.args[0], self.module)
        return (source(projected, self.module), top_k, *options)

    def rounding(self, weights: Term) -> tuple[bool, Term]:
        """Return whether the weights stay in fp32, and the weights before their last rounding."""
        if weights.op != "cast":
            return True, weights
        value, dtype = weights.args
        if dtype.op != "dtype":
            raise OtherRouter(f"weights in {dtype}")
        like = dtype.args[0]
        return dtype_of(like) == FLOAT32 or _dtype_argument(like) == FLOAT32, value

    def scaling(self, weights: Term) -> tuple[Term, Term]:
        for factor, rest in (weights.args, weights.args[::-1]):
            if factor.op in ("attribute", "constant"):
                return factor, rest
        raise OtherRouter("the weights are multiplied by a tensor")

    def normalised(self, weights: Term) -> tuple[str, str | None, Term]:
        """Return whether the weights are divided by their sum, what is added to it, and the weights before."""
        if weights.op == "select":
            test, yes, no = weights.args
            normalize, eps, inner = self.normalised(yes)
            if test.op != "attribute" or normalize != "True" or inner != no:
                raise OtherRouter("another condition than the one of the normalisation")
            return source(test, self.module), eps, no
        if weights.op != "div":
            return "False", None, weights
        value, total = weights.args
        eps = None
        if total.op == "add":
            numbers = [a for a in total.args if a.op == "constant"]
            sums = [a for a in total.args if a.op != "constant"]
            if len(numbers) != 1 or len(sums) != 1:
                raise OtherRouter("another divisor than the sum of the weights")
            eps, total = numbers[0].value, sums[0]
        found = _call(total, "sum")
        if found is None or found.get("input") != value or found.get("dim") not in _LAST:
            raise OtherRouter("another divisor than the sum of the weights")
        if found.get("keepdim") != Term("name", (), "True"):
            raise OtherRouter("another divisor than the sum of the weights")
        return "True", eps, value

    def chosen(self, weights: Term, index: Term) -> tuple[Term, tuple[Term, Term]]:
        """Return how the scores were chosen, with K, then the scores and what they were chosen by."""
        topk = index.args[0] if index.args else index
        if index not in (Term("index", (topk, constant(1))), Term(".indices", (topk,))):
            raise OtherRouter("the index is not that of a topk")
        found = _call(topk, "topk")
        if found is None or found.get("dim", constant(-1)) not in _LAST or "largest" in found:
            raise OtherRouter("the index is not that of a topk over the experts")
        keys, top_k = found["input"], found["k"]
        values = Term("index", (topk, constant(0)))
        if weights == values:
            return Term("chosen", (top_k,)), (keys, keys)
        gathered = _call(weights, "gather")
        if gathered is not None and gathered.get("dim") in _LAST and gathered.get("index") == index:
            return Term("chosen", (top_k,)), (gathered["input"], keys)
        softmax = _call(weights, "softmax")
        if softmax is not None and softmax.get("dim") in _LAST and softmax["input"] == values:
            scores = Term(weights.op, (keys, *weights.args[1:]))
            return Term("softmax of chosen", (top_k,)), (scores, scores)
        raise OtherRouter("the weights are not the scores of the chosen experts")

    def scores(self, term: Term) -> tuple[str, Term, bool]:
        """Return the kind of scores, their logits, and whether they are in fp32 whatever the logits are in."""
        softmax = _call(term, "softmax")
        if softmax is not None and softmax.get("dim") in _LAST:
            logits = softmax["input"]
            in_fp32 = dtype_of(logits) == FLOAT32 or _dtype_argument(term) == FLOAT32
            return "softmax", logits, in_fp32
        sigmoid = _call(term, "sigmoid")
        if sigmoid is not None:
            return "sigmoid", sigmoid["input"], dtype_of(sigmoid["input"]) == FLOAT32
        raise OtherRouter("scores that are no softmax and no sigmoid")

    def logits(self, term: Term) -> tuple[Term, bool, Term | None]:
        """Return the weight, whether the product is in fp32, and the bias."""
        found = _call(term.args[0] if term.op == "cast" else term, "linear")
        if found is None:
            raise OtherRouter("logits that are no product with a weight")
        x, weight, bias = found["input"], found["weight"], found.get("bias")
        casts = [t.op == "cast" and t.args[1] == FLOAT32 for t in (x, weight) + (() if bias is None else (bias,))]
        if any(casts) and not all(casts):
            raise OtherRouter("a product of two dtypes")
        if all(casts):
            x, weight, bias = x.args[0], weight.args[0], None if bias is None else bias.args[0]
        if x.op in ("view", "reshape"):
            x = x.args[0] if x.args[1:2] == (constant(-1),) and len(x.args) == 3 else x
        if x != self.hidden or weight.op != "attribute" or (bias is not None and bias.op != "attribute"):
            raise OtherRouter("logits that are no product of the hidden states with a weight of the router")
        return weight, all(casts), bias

    def keys(self, keys: Term, scores: Term) -> tuple[Term | None, Term | None]:
        """Return what is added to the scores for the choice, and the number of groups."""
        groups: Term | None = None
        masked = _call(keys, "masked_fill")
        if masked is not None:
            keys = masked["input"]
            mask = _viewed(_substituted(masked["mask"], keys, Term("parameter", (), "scores")))
            bound = next(unify(_viewed(_GROUPS.term), mask, {}), None)
            if bound is None:
                raise OtherRouter("experts are masked in another way than by groups")
            groups = bound["num_group"]
        if keys == scores:
            return None, groups
        if keys.op == "add" and scores in keys.args and len(keys.args) == 2:
            other = keys.args[0] if keys.args[1] == scores else keys.args[1]
            if other.op == "attribute":
                return other, groups
        raise OtherRouter("experts are chosen by something else than their scores")


def _call(term: Term, name: str) -> dict[str, Term] | None:
    """Return the arguments of a call of torch's function or method `name`, by name."""
    if term.op.removeprefix("nn.functional.") != name:
        return None
    plain = [argument for argument in term.args if argument.op != "keyword"]
    given = dict(zip(_SIGNATURES[name], plain, strict=False))
    return given | {argument.value: argument.args[0] for argument in term.args if argument.op == "keyword"}


def _dtype_argument(term: Term) -> Term | None:
    dtype = next((a.args[0] for a in term.args if a.op == "keyword" and a.value == "dtype"), None)
    return FLOAT32 if dtype == Term("name", (), "torch.float") else dtype


def _substituted(term: Term, old: Term, new: Term) -> Term:
    if term == old:
        return new
    return make(term.op, *(_substituted(a, old, new) for a in term.args)) if term.args and not term.value else term


def _viewed(term: Term) -> Term:
    """Return a term with one way to give a tensor another shape: what it holds is the same by each."""
    if term.op == "contiguous" and len(term.args) == 1:
        return _viewed(term.args[0])
    op = "view" if term.op == "reshape" else term.op
    return Term(op, tuple(map(_viewed, term.args)), term.value)
