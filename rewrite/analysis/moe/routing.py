"""What the router of a sparse mixture of experts computes: the arguments of the runtime's `RoutingRule`."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.blocks.term_source import source
from rewrite.analysis.blocks.terms import MAX_DEPTH, values_of, why_not_read
from rewrite.analysis.moe.ways import UNDEFINED, Ways, decided, taken
from rewrite.analysis.terms.computation import Bindings, NotComputable, Pattern, operation, subterms, unify
from rewrite.analysis.terms.spelling import BINARY, FLOAT32, NONE, Term, constant, dtype_of, make
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute
from rewrite.analysis.tree.nodes import parameters

_SIGNATURES = {
    "clamp": ("input", "min", "max"),
    "gather": ("input", "dim", "index"),
    "linear": ("input", "weight", "bias"),
    "masked_fill": ("input", "mask", "value"),
    "max": ("input", "dim"),
    "sigmoid": ("input",),
    "softmax": ("input", "dim"),
    "sum": ("input", "dim", "keepdim"),
    "topk": ("input", "k", "dim"),
}
_VIEWS = ("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten", "chunk", "split")
_LAST = (constant(-1), constant(1))
_IN_PLACE = {f"{operator.__name__}Assign": name for operator, name in BINARY.items()}

_LEFT_OUT = """
class Router:
    def forward(self, scores):
        in_groups = scores.view(-1, self.num_group, self.num_experts // self.num_group)
        group_scores = {}
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores).scatter(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(-1, self.num_group, self.num_experts // self.num_group)
            .reshape(-1, self.num_experts)
        )
        return ~score_mask.bool()
"""
_GROUPS = {
    2: Pattern(_LEFT_OUT.format("in_groups.topk(2, dim=-1)[0].sum(dim=-1)")),
    1: Pattern(_LEFT_OUT.format("in_groups.max(dim=-1).values")),
}
"""Which experts are in none of the chosen groups, by how many of its best scores make the score of a group."""
_DEFAULTS = {
    "weight": "", "top_k": "", "scores": '"softmax"', "normalize": "True", "eps": "0.0", "scaling": "1.0",
    "bias": "None", "correction_bias": "None", "num_group": "1", "logits_in_fp32": "False", "weights_in_fp32": "False",
    "topk_group": "1", "group_best": "2", "left_out": 'float("-inf")', "least_sum": "0.0",
}  # fmt: skip
"""The fields of a `RoutingRule`, and what they are where nothing is said."""

_OF_GROUPS = ("topk_group", "group_best", "left_out")


class OtherRouter(NotComputable):
    """The router computes something that `RoutingRule` has no words for."""


@dataclass
class _Routing(Ways):
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

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call; of a part that is a class of the file, what its `forward` computes."""
        part = self.part(self_attribute(node.func))
        if part is None or len(node.args) != 1 or node.args[0].keyword is not None or node.args[0].star:
            return super().call(node, environment)
        forward, given = part.methods["forward"], Term("given")
        inner = _Routing(self.module, part, self.depth - 1).function(forward, {parameters(forward)[1]: given})
        held = _held(inner, f"{self_attribute(node.func)}.")
        return _substituted(held, given, self.expression(node.args[0].value, environment))

    def part(self, attribute: str | None) -> ClassInfo | None:
        """Return the class of the file that an attribute is of, if its `forward` is what it shows."""
        if attribute is None or self.owner is None or self.depth == 0:
            return None
        values = values_of(attribute, self.owner, self.module)
        built = [self.module.classes.get(self.module.qualified(v.func)) for v in values if isinstance(v, cst.Call)]
        part = built[0] if len(values) == len(built) == 1 else None
        if part is None or "forward" not in part.methods or len(parameters(part.methods["forward"])) != 2:
            return None
        return None if why_not_read(part, part.methods["forward"], self.module) else part

    def alone(self, name: str, environment: Bindings) -> Term:
        """Return the value of a local that shares its memory with no other local and no parameter."""
        value = environment.get(name)
        if value is None:
            raise NotComputable("an operation in place")
        memories = _memories(value)
        others = {memory for other, term in environment.items() if other != name for memory in _memories(term)}
        if memories & others or any(memory.op in ("parameter", "attribute") for memory in memories):
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


def _memories(term: Term) -> set[Term]:
    """Return the terms whose memory `term` may share: that of a view is what it is a view of."""
    if term.op == "select":
        return _memories(term.args[1]) | _memories(term.args[2])
    if term.op in (*_VIEWS, "cast", "contiguous") or (term.op == "index" and term.args[0].op != "topk"):
        return {term} | _memories(term.args[0])
    return {term}


def _held(term: Term, prefix: str) -> Term:
    """Return a term over the attributes of a part as one over those of its owner."""
    if term.op == "attribute":
        return Term("attribute", (), prefix + term.value)
    return Term(term.op, tuple(_held(argument, prefix) for argument in term.args), term.value)


def routing_rule(info: ClassInfo, module: Module) -> tuple[str, ...]:
    """Return the arguments of the `RoutingRule` of what the router class `info` computes.

    Raises:
        NotComputable: if that is something else than a `RoutingRule` describes.
    """
    forward = info.methods["forward"]
    names = parameters(forward)[1:]
    if not names:
        raise OtherRouter("it takes no hidden states")
    given = {name: Term("parameter", (), name) for name in names}
    result = _Routing(module, info, MAX_DEPTH).function(forward, dict(given))
    if result.op != "tuple" or len(result.args) != 3:
        raise OtherRouter("it returns something else than logits, weights and index")
    fields = _fields(_Reader(given[names[0]], module), *result.args[1:])
    plain = [fields.pop("weight"), fields.pop("top_k")]
    return (*plain, *(f"{name}={text}" for name, text in fields.items() if text != _DEFAULTS[name]))


def _fields(reader: _Reader, weights: Term, index: Term) -> dict[str, str]:
    """Return the fields of the rule; where the configuration decides between two, fields that ask it."""
    try:
        return reader.rule(weights, index)
    except OtherRouter:
        both = Term("tuple", (weights, index))
        test = decided(both)
        if test is None:
            raise
    ways = [taken(both, test, way) for way in (True, False)]
    read = [_fields(reader, *way.args) for way in ways if UNDEFINED not in way.args and not _is_undefined(way)]
    if len(read) < 2:  # on the other way the original raises
        return read[0] if read else _refuse("a local that is not bound")
    yes, no = (_DEFAULTS | fields for fields in read)
    for one, other in ((yes, no), (no, yes)):
        if one["num_group"] == _DEFAULTS["num_group"]:  # of one group nothing is read
            one |= {name: other[name] for name in _OF_GROUPS}
    asked = source(test, reader.module)
    return {n: yes[n] if yes[n] == no[n] else f"{yes[n]} if {asked} else {no[n]}" for n in _DEFAULTS}


def _is_undefined(term: Term) -> bool:
    return any(inner == UNDEFINED for inner in subterms(term)) and decided(term) is None


def _refuse(what: str) -> dict[str, str]:
    raise OtherRouter(what)


@dataclass
class _Reader:
    """Reads weights and index of experts as a `RoutingRule`."""

    hidden: Term
    module: Module

    def rule(self, weights: Term, index: Term) -> dict[str, str]:
        """Return the fields of the rule that are not their defaults."""
        in_fp32, weights = self.rounding(weights)
        scaling: Term | None = None
        if weights.op == "mul" and len(weights.args) == 2:
            scaling, weights = self.scaling(weights)
        normalize, divisor, weights = self.normalised(weights)
        chosen, core = self.chosen(weights, index)
        scores, keys = core
        if chosen.op == "softmax of chosen":
            normalize = "True"
        correction, groups, scores = self.keys(keys, scores)
        kind, logits, scores_in_fp32 = self.scores(scores)
        projected, logits_in_fp32, bias = self.logits(logits)
        if not (scores_in_fp32 or logits_in_fp32):
            if chosen.op != "softmax of chosen" or scaling is not None:
                raise OtherRouter("scores in the dtype of the hidden states")
            in_fp32 = False
        fields = {"weight": source(projected, self.module), "top_k": source(chosen.args[0], self.module)}
        fields["scores"] = f'"{kind}"'
        fields |= {"normalize": normalize} | divisor
        named = {"scaling": scaling, "bias": bias, "correction_bias": correction}
        fields |= {name: self.written(term) for name, term in named.items() if term is not None}
        fields |= groups | {"logits_in_fp32": str(logits_in_fp32), "weights_in_fp32": str(in_fp32)}
        return fields

    def written(self, term: Term) -> str:
        """Return the source of an attribute, a parameter, or what has one dimension of either."""
        if term.op == "squeeze" and len(term.args) == 1:
            return f"{source(term.args[0], self.module)}.squeeze()"
        return source(term, self.module)

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

    def normalised(self, weights: Term) -> tuple[str, dict[str, str], Term]:
        """Return whether the weights are divided by their sum, what makes it larger, and the weights before."""
        if weights.op == "select":
            test, yes, no = weights.args
            normalize, divisor, inner = self.normalised(yes)
            if test.op != "attribute" or normalize != "True" or inner != no:
                raise OtherRouter("another condition than the one of the normalisation")
            return source(test, self.module), divisor, no
        if weights.op != "div":
            return "False", {}, weights
        value, total = weights.args
        larger: dict[str, str] = {}
        bounds = _call(total, "clamp") or {}
        if total.op == "add":
            numbers = [a for a in total.args if a.op == "constant"]
            sums = [a for a in total.args if a.op != "constant"]
            if len(numbers) != 1 or len(sums) != 1:
                raise OtherRouter("another divisor than the sum of the weights")
            larger, total = {"eps": numbers[0].value}, sums[0]
        elif bounds.get("max", NONE) == NONE and bounds.get("min", NONE).op in ("attribute", "constant"):
            larger, total = {"least_sum": source(bounds["min"], self.module)}, bounds["input"]
        found = _call(total, "sum")
        if found is None or found.get("input") != value or found.get("dim") not in _LAST:
            raise OtherRouter("another divisor than the sum of the weights")
        if found.get("keepdim") != Term("name", (), "True"):
            raise OtherRouter("another divisor than the sum of the weights")
        return "True", larger, value

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
        if x.op == "cast" and x.args[1] == Term("dtype", (weight,)):
            x = x.args[0]
        if x.op in ("view", "reshape"):
            x = x.args[0] if x.args[1:2] == (constant(-1),) and len(x.args) == 3 else x
        if x != self.hidden or weight.op != "attribute" or (bias is not None and bias.op != "attribute"):
            raise OtherRouter("logits that are no product of the hidden states with a weight of the router")
        return weight, all(casts), bias

    def keys(self, keys: Term, scores: Term) -> tuple[Term | None, dict[str, str], Term]:
        """Return what is added to the scores for the choice, how groups are chosen, and the scores.

        Where the weights are what was chosen by, those of experts that no chosen group has are not among them: the
        runtime leaves a choice to the module where the groups have too few.
        """
        groups: dict[str, str] = {}
        masked = _call(keys, "masked_fill")
        if masked is not None:
            scores = masked["input"] if scores == keys else scores
            keys, groups = masked["input"], self.groups(masked)
        if keys == scores:
            return None, groups, scores
        if keys.op == "add" and scores in keys.args and len(keys.args) == 2:
            other = keys.args[0] if keys.args[1] == scores else keys.args[1]
            inner = other.args[0] if other.op == "squeeze" and len(other.args) == 1 else other
            if inner.op == "attribute" or (inner.op == "parameter" and inner != self.hidden):
                return other, groups, scores
        raise OtherRouter("experts are chosen by something else than their scores")

    def groups(self, masked: dict[str, Term]) -> dict[str, str]:
        """Return how groups are chosen, from the arguments of a `masked_fill`."""
        mask = _viewed(_substituted(masked["mask"], masked["input"], Term("parameter", (), "scores")))
        for best, pattern in _GROUPS.items():
            bound = next(unify(_viewed(pattern.term), mask, {}), None)
            if bound is not None and masked["value"] in _FILLED:
                named = {name: source(bound[name], self.module) for name in ("num_group", "topk_group")}
                return named | {"group_best": str(best), "left_out": _FILLED[masked["value"]]}
        raise OtherRouter("experts are masked in another way than by groups")


_INFINITY = 'float("-inf")'
_FILLED = {
    constant(0): "0.0",
    make("float", Term("constant", (), '"-inf"')): _INFINITY,
    make("neg", make("float", Term("constant", (), '"inf"'))): _INFINITY,
    make("neg", Term("name", (), "torch.inf")): _INFINITY,
}
"""What experts that no chosen group has are chosen by."""


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
