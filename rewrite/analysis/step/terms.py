"""What a method computes in one decode step: in evaluation, one token a row, with a cache that is there.

A symbolic execution that knows the outcome of the tests that a step decides, leaves out dropout, and reads the calls
that earlier transforms have put in by what their operators declare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.syntax.module import ClassInfo, Module, self_attribute, without_runtime
from rewrite.analysis.syntax.nodes import parameters
from rewrite.analysis.terms.computation import Bindings, NotComputable, Run, subterms
from rewrite.analysis.terms.declared import as_declared
from rewrite.analysis.terms.spelling import NONE, Term, make

MAX_DEPTH = 4
CACHE = "past_key_values"
"""What transformers calls the cache wherever it is passed on."""
CACHES = (CACHE, "past_key_value", "layer_past")
"""That, and what files call it that are older than the name."""
_DROPOUT = ("torch.nn.Dropout", "torch.nn.Identity")
LINEAR = ("torch.nn.Linear", "torch.nn.modules.linear.Linear")
_IN_PLACE = {cst.AddAssign: "add", cst.MultiplyAssign: "mul", cst.DivideAssign: "div"}
_COMPLAINS = m.SimpleStatementLine(
    body=[
        m.Raise()
        | m.Expr(m.Call(func=m.Attribute(value=m.Name("logger") | m.Name("warnings"))))
        | m.Assert()
        | m.Pass()
    ]
)


class NoStep(Exception):
    """A class is not of the form that a decode step has operators for."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def computed_in_step(function: cst.FunctionDef, module: Module, owner: ClassInfo) -> Term:
    """Return what a method of `owner` returns in a decode step, over its parameters and the attributes of `self`.

    Raises:
        NotComputable: if it does something that has no canonical form.
    """
    environment = {name: Term("parameter", (), name) for name in parameters(function) if name != "self"}
    return Step(module, owner, MAX_DEPTH).function(function, environment)


@dataclass
class Step(Run):
    """One symbolic execution of a decode step."""

    def block(self, statements: Sequence[cst.CSTNode], environment: Bindings) -> Term | None:
        """Execute statements, those left out that only complain."""
        return super().block([s for s in statements if not m.matches(s, _COMPLAINS)], environment)

    def branch(self, statement: cst.If, environment: Bindings) -> Term | None:
        """Execute a conditional statement, only one way where a step decides the test."""
        if statement.orelse is None and all(m.matches(inner, _COMPLAINS) for inner in statement.body.body):
            return None
        known = _outcome(self.expression(statement.test, environment))
        if known is None:
            return super().branch(statement, environment)
        if known:
            return self.block(statement.body.body, environment)
        if isinstance(statement.orelse, cst.If):
            return self.branch(statement.orelse, environment)
        return None if statement.orelse is None else self.block(statement.orelse.body.body, environment)

    def small(self, small: cst.BaseSmallStatement, environment: Bindings) -> None:
        """Execute one simple statement; `x += y` is `x = x + y` where nothing shares x."""
        if isinstance(small, cst.AnnAssign) and small.value is None:
            return
        if isinstance(small, cst.AugAssign) and isinstance(small.target, cst.Name):
            environment[small.target.value] = self.augmented(small, environment)
            return
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
            raise NotComputable(f"a call for its effect: {self.module.code(small.value.func)}")
        super().small(small, environment)

    def augmented(self, small: cst.AugAssign, environment: Bindings) -> Term:
        """Return what the target of `x += y` is afterwards, unless another local may share the tensor."""
        value, added = self.expression(small.target, environment), self.expression(small.value, environment)
        operation = _IN_PLACE.get(type(small.operator))
        if operation == "add" and value.op == added.op == "tuple":
            return Term("tuple", (*value.args, *added.args))
        holders = [name for name, term in environment.items() if any(inner == value for inner in subterms(term))]
        if operation is None or value.op == "parameter" or len(holders) > 1:
            raise NotComputable("an operation in place")
        return make(operation, value, added)

    def _expression(self, node: cst.BaseExpression, environment: Bindings) -> Term:
        if isinstance(node, cst.BooleanOperation):
            name = "and" if isinstance(node.operator, cst.And) else "or"
            return Term(name, tuple(self.expression(side, environment) for side in (node.left, node.right)))
        if isinstance(node, cst.Dict):
            return Term("mapping", (), self.module.code(node))
        if isinstance(node, cst.IfExp):
            known = _outcome(self.expression(node.test, environment))
            if known is not None:
                return self.expression(node.body if known else node.orelse, environment)
        return super()._expression(node, environment)

    def named(self, node: cst.BaseExpression) -> Term:
        """Return the leaf of a name that no local has; the runtime's functions by their bare names."""
        return Term("name", (), without_runtime(self.module.qualified(node)))

    def element(self, node: cst.Arg | cst.BaseElement, environment: Bindings) -> Term:
        """Return the term of an argument or element, `star` of one that stands for several."""
        if isinstance(node, cst.StarredElement) or (isinstance(node, cst.Arg) and node.star == "*"):
            return Term("star", (self.expression(node.value, environment),))
        return super().element(node, environment)

    def starred_keywords(self, node: cst.Call) -> None:
        """Leave out `**kwargs`, which pass on what the caller of the model gave besides what the step decides."""

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call: none of dropout, and what earlier transforms merged taken apart again."""
        attribute = self_attribute(node.func)
        if attribute is not None and self.owner is not None and len(node.args) == 1:
            if is_built_from(attribute, _DROPOUT, self.owner, self.module):
                return self.expression(node.args[0].value, environment)
        called = super().call(node, environment)
        if called.op in ("nn.functional.dropout", "dropout"):
            return called.args[0]
        return as_declared(called)


def is_built_from(attribute: str, classes: tuple[str, ...], owner: ClassInfo, module: Module) -> bool:
    """Whether all that `self.<attribute>` may be is an object of one of `classes`."""
    values = module.assignments(owner, attribute)
    return bool(values) and all(isinstance(v, cst.Call) and module.qualified(v.func) in classes for v in values)


def is_linear(term: Term, owner: ClassInfo, module: Module) -> bool:
    """Whether `term` is an attribute that holds a plain `nn.Linear`."""
    return term.op == "attribute" and is_built_from(term.value, LINEAR, owner, module)


def keyword(call: Term, name: str) -> Term | None:
    """Return the value of a keyword argument of a call."""
    return next((a.args[0] for a in call.args if a.op == "keyword" and a.value == name), None)


def _outcome(test: Term) -> bool | None:
    """Return what a step decides a test to be, None for one that it does not decide."""
    if test in (Term("attribute", (), "training"), Term("parameter", (), "output_attentions")):
        return False
    if test.op == "parameter" and test.value == "use_cache":
        return True
    if test.op == "not" and (inner := _outcome(test.args[0])) is not None:
        return not inner
    if test.op in ("is", "isnot") and test.args == (Term("parameter", (), CACHE), NONE):
        return test.op == "isnot"
    if test.op in ("and", "or"):
        sides = [_outcome(side) for side in test.args]
        decisive = test.op == "or"
        if decisive in sides:
            return decisive
        return None if None in sides else not decisive
    return None


class NotWritable(NotComputable):
    """A term that has no source over the attributes of `self`."""


_INFIX = {
    "or": ("or", 1), "and": ("and", 2), "eq": ("==", 4), "ne": ("!=", 4), "is": ("is", 4), "isnot": ("is not", 4),
    "add": ("+", 5), "mul": ("*", 6), "div": ("/", 6), "floordiv": ("//", 6), "pow": ("**", 8),
}  # fmt: skip
"""How operations are written, and how closely they bind."""
_PREFIX = {"not": ("not ", 3), "neg": ("-", 7)}


def source(term: Term, module: Module) -> str:
    """Return Python source of a term over attributes of `self`, parameters and constants.

    Raises:
        NotWritable: if the term is something else.
    """
    if term.op in ("attribute", "parameter", "constant"):
        return f"self.{term.value}" if term.op == "attribute" else term.value
    if term.op == "name":
        return _local_name(term.value, module)
    if term.op in _INFIX:
        sign, closeness = _INFIX[term.op]
        left, right = _readable(term)
        return f"{_within(left, closeness, module)} {sign} {_within(right, closeness + 1, module)}"
    if term.op in _PREFIX:
        sign, closeness = _PREFIX[term.op]
        return f"{sign}{_within(term.args[0], closeness, module)}"
    if term.op == "select":
        test, yes, no = (_within(part, 1, module) for part in term.args)
        return f"{yes} if {test} else {no}"
    if term.op == "getattr":
        return f"getattr({', '.join(source(argument, module) for argument in term.args)})"
    if term.op == "call" and len(term.args) == 2 and term.args[0].op == "attribute":
        return f"self.{term.args[0].value}({source(term.args[1], module)})"
    if term.op in ("shape", "dtype"):
        return f"{_within(term.args[0], 9, module)}.{term.op}"
    if term.op.startswith(".") and len(term.args) == 1:
        return f"{_within(term.args[0], 9, module)}{term.op}"
    if term.op == "index" and len(term.args) == 2 and term.args[1].op in ("constant", *_READ):
        return f"{_within(term.args[0], 9, module)}[{source(term.args[1], module)}]"
    raise NotWritable(str(term)[:60])


_READ = ("attribute", "parameter")


def _readable(term: Term) -> tuple[Term, Term]:
    """Return the operands, tensors before numbers: canonical terms have them in the order of their spelling."""
    left, right = term.args
    last = ("attribute", "constant")
    swap = term.commutes and (
        (left.op in last and right.op not in last) or (right.op == "parameter" and left.op not in ("parameter", *last))
    )
    return (right, left) if swap else (left, right)


def _within(term: Term, closeness: int, module: Module) -> str:
    """Return the source of an operand, in parentheses where it binds less closely than `closeness`."""
    own = {**_INFIX, **_PREFIX}.get(term.op, ("", 0 if term.op == "select" else 9))[1]
    return f"({source(term, module)})" if own < closeness else source(term, module)


def _local_name(name: str, module: Module) -> str:
    for local, qualified in module.imports.items():
        if name == qualified or name.startswith(f"{qualified}."):
            return local + name.removeprefix(qualified)
    if name.isidentifier() or name in ("None", "True", "False"):
        return name
    raise NotWritable(name)
