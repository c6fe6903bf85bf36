"""How often a `while` turns that counts a time down from 1 to 0 in equal steps.

The loop of a flow-matching model (Euler's method), however it is spelled:

    dt = -1.0 / n;  time = 1.0
    while time >= -dt / 2:  …;  time += dt

After k turns the time is 1 - k / n, so the test holds for k = 0 … n - 1 and fails at n, half a step away from either.
A sum of k fp32 steps is off by at most (k + 1) 2⁻²⁵, which is less than 1 / (2 n) for n ≤ 4095. Test and change of the
time are compared as sums of multiples of time and step. A tensor that holds the time or the step is written by nothing
else, under whatever name, and n is declared to be a whole number.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import libcst as cst

from rewrite.analysis.effects import HEAP, Scope, attribute, effects_of, own_names
from rewrite.analysis.terms.computation import NotComputable, Run, subterms
from rewrite.analysis.terms.spelling import Term, constant
from rewrite.analysis.tree.module import ClassInfo, Module, names_in, self_attribute, walk
from rewrite.analysis.tree.nodes import bound_names

_Sum = dict[str, Fraction]
"""How often each name is in a sum; `""` for the number beside them."""
_HALF = Fraction(1, 2)
_FP32 = ("torch.float32", "torch.float64", "torch.float", "torch.double")


class NotBounded(Exception):
    """The number of turns is not known."""

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


def turns(loop: cst.While, function: cst.FunctionDef, owner: ClassInfo | None, module: Module) -> cst.BaseExpression:
    """Return the expression of n, of a loop in `function`.

    Raises:
        NotBounded: if a part of the proof is missing.
    """
    return _Loop(loop, effects_of(module).scope(function, owner), module, owner).turns()


class _Loop:
    def __init__(self, loop: cst.While, scope: Scope, module: Module, owner: ClassInfo | None):
        self.loop, self.module = loop, module
        self.scope, self.owner = scope, owner
        self.run = Run(module, owner, 0)

    def turns(self) -> cst.BaseExpression:
        if self.scope.unknown:
            raise NotBounded(self.scope.unknown)
        if "_" in own_names(self.scope.function, self.module):
            raise NotBounded("the function has a `_` of its own")
        names = self.scope.names
        if "range" in self.scope.locals or names.is_bound("range") or not names.means("range"):
            raise NotBounded("`range` may be bound to something else")
        inside = [node for statement in self.loop.body.body for node in walk(statement)]
        if self.loop.orelse is not None or any(isinstance(n, (cst.Break, cst.Continue)) for n in inside):
            raise NotBounded("the loop can be left in another way")
        tested = self.tested()
        time, step, sign = self.advance(tested)
        if tested != {time: Fraction(1), step: sign * _HALF}:
            raise NotBounded(f"the loop does not end half a step before 0: {self.module.code(self.loop.test)}")
        if any(step in bound_names(statement) for statement in self.loop.body.body):
            raise NotBounded(f"{step} changes in the loop")
        start = self.before(time)
        if len(start) != 1 or not self.is_one(self.term(start[0][1])):
            raise NotBounded(f"{time} does not start at 1")
        count, made = self.count(step, -sign)
        values = [*self.scope.assigned(time), *self.scope.assigned(step)]
        if any(isinstance(node, cst.Call) for value in values for node in walk(value)):  # else numbers of Python's
            self.check_kept(time, start[0][0], time)
            self.check_kept(step, made, time)
        return count

    def check_kept(self, name: str, place: int, time: str) -> None:
        """Nothing but the loop's own step writes what a name holds, from its assignment on."""
        root = self.scope.root(name)
        for statement in (*self.block[place + 1 :], *self.loop.body.body):
            if time in bound_names(statement):
                continue
            effect = self.scope.of(statement)
            if root in self.scope.memory(effect.writes) or (effect.anything and root == HEAP):
                raise NotBounded(f"{name} may be written in place: {effect.anything or self.module.code(statement)}")

    def term(self, node: cst.BaseExpression) -> Term:
        """Return the term of an expression over the locals as they are."""
        environment = {name: Term("parameter", (), name) for name in names_in([node]) if name not in self.known}
        try:
            return self.run.expression(node, environment)
        except NotComputable as error:
            raise NotBounded(f"{self.module.code(node)}: {error.what}") from error

    @property
    def known(self) -> set[str]:
        """Names that are no locals."""
        return {*self.module.imports, *self.module.functions, *self.module.classes, "self", "None", "True", "False"}

    def tested(self) -> _Sum:
        """Return the sum that the test compares with 0, at least, with one for the name that it starts at."""
        term = self.term(self.loop.test)
        denied = term.op == "not"
        term = term.args[0] if denied else term
        if term.op not in ("le", "lt") or len(term.args) != 2:
            raise NotBounded(f"no comparison of a time: {self.module.code(self.loop.test)}")
        low, high = term.args[::-1] if denied else term.args
        return {name: times for name, times in _added(_sum(high), _sum(low), -1).items() if times}

    def advance(self, tested: _Sum) -> tuple[str, str, Fraction]:
        """Return time, step and its sign: the body changes one of the names tested, once, by the other."""
        for time in tested:
            changes = [s for s in self.loop.body.body if time and time in bound_names(s)]
            if len(changes) == 1 and (change := self.change(changes[0], time)) is not None:
                step = next((name for name in change if name != time), "")
                if step and change.get(time) == 1 and abs(change[step]) == 1 and len(change) == 2:
                    if not any(isinstance(n, cst.NamedExpr) for n in walk(changes[0])):
                        return time, step, change[step]
        raise NotBounded("the time is not changed by one step a turn")

    def change(self, statement: cst.CSTNode, time: str) -> _Sum | None:
        """Return what a statement gives the time."""
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            return None
        own = cst.Name(time)
        if isinstance(small, cst.AugAssign) and isinstance(small.operator, (cst.AddAssign, cst.SubtractAssign)):
            sign = 1 if isinstance(small.operator, cst.AddAssign) else -1
            return _added(_sum(self.term(own)), _sum(self.term(small.value)), sign)
        if isinstance(small, cst.Assign) and len(small.targets) == 1 and small.targets[0].target.deep_equals(own):
            return _sum(self.term(small.value))
        return None

    def before(self, name: str) -> list[tuple[int, cst.BaseExpression]]:
        """Return place and value of the assignments to a name in the loop's own block before it."""
        values = []
        for place, statement in enumerate(self.block):
            if name not in bound_names(statement):
                continue
            small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
            if not isinstance(small, cst.Assign) or not small.targets[0].target.deep_equals(cst.Name(name)):
                raise NotBounded(f"{name} is written in another way")
            values.append((place, small.value))
        return values

    @property
    def block(self) -> Sequence[cst.CSTNode]:
        """The statements before the loop."""
        block = list(getattr(self.module.parent(self.loop), "body", ()))
        return block[: next(place for place, statement in enumerate(block) if statement is self.loop)]

    def count(self, step: str, sign: Fraction) -> tuple[cst.BaseExpression, int]:
        """Return n of `step = sign / n` and the place of that.

        The step may be put into a tensor afterwards, and n is the same whole number at the loop.
        """
        for place, value in reversed(self.before(step)):
            term = _unwrapped(self.term(value), self.module)
            if term == Term("parameter", (), step):
                continue
            divided = self.denominator(value)
            if divided is None or not self.is_ratio(term, sign):
                break
            self.check_same(divided, self.block[place:])
            if not self.is_whole(divided, self.scope.function):
                raise NotBounded(f"nothing shows that {self.module.code(divided)} is a whole number")
            return divided, place
        raise NotBounded(f"{step} is not {'-' if sign < 0 else ''}1 / n")

    def is_ratio(self, term: Term, sign: Fraction) -> bool:
        """Whether a term is one by something, with this sign."""
        while term.op == "neg":
            term, sign = term.args[0], -sign
        if term.op != "div":
            return False
        top = _unwrapped(term.args[0], self.module)
        while top.op == "neg":
            top, sign = _unwrapped(top.args[0], self.module), -sign
        return top == constant(int(sign))

    def denominator(self, value: cst.BaseExpression) -> cst.BaseExpression | None:
        """Return n of the only division in an expression."""
        divisions = [
            node
            for node in walk(value)
            if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide)
        ]
        return divisions[0].right if len(divisions) == 1 else None

    def check_same(self, count: cst.BaseExpression, past: Sequence[cst.CSTNode]) -> None:
        """Statements between the step and the loop leave n alone."""
        if not all(isinstance(n, (cst.Name, cst.Attribute, cst.Integer)) for n in walk(count) if _is_code(n)):
            raise NotBounded(f"{self.module.code(count)} may be another number at the loop")
        attributes = {name for node in walk(count) if (name := self_attribute(node)) is not None}
        for statement in past:
            stored = {
                self_attribute(n.target) for n in walk(statement) if isinstance(n, (cst.AssignTarget, cst.AugAssign))
            }
            if (names_in([count]) - {"self"}) & bound_names(statement) or attributes & stored:
                raise NotBounded(f"{self.module.code(count)} changes before the loop")
            effect = self.scope.of(statement)
            if attributes and (effect.anything or attributes & effect.stores):
                raise NotBounded(
                    f"{self.module.code(count)} may change before the loop: {effect.anything}".rstrip(": ")
                )

    def is_whole(self, count: cst.BaseExpression, function: cst.FunctionDef) -> bool:
        """Whether an expression is an integer, or one that the file declares as such."""
        if isinstance(count, cst.Integer):
            return True
        if isinstance(count, cst.Name):
            return count.value not in bound_names(function.body) and _declared_whole(function, count.value)
        name = self_attribute(count)
        if name is None or self.owner is None:
            return False
        found = attribute(self.owner, name, self.scope.names)
        given = [(value, self.method_of(value)) for value in found.values if not found.unknown]
        return bool(given) and all(
            isinstance(value, cst.Integer)
            or (isinstance(value, cst.Name) and method is not None and self.is_whole(value, method))
            for value, method in given
        )

    def method_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the method that an expression stands in."""
        return next((above for above in self.module.ancestors(node) if isinstance(above, cst.FunctionDef)), None)

    def is_one(self, term: Term) -> bool:
        """Whether a term is the number 1, in a tensor of fp32 or not."""
        return _unwrapped(term, self.module) == constant(1)


def _declared_whole(function: cst.FunctionDef, name: str) -> bool:
    """Whether a parameter is annotated with `int`, or has an integer for its default."""
    params = function.params
    for param in (*params.posonly_params, *params.params, *params.kwonly_params):
        if param.name.value == name:
            annotated = param.annotation.annotation if param.annotation is not None else None
            return isinstance(param.default, cst.Integer) or (
                isinstance(annotated, cst.Name) and annotated.value == "int"
            )
    return False


def _is_code(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.BaseExpression, cst.BaseNumber))


def _unwrapped(term: Term, module: Module) -> Term:
    """Return what `torch.tensor(x, dtype=torch.float32)` holds; the default dtype may be half, the proof is for fp32.

    Raises:
        NotBounded: if it holds it in another dtype.
    """
    if term.op not in ("tensor", "as_tensor", "full", "ones") or not term.args:
        return term
    dtypes = [inner.args[0].value for inner in term.args if inner.op == "keyword" and inner.value == "dtype"]
    if not dtypes or dtypes[0] not in _FP32:
        raise NotBounded("a tensor of another dtype than fp32")
    if term.op in ("full", "ones"):
        size, *rest = term.args
        if size != Term("tuple"):
            return term
        return rest[0] if term.op == "full" else constant(1)
    return term.args[0]


def _sum(term: Term) -> _Sum:
    """Return a term as a sum of multiples of names."""
    if term.op == "constant":
        try:
            return {"": Fraction(term.value)}
        except ValueError as error:
            raise NotBounded(f"`{term}`") from error
    if term.op == "parameter":
        return {term.value: Fraction(1)}
    if term.op == "neg":
        return _added({}, _sum(term.args[0]), -1)
    if term.op in ("add", "sub") and len(term.args) == 2:
        return _added(_sum(term.args[0]), _sum(term.args[1]), 1 if term.op == "add" else -1)
    if term.op in ("mul", "div") and len(term.args) == 2:
        one, other = map(_sum, term.args)
        if term.op == "mul" and set(one) <= {""}:
            one, other = other, one
        if set(other) == {""}:
            times = other[""] if term.op == "mul" else 1 / other[""]
            return {name: times * count for name, count in one.items()}
    raise NotBounded(f"`{next(iter(subterms(term))).op}` of the time")


def _added(one: _Sum, other: _Sum, times: int) -> _Sum:
    names = sorted({*one, *other})
    total = {name: one.get(name, Fraction(0)) + times * other.get(name, Fraction(0)) for name in names}
    return {name: count for name, count in total.items() if count}
