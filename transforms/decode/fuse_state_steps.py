"""A token of a convolution, of the delta rule or of a state space becomes one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite import operators
from rewrite.analysis.terms.computation import NotComputable, unify
from rewrite.analysis.terms.recurrence import outcome
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import Module, walk
from rewrite.analysis.tree.nodes import calls_in, parameters
from rewrite.analysis.tree.replacement import name_is_free
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

ROOM, STEPS = "recurrent", "_step"
"""Where the operators are, and what their names end with."""
RESULT = "stepped"


class FuseStateSteps(Transform):
    """Mixers with a state of fixed size step in one kernel.

    What it does:
        A function of the file that computes what an operator of `runtime/recurrent` does asks that first, and returns
        its result if there is one: a causal convolution that keeps its window, the gated delta rule, the step of a
        selective state space. The code below stays, for several tokens and for training.

    Why:
        For a single token they are some dozen kernels a layer on a few hundred numbers each.

    What it needs:
        The function computes exactly what the operator's reference does, and writes the same argument.

    Numerics:
        Reordered: one token is computed in fp32 and rounded once; several tokens as written.

    Known limits:
        Recurrences of other forms stay as they are.
    """

    name = "fuse_state_steps"
    summary = "One token of a convolution, delta rule or state space is one kernel."
    numerics = Numerics.REORDERED
    stage = Stage.STEP
    reasons: ClassVar[Mapping[str, str]] = {
        "other_form": "the function computes something else than the operators for states do",
    }

    def candidates(self, module: Module) -> Iterator[Candidate]:
        """Yield every function that copies into an argument, or carries a decaying value through a loop."""
        for name, function in module.functions.items():
            if not _calls_operator(function) and (_writes_argument(function) or _carries(function)):
                yield Candidate(function, name, "state")

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Let the function ask the operator first."""
        function = cst.ensure_type(candidate.node, cst.FunctionDef)
        try:
            found = _operator_for(outcome(function, module))
        except NotComputable as error:
            return Skip("other_form", error.what)
        if found is None:
            return Skip("other_form")
        operator, arguments = found
        if not name_is_free(RESULT, module, function):
            return Skip("name_taken", RESULT)
        code = f"{RESULT} = {operator}({', '.join(arguments)})\nif {RESULT} is not None:\n    return {RESULT}\n"
        lines = cst.parse_module(code).body
        first = next(line for line in function.body.body if not _is_docstring(line))
        assert isinstance(first, cst.BaseStatement)
        return Found((Edit(first, (*lines, first)),), (operator,))


def _operator_for(computed: Term) -> tuple[str, list[str]] | None:
    """Return the operator that computes a term, and by which parameters of the function's."""
    for operator, (reference, names) in _references().items():
        bound = next(unify(reference, computed, {}), None)
        if bound is not None and all(name in bound and bound[name].op == "parameter" for name in names):
            return operator, [bound[name].value for name in names]
    return None


@cache
def _references() -> Mapping[str, tuple[Term, list[str]]]:
    """Return what each operator of the room computes, and the names of its parameters, in order."""
    found = {}
    for offer in operators.offers():
        if offer.room == ROOM and offer.name.endswith(STEPS):
            module = Module(cst.parse_module(operators.own_text(offer.file)))
            reference = module.functions["reference"]
            found[offer.name] = outcome(reference, module), parameters(reference)
    return found


def _calls_operator(function: cst.FunctionDef) -> bool:
    names = {offer.name for offer in operators.offers() if offer.room == ROOM and offer.name.endswith(STEPS)}
    return any(isinstance(call.func, cst.Name) and call.func.value in names for call in calls_in(function.body))


def _writes_argument(function: cst.FunctionDef) -> bool:
    names = set(parameters(function))
    copies = m.Attribute(value=m.Name(value=m.MatchIfTrue(lambda name: name in names)), attr=m.Name("copy_"))
    return any(m.matches(call.func, copies) for call in calls_in(function.body))


def _carries(function: cst.FunctionDef) -> bool:
    loops = [node for node in walk(function.body) if isinstance(node, cst.For)]
    decays = m.Call(func=m.Attribute(attr=m.Name("exp")))
    return any(m.matches(call, decays) for loop in loops for call in calls_in(loop.body))


def _is_docstring(line: cst.CSTNode) -> bool:
    said = m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString() | m.ConcatenatedString())])
    return m.matches(line, said)
