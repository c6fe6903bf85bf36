"""A symbolic execution of routers and sparse blocks: what a configuration decides is kept until it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from rewrite.analysis.blocks.terms import Step
from rewrite.analysis.terms.computation import Bindings, operation, subterms
from rewrite.analysis.terms.spelling import Term, make

UNDEFINED = Term("undefined")
"""A local that was not bound on the way that was taken: the original raises where it is read."""
_MAKES = tuple(f"torch.{name}{like}" for name in ("empty", "full", "ones", "zeros") for like in ("", "_like"))
_YES, _NO = Term("yes"), Term("no")


class Ways(Step):
    """Remembers locals that one way of a test alone binds, and which way was taken where it is tested again."""

    def block(self, statements: Sequence[cst.CSTNode], environment: Bindings) -> Term | None:
        """Execute statements; what switches autocast off is left out: a step has none."""
        return super().block(list(self._flat(statements)), environment)

    def _flat(self, statements: Sequence[cst.CSTNode]) -> Iterator[cst.CSTNode]:
        for statement in statements:
            if isinstance(statement, cst.With) and all(map(self._without_autocast, statement.items)):
                yield from self._flat(statement.body.body)
            else:
                yield statement

    def _without_autocast(self, item: cst.WithItem) -> bool:
        call = item.item
        if not isinstance(call, cst.Call) or item.asname is not None:
            return False
        name = self.module.qualified(call.func)
        off = (a for a in call.args if a.keyword is not None and a.keyword.value == "enabled")
        disabled = any(self.module.code(argument.value) == "False" for argument in off)
        return disabled and (name.endswith(".maybe_autocast") or name in ("torch.autocast", "torch.amp.autocast"))

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call; one that fills a tensor made for it in place is the one that makes another."""
        if isinstance(node.func, cst.Attribute) and node.func.attr.value.endswith("_"):
            made = node.func.value
            if isinstance(made, cst.Call) and self.module.qualified(made.func) in _MAKES:
                given = [self.expression(a.value, environment) for a in node.args if a.keyword is None]
                named = {a.keyword.value: self.expression(a.value, environment) for a in node.args if a.keyword}
                return operation(node.func.attr.value[:-1], [self.expression(made, environment), *given], named)
        return super().call(node, environment)

    def branch(self, test: Term, statement: cst.If, environment: Bindings) -> None:
        """Execute a conditional statement."""
        orelse = statement.orelse
        otherwise = [orelse] if isinstance(orelse, cst.If) else [] if orelse is None else orelse.body.body
        yes, no = ({name: taken(value, test, way) for name, value in environment.items()} for way in (True, False))
        self.block(statement.body.body, yes)
        self.block(otherwise, no)
        for name in {*yes, *no}:
            environment[name] = make("select", test, yes.get(name, UNDEFINED), no.get(name, UNDEFINED))


def taken(term: Term, test: Term, way: bool) -> Term:
    """Return what a term is where a test has been decided."""
    chosen = make("select", test, _YES, _NO)
    if chosen.op != "select":
        return term
    return _taken(term, chosen.args[0], way is (chosen.args[1] == _YES))


def _taken(term: Term, test: Term, way: bool) -> Term:
    if term.op == "select" and term.args[0] == test:
        return _taken(term.args[1 if way else 2], test, way)
    if not term.args or not any(inner.op == "select" and inner.args[0] == test for inner in subterms(term)):
        return term
    parts = [_taken(argument, test, way) for argument in term.args]
    return Term(term.op, tuple(parts), term.value) if term.value else make(term.op, *parts)


def decided(term: Term) -> Term | None:
    """Return the first test below a term that its object's attributes decide; None where there is none."""
    for inner in subterms(term):
        if inner.op == "select" and all(leaf.op in _OF_THE_OBJECT for leaf in _leaves(inner.args[0])):
            return inner.args[0]
    return None


_OF_THE_OBJECT = ("attribute", "constant", "name")


def _leaves(term: Term) -> Iterator[Term]:
    if not term.args:
        yield term
    for argument in term.args:
        yield from _leaves(argument)
