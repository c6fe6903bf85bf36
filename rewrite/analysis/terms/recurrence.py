"""What a function computes that steps through tokens or writes a state: its result, and what it writes.

Beside what `computation` follows: a loop over a range, whose carried values are symbols; items of a local tensor set
one by one; a comprehension over a tuple; and `state.copy_(value)`, which is told with the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import libcst as cst

from rewrite.analysis.terms.computation import MAX_DEPTH, Bindings, NotComputable, Run
from rewrite.analysis.terms.spelling import Term, make
from rewrite.analysis.tree.module import Module, walk


def outcome(function: cst.FunctionDef, module: Module) -> Term:
    """Return the result of a function and what it writes, as a term over its parameters.

    Raises:
        NotComputable: if it does something else.
    """
    params = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
    environment: Bindings = {p.name.value: Term("parameter", (), p.name.value) for p in params}
    run = Recurrence(module, None, MAX_DEPTH)
    result = run.function(function, environment)
    return make("tuple", result, *run.written)


@dataclass
class Recurrence(Run):
    """One symbolic execution."""

    written: list[Term] = field(default_factory=list)
    """Every write to what came from outside, in order."""

    def block(self, statements: object, environment: Bindings) -> Term | None:
        """Execute statements, loops over a range among them."""
        before: list[cst.CSTNode] = []
        for place, statement in enumerate(statements):  # type: ignore[arg-type, var-annotated]
            if not isinstance(statement, cst.For):
                before.append(statement)
                continue
            if super().block(before, environment) is not None or statement.orelse is not None:
                raise NotComputable("a return before a loop")
            self.loop(statement, environment)
            return self.block(statements[place + 1 :], environment)  # type: ignore[index]
        return super().block(before, environment)

    def loop(self, statement: cst.For, environment: Bindings) -> None:
        """Execute the body once for a symbolic count; what it changes is told by where it began and one turn."""
        count = self.expression(statement.iter, environment)
        if count.op != "range" or not isinstance(statement.target, cst.Name):
            raise NotComputable("a loop over something else than a range")
        changed = [name for name in _bound(statement.body) if name in environment]
        inside = {**environment, statement.target.value: Term("turn", (count,))}
        inside |= {name: Term("carried", (environment[name],)) for name in changed}
        if self.block(statement.body.body, inside) is not None:
            raise NotComputable("a return inside a loop")
        for name in changed:
            environment[name] = Term("loop", (environment[name], inside[name], count))

    def small(self, small: cst.BaseSmallStatement, environment: Bindings) -> None:
        """Execute a simple statement, `x.copy_(y)` among them."""
        call = small.value if isinstance(small, cst.Expr) else None
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value == "copy_":
            target = call.func.value
            if not isinstance(target, cst.Name) or len(call.args) != 1:
                raise NotComputable("a copy into something else than a name")
            held = self.expression(target, environment)
            write = Term("written", (held, self.expression(call.args[0].value, environment)))
            self.written.append(write)
            environment[target.value] = write
            return
        super().small(small, environment)

    def bind(self, target: cst.BaseExpression, value: Term, environment: Bindings) -> None:
        """Give a target its value; an item of a local tensor makes another tensor."""
        if isinstance(target, cst.Subscript) and isinstance(target.value, cst.Name):
            held = environment.get(target.value.value)
            if held is None or held.op == "parameter":
                raise NotComputable("an item of what came from outside")
            items = [self.slice(element.slice, environment) for element in target.slice]
            environment[target.value.value] = Term("set", (held, *items, value))
            return
        super().bind(target, value, environment)

    def branch(self, test: Term, statement: cst.If, environment: Bindings) -> None:
        """Execute a conditional statement that writes nothing from outside."""
        count = len(self.written)
        super().branch(test, statement, environment)
        if len(self.written) != count:
            raise NotComputable("a write under a condition")

    def _expression(self, node: cst.BaseExpression, environment: Bindings) -> Term:
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            return self.comprehension(node, environment)
        return super()._expression(node, environment)

    def comprehension(self, node: cst.ListComp | cst.GeneratorExp, environment: Bindings) -> Term:
        """Return the tuple of what a comprehension over a tuple makes."""
        over = node.for_in
        items = self.expression(over.iter, environment)
        if items.op != "tuple" or over.ifs or over.inner_for_in is not None or not isinstance(over.target, cst.Name):
            raise NotComputable("a comprehension over no tuple")
        made = (self.expression(node.elt, {**environment, over.target.value: item}) for item in items.args)
        return make("tuple", *made)

    def follow(self, helper: object, plain: object, keywords: object, around: object = ()) -> Term:
        """Return what a helper returns; it may write nothing."""
        own = replace(self, written=[])
        result = super(Recurrence, own).follow(helper, plain, keywords, around)  # type: ignore[arg-type]
        if own.written:
            raise NotComputable("a helper that writes")
        return result


def _bound(body: cst.CSTNode) -> list[str]:
    """Return the names that a loop's body binds or sets items of, each once, in order."""
    names: dict[str, None] = {}
    for node in walk(body):
        if isinstance(node, cst.AssignTarget):
            for inner in walk(node.target):
                if isinstance(inner, cst.Name):
                    names[inner.value] = None
                    if isinstance(node.target, cst.Subscript):
                        break
    return list(names)
