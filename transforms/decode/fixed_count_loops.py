"""Loops whose number of turns the host knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.loops.integration_loop import NotBounded, turns
from rewrite.analysis.moe.expert_loop import ExpertLoop, NotALoop, expert_loop
from rewrite.analysis.tree.module import ClassInfo, Module, walk
from rewrite.analysis.tree.nodes import calls_in, given_names, replace_nodes, single_assignments
from rewrite.transform import Candidate, Edit, Found, Numerics, Skip, Stage, Transform

_PER_ITEM = m.Call(func=m.Attribute(attr=m.Name("tolist")), args=[])
_FINDS = ("nonzero", "argwhere", "unique")


class FixedCountLoops(Transform):
    """Loops over what a tensor holds, with a number of turns that does not depend on it.

    What it does:
        A loop over the experts that were hit, found with `nonzero`, becomes `for … in routed(top_k_index, n)`, which
        runs over token and expert pairs where tokens are few, and over the hit experts else. A `while` that counts a
        time down from 1 in steps of 1 / n becomes `for _ in range(n)`.

    Why:
        A number of turns that depends on values makes the host wait in every layer, and cannot be captured.

    What it needs:
        The expert is used for nothing but choosing weights. The time starts at 1, is changed by nothing but the step,
        and the loop ends half a step before 0. The number of steps is annotated as `int` or given as one.

    Numerics:
        Reordered: a token's experts are added in the same order, but tokens of one expert are multiplied one by one.

    Known limits:
        The rounding of up to 4,095 steps in fp32 stays below half a step; more are not proven. Loops over lengths or
        images that were taken to the host have as many turns as there are images.
    """

    name = "fixed_count_loops"
    summary = "Loops over hit experts and over integration steps have a number of turns that the host knows."
    numerics = Numerics.REORDERED
    stage = Stage.GRAPH
    reasons: ClassVar[Mapping[str, str]] = {
        "per_item": "the loop has one turn an image, clip or sequence, and their number is data",
        "other_loop": "the loop over hit experts has another shape",
        "not_proven": "the number of turns of the `while` could not be proven",
    }

    keeps_from_graph = ("other_loop",)

    def candidates(self, module: Module) -> Iterable[Candidate]:
        """Every loop over hit experts, every `while`, every split by lengths on the host."""
        for where, function, _ in _functions(module):
            for node in walk(function.body):
                if isinstance(node, cst.While):
                    yield Candidate(node, where, f"while {module.code(node.test)}")
                elif isinstance(node, cst.For) and _hits(node.iter, function):
                    yield Candidate(node, where, f"for {module.code(node.target)}")
                elif isinstance(node, cst.Call) and _splits(node, function):
                    yield Candidate(node, where, " ".join(module.code(node).split()))

    def match(self, candidate: Candidate, module: Module) -> Found | Skip:
        """Change the header of the loop, and how its body chooses weights."""
        _, method, owner = next(found for found in _functions(module) if found[0] == candidate.where)
        if isinstance(candidate.node, cst.Call):
            return Skip("per_item", candidate.label)
        if isinstance(candidate.node, cst.While):
            try:
                count = turns(candidate.node, method, owner, module)
            except NotBounded as error:
                return Skip("not_proven", error.why)
            return Found((Edit(candidate.node, (_counted(candidate.node, count),)),))
        if not isinstance(candidate.node, cst.For):
            raise TypeError("a candidate is a loop or a call")
        try:
            loop = expert_loop(candidate.node, method, owner, module)
        except NotALoop as error:
            return Skip("other_loop", error.what)
        return Found(_edits(loop), ("routed", "select"))


def _functions(module: Module) -> Iterator[tuple[str, cst.FunctionDef, ClassInfo | None]]:
    yield from ((name, function, None) for name, function in module.functions.items())
    for owner, name, method in module.methods():
        yield f"{owner.name}.{name}", method, owner


def _hits(iterated: cst.BaseExpression, function: cst.FunctionDef) -> bool:
    """Whether a loop runs over what `nonzero` or `unique` found, by name or not: its length is data on the device."""
    values, lines = [iterated], [node for node in walk(function.body) if isinstance(node, cst.Assign)]
    for value in values:  # grows: what a name holds may be made of a name
        if isinstance(name := _receiver(value), cst.Name):
            given = [found[name.value] for line in lines if name.value in (found := given_names(line))]
            values += [node for node in given if not any(node is known for known in values)]
    return any(called in _FINDS for value in values for called in _called(value))


def _receiver(value: cst.BaseExpression) -> cst.BaseExpression:
    """Return what stands first in a chain of methods and subscripts: `x` of `x.nonzero()[0].squeeze(-1)`."""
    while isinstance(value, (cst.Attribute, cst.Subscript, cst.Call)):
        value = value.func if isinstance(value, cst.Call) else value.value
    return value


def _called(node: cst.CSTNode) -> Iterator[str]:
    for call in calls_in(node):
        if isinstance(call.func, (cst.Name, cst.Attribute)):
            yield call.func.value if isinstance(call.func, cst.Name) else call.func.attr.value


def _splits(call: cst.Call, function: cst.FunctionDef) -> bool:
    """Whether a call splits by lengths that were taken to the host, by name or not."""
    if next(iter(_called(call)), "") not in ("split", "split_with_sizes"):
        return False
    named = single_assignments(function)
    values = (named.get(a.value.value, a.value) if isinstance(a.value, cst.Name) else a.value for a in call.args)
    return any(m.matches(value, _PER_ITEM) for value in values)


def _counted(loop: cst.While, count: cst.BaseExpression) -> cst.For:
    ranged = cst.Call(cst.Name("range"), [cst.Arg(count)])
    return cst.For(cst.Name("_"), ranged, loop.body, leading_lines=loop.leading_lines)


def _edits(loop: ExpertLoop) -> tuple[Edit, ...]:
    """Name pairs in the header and choose weights by `select`; what searched for experts goes, its comments stay."""
    names = [cst.Element(cst.Name(name)) for name in (loop.expert, loop.position, loop.token)]
    call = cst.Call(cst.Name("routed"), [cst.Arg(loop.index), cst.Arg(loop.num_experts)])
    new: dict[int, tuple[cst.CSTNode, ...]] = {
        id(loop.node.target): (cst.Tuple(names, lpar=[], rpar=[]),),
        id(loop.node.iter): (call,),
        **{id(statement): () for statement in loop.opening},
    }
    for use in loop.choices:
        new[id(use)] = (cst.Call(cst.Name("select"), [cst.Arg(use.value), cst.Arg(cst.Name(loop.expert))]),)
    changed = replace_nodes(loop.node, new)
    dropped = [node for top in (*loop.search, *loop.opening) for node in walk(top) if isinstance(node, cst.Comment)]
    lines = [*loop.node.leading_lines, *(cst.EmptyLine(comment=comment) for comment in dropped)]
    return (
        *(Edit(statement, ()) for statement in loop.search),
        Edit(loop.node, (changed.with_changes(leading_lines=lines),)),
    )
