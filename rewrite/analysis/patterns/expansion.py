"""Keys and values that are repeated for the query heads that share them: who repeats them, and how."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.effects import Scope, effects_of, why_not_plain
from rewrite.analysis.patterns.axes import Axes, NotRegrouped, axes_of
from rewrite.analysis.terms.computation import MAX_DEPTH, Bindings, NotComputable, Run, body, subterms
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, parameters

LENGTHENING = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"})
_JOINING = frozenset({"cat", "concat", "concatenate", "stack"})
_REGROUPING = frozenset({"reshape", "view", "flatten", "unflatten", "contiguous", "clone"})
HEADS_FIRST, HEADS_THIRD = 1, 2
"""Where the heads of `[B, H, S, D]` and of `[B, S, H, D]` are."""
_AXES: Axes = tuple((Term("size", (), name),) for name in ("B", "H", "S", "D"))


class NotAnExpansion(Exception):
    """What makes a tensor longer is not the repetition of heads, or was not understood."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Expansion:
    """`tensor` `[B, H, S, D]` becomes `[B, H times, S, D]`, every head as often as `times` says, in a row; or
    `[B, S, H, D]` becomes `[B, S, H times, D]`.
    """

    tensor: Term
    times: Term
    heads: int
    """The dimension of the heads."""


def lengthens(node: cst.CSTNode) -> bool:
    """Whether code below `node` makes a tensor a number of times as long: the broad notion, by what it calls."""
    called = {_called(call) for call in calls_in(node)}
    if called & {"repeat", "repeat_interleave", "tile"}:
        return True
    if called & LENGTHENING and called & _REGROUPING:
        return True
    lists = any(isinstance(n, cst.BinaryOperation) and isinstance(n.left, (cst.List, cst.Tuple)) for n in walk(node))
    return bool(called & _JOINING) and lists


def is_lengthening(call: cst.Call) -> bool:
    """Whether a call itself is the last step of making a tensor longer, and not something that reads the result."""
    return _called(call) in LENGTHENING | _JOINING | _REGROUPING and lengthens(call)


def is_expanding(function: cst.FunctionDef, owner: ClassInfo | None = None) -> bool:
    """Whether a function looks like one that repeats a tensor: it takes one, perhaps a number, and lengthens it."""
    count = len(parameters(function)) - (owner is not None and "self" in parameters(function))
    return 1 <= count <= 3 and lengthens(function.body)


def repetition(function: cst.FunctionDef, module: Module, owner: ClassInfo | None = None) -> Expansion | None:
    """Return what a function repeats, None if that is not the heads of a tensor."""
    try:
        return expansion(body(function, module, owner))
    except (NotAnExpansion, NotComputable):
        return None


def expansion(term: Term) -> Expansion:
    """Read a term as the repetition of the heads of a tensor.

    Raises:
        NotAnExpansion: if it is another computation.
    """
    found = "no dimension becomes longer"
    for tensor in dict.fromkeys(inner for inner in subterms(term) if inner.op in ("parameter", "attribute")):
        try:
            axes = axes_of(term, tensor, _AXES)
        except NotRegrouped as error:
            found = error.what if error.what != "`parameter`" else found
            continue
        if len(axes) == len(_AXES) and axes != _AXES:
            return _read(tensor, axes)
    raise NotAnExpansion("other_expansion", found)


def _read(tensor: Term, axes: Axes) -> Expansion:
    place = next(place for place, (axis, own) in enumerate(zip(axes, _AXES, strict=True)) if axis != own)
    if axes[:place] + axes[place + 1 :] != _AXES[:place] + _AXES[place + 1 :]:
        raise NotAnExpansion("other_expansion", "several dimensions change")
    if place not in (HEADS_FIRST, HEADS_THIRD):
        raise NotAnExpansion("other_expansion", f"dimension {place} is repeated")
    if len(axes[place]) != 2 or axes[place][0] != _AXES[place][0]:
        raise NotAnExpansion("other_expansion", "the copies of a head do not lie in a row")
    return Expansion(tensor, axes[place][1], place)


def computed(call: cst.Call, scope: Scope) -> tuple[Expansion, dict[str, cst.BaseExpression]]:
    """Return what a call of a function of the file repeats, and the argument of each of its parameters.

    Raises:
        NotAnExpansion: if it is not the repetition of heads, or the function may be another one.
    """
    function, owner = called_function(call, scope)
    if function is None:
        raise NotAnExpansion("other_expansion", f"what `{scope.module.code(call.func)}` is")
    if why := why_not_plain(effects_of(scope.module), function, owner):
        raise NotAnExpansion("rebound", why)
    try:
        return expansion(body(function, scope.module, owner)), _arguments(call, function)
    except NotComputable as error:
        raise NotAnExpansion("other_expansion", error.what) from error


def called_function(call: cst.Call, scope: Scope) -> tuple[cst.FunctionDef | None, ClassInfo | None]:
    """Return the function of the file, or the method of the class, that a call runs as far as its name tells."""
    if isinstance(call.func, cst.Name) and call.func.value not in scope.locals:
        return scope.module.functions.get(call.func.value), None
    method = self_attribute(call.func)
    if method is not None and scope.owner is not None:
        return scope.module.method(scope.owner, method), scope.owner
    return None, None


def _arguments(call: cst.Call, function: cst.FunctionDef) -> dict[str, cst.BaseExpression]:
    params = [*function.params.posonly_params, *function.params.params]
    names = [param.name.value for param in params if param.name.value != "self"]
    given = {param.name.value: param.default for param in params if param.default is not None}
    if any(argument.star for argument in call.args):
        raise NotAnExpansion("other_expansion", "an argument with a star")
    for place, argument in enumerate(call.args):
        if argument.keyword is None and place >= len(names):
            raise NotAnExpansion("other_expansion", "more arguments than parameters")
        given[names[place] if argument.keyword is None else argument.keyword.value] = argument.value
    return given


def inline(node: cst.BaseExpression, scope: Scope) -> Expansion:
    """Return what an expression repeats, over the locals that it reads.

    Raises:
        NotAnExpansion: if it is not the repetition of heads.
    """
    environment: Bindings = {name: Term("parameter", (), name) for name in scope.locals if name != "self"}
    try:
        return expansion(Run(scope.module, scope.owner, MAX_DEPTH).expression(node, environment))
    except NotComputable as error:
        raise NotAnExpansion("other_expansion", error.what) from error


def _called(call: cst.Call) -> str:
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""
