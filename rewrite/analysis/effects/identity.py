"""Whether two expressions in a function are certainly the same object, or would be if nothing came in between."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import libcst as cst

from rewrite.analysis.effects.bound import bound_by
from rewrite.analysis.effects.effect import Effect
from rewrite.analysis.effects.scope import Scope
from rewrite.analysis.terms.computation import Bindings, NotComputable, Run
from rewrite.analysis.terms.spelling import Term


@dataclass
class Identity:
    """The meaning of expressions at places of one function."""

    scope: Scope

    def term(self, node: cst.BaseExpression) -> Term:
        """Return a term that is equal for expressions that compute the same where nothing is written in between.

        Locals are traced back through copies (`y = x`) to the statement that may have bound them last.
        """
        return self._traced(node, strict=True)

    def loose_term(self, node: cst.BaseExpression) -> Term:
        """Return the term where what a condition or a loop may bind is looked past: equal where it looks alike."""
        return self._traced(node, strict=False)

    def _traced(self, node: cst.BaseExpression, strict: bool) -> Term:
        try:
            return _Traced(self.scope.module, None, 0, self, node, strict).expression(node, {})
        except NotComputable:
            return Term("opaque", (), str(id(node)))

    def origin(self, name: str, at: cst.CSTNode, strict: bool = True) -> tuple[str, int]:
        """Return the name and the statement (its `id`, 0 for a parameter) that gave a local its object at `at`."""
        if name not in self.scope.locals:
            return name, -1
        made = self.assignment(name, at, strict)
        if made is None:
            return name, 0
        value = _copied(made)
        return self.origin(value, made, strict) if value is not None else (name, id(made))

    def assignment(self, name: str, at: cst.CSTNode, strict: bool = False) -> cst.BaseStatement | None:
        """Return the last statement before that of `at`, in its block or one around it, that binds the name.

        Any statement that may bind it if `strict`, else only a simple one that does, `x += y` left out.
        """
        module = self.scope.module
        line: cst.CSTNode = module.statement(at)
        while line is not self.scope.function:
            above = module.parent(line)
            block = getattr(above, "body", ())
            if isinstance(above, cst.IndentedBlock) and isinstance(block, Sequence):
                place = next(i for i, statement in enumerate(block) if statement is line)
                before: list[cst.BaseStatement] = list(block[:place])
                for statement in reversed(before):
                    if name in _bound(statement, strict):
                        return statement
            if strict and isinstance(above, cst.BaseCompoundStatement) and above is not self.scope.function:
                if name in bound_by(above):  # in its head, in an earlier round, in another branch: which, is open
                    return above
            line = above
        return None


def _bound(statement: cst.BaseStatement, strict: bool) -> Set[str]:
    if strict:
        return bound_by(statement)
    return plainly_bound(statement) if isinstance(statement, cst.SimpleStatementLine) else frozenset()


def plainly_bound(statement: cst.SimpleStatementLine) -> set[str]:
    """Return the names that assignments of a statement bind; `x += y` may leave x the object that it was."""
    assigns = [small for small in statement.body if not isinstance(small, cst.AugAssign)]
    return {name for small in assigns for name in bound_by(small)}


def _copied(statement: cst.BaseStatement) -> str | None:
    """Return `y` of the statement `x = y`."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    small = statement.body[0]
    if isinstance(small, cst.Assign) and isinstance(small.value, cst.Name):
        return small.value.value if all(isinstance(t.target, cst.Name) for t in small.targets) else None
    return None


@dataclass
class _Traced(Run):
    """A run that knows no locals but where each was assigned."""

    identity: Identity
    at: cst.CSTNode
    strict: bool

    def named(self, node: cst.BaseExpression) -> Term:
        """Return the leaf of a local's origin, or of a dotted name."""
        root = node
        while isinstance(root, cst.Attribute):
            root = root.value
        if not isinstance(root, cst.Name) or root.value not in self.identity.scope.locals:
            return super().named(node)
        leaf = Term("local", (), "{}@{}".format(*self.identity.origin(root.value, self.at, self.strict)))
        dotted = self.module.code(node).partition(".")[2]
        return Term(".", (leaf,), dotted) if dotted else leaf

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call: of the same function with the same arguments."""
        plain = tuple(self.element(argument, environment) for argument in node.args)
        words = ",".join(argument.keyword.value if argument.keyword else "" for argument in node.args)
        return Term("call", (self.expression(node.func, environment), *plain), words)


def with_argument(effect: Effect, old: Effect, new: Effect) -> Effect:
    """Return the effect of a call that gets another argument: what it reads of locals is that of the new one."""
    reads = (effect.reads - old.reads) | new.reads
    return replace(effect, reads=reads, attributes=effect.attributes | new.attributes)
