"""What a function computes, apart from how it is spelled.

`body` runs a function symbolically: locals are inlined in order, helper methods and functions of the file are
followed, annotations and docstrings do not count, and spellings of the same operation (`x.float()` and
`x.to(torch.float32)`, `x ** 2` and `x.square()`, `torch.rsqrt(v)` and `v ** -0.5`) become the same term. The order of
roundings is kept: a cast before a multiplication and one after it are different terms. `unify` finds a pattern in the
result.

Reading on: `rewrite/codemod/passes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import libcst as cst

from rewrite.analysis.terms.spelling import (
    ALIASES,
    ARGUMENTS,
    BINARY,
    COMPARISON,
    KEYWORDS,
    Term,
    constant,
    make,
    named_call,
)
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import names_bound_by
from rewrite.errors import RewriteError

MAX_DEPTH = 4
"""How many calls of helpers inside helpers are followed."""
PARTS = ("chunk", "split", "unbind", "split_with_sizes", "tensor_split")
"""What gives back several tensors, as many as the names that they are unpacked into."""
MAX_SIZE = 4000
"""Inlining repeats terms; a body of more nodes than this is no fused operator's."""
SHAPED = ("reshape", "view")
"""What may be given the sizes of a tensor as a starred argument."""
GATHERED = "keywords"
"""The operation of a mapping whose items are known: one `keyword` for each."""

Bindings = dict[str, Term]


class NotComputable(RewriteError):
    """The function does something that has no canonical form."""

    def __init__(self, what: str):
        super().__init__(what)
        self.what = what


def body(function: cst.FunctionDef, module: Module, owner: ClassInfo | None = None) -> Term:
    """Return what `function` returns, as a term over its parameters and the attributes of `self`.

    Raises:
        NotComputable: if it has statements other than assignments to locals, conditional assignments and one return.
    """
    params = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
    params += [p.name.value for p in function.params.kwonly_params]
    environment = {name: Term("parameter", (), name) for name in params}
    if owner is not None:
        environment.pop("self", None)
    return Run(module, owner, MAX_DEPTH).function(function, environment)


@dataclass
class Run:
    """One symbolic execution; the methods are what a subclass may read otherwise."""

    module: Module
    owner: ClassInfo | None
    depth: int
    max_size: ClassVar[int] = MAX_SIZE
    inner: dict[str, tuple[cst.FunctionDef | cst.Lambda, int]] = field(default_factory=dict, kw_only=True)
    """The functions that functions define inside, and how deep; a local holds `Term("inner", (), key)`."""
    frames: tuple[Bindings, ...] = field(default=(), kw_only=True)
    """The locals of the functions around the one that is executed, the outermost first."""

    def function(self, function: cst.FunctionDef, environment: Bindings) -> Term:
        """Return what the function returns where its parameters are bound as in `environment`."""
        result = self.block(function.body.body, environment)
        if result is None:
            raise NotComputable("no return")
        return result

    def block(self, statements: Sequence[cst.CSTNode], environment: Bindings) -> Term | None:
        """Execute statements; return what the first `return` among them returns, None if there is none."""
        for place, statement in enumerate(statements):
            if isinstance(statement, cst.If):
                test = self.expression(statement.test, environment)
                known = self.decided(test)
                if known is not None:
                    taken = statement.body.body if known else _otherwise(statement)
                    return self.block([*taken, *statements[place + 1 :]], environment)
                if any(isinstance(node, cst.Return) for node in walk(statement)):
                    return self.ways(test, statement, statements[place + 1 :], environment)
                self.branch(test, statement, environment)
                continue
            if isinstance(statement, cst.FunctionDef) and not statement.decorators and statement.asynchronous is None:
                environment[statement.name.value] = self.defined(statement)
                continue
            if not isinstance(statement, (cst.SimpleStatementLine, cst.BaseSmallStatement)):
                raise NotComputable(_kind(statement))
            for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else (statement,):
                if isinstance(small, cst.Return):
                    return self.expression(small.value or cst.Name("None"), environment)
                self.small(small, environment)
        return None

    def decided(self, test: Term) -> bool | None:
        """Return what a test is known to be, None if it may be both."""
        return None

    def branch(self, test: Term, statement: cst.If, environment: Bindings) -> None:
        """Execute a conditional statement: a local that both ways bind differently becomes a `select`.

        One that a single way binds stays a local, of which nothing is known: no function of the file is meant by it.
        """
        yes, no = dict(environment), dict(environment)
        self.block(statement.body.body, yes)
        self.block(_otherwise(statement), no)
        for name in {*yes, *no}:
            if name not in yes or name not in no:
                environment[name] = Term("bound on a condition", (), name)
            elif yes[name] != no[name]:
                environment[name] = make("select", test, yes[name], no[name])
            else:
                environment[name] = yes[name]

    def ways(self, test: Term, statement: cst.If, rest: Sequence[cst.CSTNode], environment: Bindings) -> Term:
        """Return what a conditional statement that returns, and what stands behind it, return: either of two."""
        yes = self.block([*statement.body.body, *rest], dict(environment))
        no = self.block([*_otherwise(statement), *rest], dict(environment))
        if yes is None or no is None:
            raise NotComputable("a return under a condition, and none after it")
        return make("select", test, yes, no)

    def small(self, small: cst.BaseSmallStatement, environment: Bindings) -> None:
        """Execute one simple statement."""
        if isinstance(small, cst.Expr) and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString)):
            return
        if isinstance(small, cst.Assign):
            given = small.value
            turns = _turns_of(small)
            if isinstance(given, cst.Lambda):
                value = self.defined(given)
            elif turns is not None:
                value = self.each(turns, environment)
            else:
                value = self.expression(given, environment)
            for target in small.targets:
                self.bind(target.target, value, environment)
        elif isinstance(small, cst.AnnAssign) and small.value is not None:
            self.bind(small.target, self.expression(small.value, environment), environment)
        elif isinstance(small, cst.Del) and all(name in environment for name in _deleted(small)):
            for name in _deleted(small):
                environment[name] = Term("deleted", (), name)
        else:
            raise NotComputable(_kind(small))

    def each(self, turns: tuple[cst.BaseSimpleComp, int], environment: Bindings) -> Term:
        """Return what a comprehension gives the names that it is unpacked into, one by one."""
        node, count = turns
        over = self.expression(node.for_in.iter, environment)
        if (over.op == "tuple" and len(over.args) != count) or any(part.op == "star" for part in over.args):
            raise NotComputable("a comprehension over another number of things")
        if over.op != "tuple" and (over.op not in PARTS or over.args[1:2] == ()):
            raise NotComputable(_kind(node))
        made = []
        for place in range(count):
            inner = dict(environment)
            self.bind(node.for_in.target, make("index", over, constant(place)), inner)
            made.append(self.expression(node.elt, inner))
        return Term("tuple", tuple(made))

    def bind(self, target: cst.BaseExpression, value: Term, environment: Bindings) -> None:
        """Give the targets of an assignment their values."""
        if isinstance(target, cst.Name):
            environment[target.value] = value
        elif isinstance(target, (cst.Tuple, cst.List)):
            for index, element in enumerate(target.elements):
                if isinstance(element, cst.StarredElement):
                    raise NotComputable("a starred target")
                self.bind(element.value, make("index", value, constant(index)), environment)
        elif isinstance(target, cst.Subscript) and isinstance(target.value, cst.Name):
            self.write(target.value.value, target, value, environment)
        else:
            raise NotComputable("an assignment to an attribute or item")

    def write(self, name: str, target: cst.Subscript, value: Term, environment: Bindings) -> None:
        """Write a part of a local that was made to be written: one that no other local holds, too."""
        held = environment.get(name)
        if held is None or held.op not in ("empty_like", "written") or [*environment.values()].count(held) > 1:
            raise NotComputable("an assignment to an attribute or item")
        items = [self.slice(element.slice, environment) for element in target.slice]
        environment[name] = Term("written", (held, value, *items))

    def expression(self, node: cst.BaseExpression, environment: Bindings) -> Term:
        """Return the term of an expression."""
        term = self._expression(node, environment)
        if term.size > self.max_size:
            raise NotComputable("too large")
        return term

    def defined(self, function: cst.FunctionDef | cst.Lambda) -> Term:
        """Return what a local holds that names a function defined inside."""
        params = function.params
        if params.star_kwarg is not None or isinstance(params.star_arg, cst.Param):
            raise NotComputable("an inner function with variable arguments")
        given = (*params.posonly_params, *params.params, *params.kwonly_params)
        if any(param.name.value == "self" for param in given):
            raise NotComputable("an inner function with a `self` of its own")
        if any(param.default is not None for param in given):
            raise NotComputable("an inner function with a default")  # which is computed where it is defined
        key = str(len(self.inner))
        self.inner[key] = function, len(self.frames)
        return Term("inner", (), key)

    def _expression(self, node: cst.BaseExpression, environment: Bindings) -> Term:
        if isinstance(node, cst.Name):
            held = environment.get(node.value) or self.named(node)
            if held.op == "deleted":
                raise NotComputable("a local that is deleted is read")
            if held.op == "inner":
                raise NotComputable("an inner function that is more than called")
            return held
        if isinstance(node, (cst.Integer, cst.Float)):
            return constant(node.evaluated_value)
        if isinstance(node, cst.SimpleString) and isinstance(node.evaluated_value, str):
            return Term("constant", (), json.dumps(node.evaluated_value, ensure_ascii=False))
        if isinstance(node, (cst.SimpleString, cst.Ellipsis)):
            return Term("constant", (), self.module.code(node))
        if isinstance(node, cst.NamedExpr) and isinstance(node.target, cst.Name):
            environment[node.target.value] = value = self.expression(node.value, environment)
            return value
        if isinstance(node, cst.Attribute):
            return self.attribute(node, environment)
        if isinstance(node, cst.Call):
            return self.call(node, environment)
        if isinstance(node, cst.BinaryOperation):
            operands = (self.expression(side, environment) for side in (node.left, node.right))
            return make(BINARY[type(node.operator)], *operands)
        if isinstance(node, cst.UnaryOperation):
            name = {"Minus": "neg", "Not": "not"}.get(_kind(node.operator), _kind(node.operator))
            return make(name, self.expression(node.expression, environment))
        if isinstance(node, cst.Subscript):
            items = [self.slice(element.slice, environment) for element in node.slice]
            return make("index", self.expression(node.value, environment), *items)
        if isinstance(node, (cst.Tuple, cst.List)):
            return make("tuple", *(self.element(element, environment) for element in node.elements))
        if isinstance(node, cst.IfExp):
            parts = (self.expression(part, environment) for part in (node.test, node.body, node.orelse))
            return make("select", *parts)
        if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
            target = node.comparisons[0]
            sides = (self.expression(side, environment) for side in (node.left, target.comparator))
            return make(COMPARISON.get(type(target.operator), _kind(target.operator)), *sides)
        raise NotComputable(_kind(node))

    def named(self, node: cst.BaseExpression) -> Term:
        """Return the leaf of a name that no local has."""
        return Term("name", (), self.module.qualified(node))

    def attribute(self, node: cst.Attribute, environment: Bindings) -> Term:
        """Return the term of `a.b`."""
        if self.owner is not None and (name := self_attribute(node)) is not None:
            return Term("attribute", (), name)
        root: cst.BaseExpression = node
        while isinstance(root, cst.Attribute):
            root = root.value
        if isinstance(root, cst.Name) and root.value not in environment and root.value != "self":
            return self.named(node)
        return make(f".{node.attr.value}", self.expression(node.value, environment))

    def element(self, node: cst.Arg | cst.BaseElement, environment: Bindings) -> Term:
        """Return the term of an argument or of an element of a tuple."""
        if isinstance(node, cst.StarredElement) or (isinstance(node, cst.Arg) and node.star):
            raise NotComputable("a starred element")
        return self.expression(node.value, environment)

    def given(self, argument: cst.Arg, call: cst.Call, environment: Bindings) -> Term:
        """Return the term of an argument of a call; the sizes of a tensor may be starred where a shape is taken."""
        if argument.star == "*" and isinstance(call.func, cst.Attribute) and call.func.attr.value in SHAPED:
            sizes = self.expression(argument.value, environment)
            if "shape" in (sizes.op, *(part.op for part in sizes.args[:1])):
                return Term("star", (sizes,))
        return self.element(argument, environment)

    def starred_keywords(self, node: cst.Call, environment: Bindings) -> Bindings:
        """Return the keywords that the `**` arguments of a call stand for."""
        raise NotComputable("a starred argument")

    def slice(self, node: cst.BaseSlice, environment: Bindings) -> Term:
        """Return the term of an index or slice."""
        if isinstance(node, cst.Index):
            return self.expression(node.value, environment)
        if not isinstance(node, cst.Slice):
            raise NotComputable(_kind(node))
        ends = (self.expression(end or cst.Name("None"), environment) for end in (node.lower, node.upper, node.step))
        return make("slice", *ends)

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call, following helpers of the class and the file."""
        plain = [self.given(a, node, environment) for a in node.args if a.keyword is None and a.star != "**"]
        keywords = {a.keyword.value: self.expression(a.value, environment) for a in node.args if a.keyword is not None}
        if any(argument.star == "**" for argument in node.args):
            keywords |= self.starred_keywords(node, environment)
        method = self_attribute(node.func)
        if self.owner is not None and method is not None:
            if (helper := self.module.method(self.owner, method)) is not None:
                own = [] if _is_static(helper) else [Term("self")]
                return self.follow(helper, [*own, *plain], keywords)
            return operation("call", [Term("attribute", (), method), *plain], keywords)
        if isinstance(node.func, cst.Name) and (held := environment.get(node.func.value)) is not None:
            if held.op == "inner":
                inner, depth = self.inner[held.value]
                return self.follow(inner, plain, keywords, (*self.frames, environment)[: depth + 1])
        elif isinstance(node.func, cst.Name):
            if (helper := self.module.functions.get(node.func.value)) is not None:
                return self.follow(helper, plain, keywords)
        function = self.expression(node.func, environment)
        if function.op == "name":
            return operation(named_call(function.value.removeprefix("torch.")), plain, keywords)
        if function.op.startswith("."):
            if function.op.endswith("_"):
                raise NotComputable("an operation in place")
            return operation(named_call(function.op[1:]), [*function.args, *plain], keywords)
        if function.op == "dtype" or function.op == "shape":
            raise NotComputable(f"a call of {function.op}")
        return operation("call", [function, *plain], keywords)

    def follow(
        self,
        helper: cst.FunctionDef | cst.Lambda,
        plain: Sequence[Term],
        keywords: Mapping[str, Term],
        around: tuple[Bindings, ...] = (),
    ) -> Term:
        """Return what a helper returns for these arguments; one defined inside reads the locals `around` it, too."""
        if self.depth == 0:
            raise NotComputable("helpers nested too deeply")
        params = [*helper.params.posonly_params, *helper.params.params]
        if len(plain) > len(params) or any(argument.op == "star" for argument in plain):
            raise NotComputable("a helper with variable arguments")
        given = {param.name.value: value for param, value in zip(params, plain, strict=False)} | dict(keywords)
        named = {param.name.value for param in (*params, *helper.params.kwonly_params)}
        gathered = tuple(Term("keyword", (given.pop(name),), name) for name in sorted({*given} - named))
        if isinstance(helper.params.star_kwarg, cst.Param):
            given[helper.params.star_kwarg.name.value] = Term(GATHERED, gathered)
        elif gathered:
            raise NotComputable(f"a helper that takes no `{gathered[0].value}`")
        for param in (*params, *helper.params.kwonly_params):
            if param.name.value not in given:
                if param.default is None:
                    raise NotComputable("a missing argument")
                given[param.name.value] = self.expression(param.default, {})
        given.pop("self", None)
        below = replace(self, depth=self.depth - 1, frames=around)
        if around:
            own = _own_names(helper)
            given = {**{name: value for name, value in around[-1].items() if name not in own}, **given}
        if isinstance(helper, cst.Lambda):
            return below.expression(helper.body, given)
        return below.function(helper, given)


def operation(name: str, plain: Sequence[Term], keywords: Mapping[str, Term]) -> Term:
    """Return the term of a call, with keywords moved to the positions that the function's signature gives them."""
    name = ALIASES.get(name, name)
    order = ARGUMENTS.get(name, ())
    arguments = list(plain)
    waiting = {KEYWORDS.get(key, key): value for key, value in keywords.items()}
    while len(arguments) < len(order) and order[len(arguments)] in waiting:
        arguments.append(waiting.pop(order[len(arguments)]))
    arguments += [Term("keyword", (waiting[key],), key) for key in sorted(waiting)]
    return make(name, *arguments)


def subterms(term: Term) -> Iterator[Term]:
    """Yield `term` and everything below it."""
    yield term
    for argument in term.args:
        yield from subterms(argument)


@dataclass(frozen=True)
class Pattern:
    """A computation to look for, written as a function in Python.

    Its parameters stand for any parameter of the candidate, `self.NAME` for any attribute of the candidate's `self`,
    and parameters in capitals, and `self.EPS`, for a constant, too.
    """

    source: str
    marks: Mapping[str, object] = field(default_factory=dict)
    """What a match means to the transform."""

    @cached_property
    def term(self) -> Term:
        """The canonical form of the pattern."""
        module = Module(cst.parse_module(f"import torch\n{self.source}"))
        if module.classes:
            owner = next(iter(module.classes.values()))
            return body(owner.methods["forward"], module, owner)
        return body(list(module.functions.values())[-1], module)

    def match(self, term: Term) -> Bindings | None:
        """Return what the pattern's names stand for in `term`, or None if `term` is another computation."""
        return next(unify(self.term, term, {}), None)


_NUMBER = "EPS"
"""The attribute in patterns that is a number, which a file may write in its place."""


def unify(pattern: Term, term: Term, bound: Bindings) -> Iterator[Bindings]:
    """Yield every way to read `term` as `pattern`, operands of a commutative operation in either order."""
    if pattern.op in ("parameter", "attribute"):
        if pattern.value in bound:
            if bound[pattern.value] == term:
                yield bound
        elif _may_bind(pattern, term) and term not in bound.values():
            yield {**bound, pattern.value: term}
        return
    if (pattern.op, pattern.value, len(pattern.args)) != (term.op, term.value, len(term.args)):
        return
    yield from _unify_all(pattern.args, term.args, bound)
    if pattern.commutes:
        yield from _unify_all(pattern.args, term.args[::-1], bound)


def _unify_all(patterns: Sequence[Term], terms: Sequence[Term], bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for first in unify(patterns[0], terms[0], bound):
        yield from _unify_all(patterns[1:], terms[1:], first)


def _may_bind(pattern: Term, term: Term) -> bool:
    if pattern.value.isupper() and (pattern.op == "parameter" or pattern.value == _NUMBER):
        return term.op in (pattern.op, "constant")
    return term.op == pattern.op


def _own_names(function: cst.FunctionDef | cst.Lambda) -> set[str]:
    """Return the names that a function binds itself, which hide those around it from its first line on."""
    inside = list(walk(function.body))
    defined = {node.name.value for node in inside if isinstance(node, (cst.FunctionDef, cst.ClassDef))}
    return defined.union(*(names_bound_by(node) for node in inside))


def _turns_of(small: cst.Assign) -> tuple[cst.BaseSimpleComp, int] | None:
    """Return a comprehension that an assignment takes apart at once, and into how many; None for other values."""
    value, names = small.value, small.targets[0].target
    if not isinstance(value, (cst.GeneratorExp, cst.ListComp)) or not isinstance(names, (cst.Tuple, cst.List)):
        return None
    one = value.for_in.inner_for_in is None and not value.for_in.ifs and value.for_in.asynchronous is None
    plain = not any(isinstance(element, cst.StarredElement) for element in names.elements)
    plain = plain and not any(isinstance(node, cst.NamedExpr) for node in walk(value))  # which outlives it
    return (value, len(names.elements)) if one and plain and len(small.targets) == 1 else None


def _is_static(method: cst.FunctionDef) -> bool:
    """Whether a method is given no object."""
    decorators = [decorator.decorator for decorator in method.decorators]
    return any(isinstance(decorator, cst.Name) and decorator.value == "staticmethod" for decorator in decorators)


def _deleted(small: cst.Del) -> list[str]:
    """Return the locals that a statement deletes; an empty name stands for something else."""
    targets = small.target.elements if isinstance(small.target, cst.Tuple) else [cst.Element(small.target)]
    return [element.value.value if isinstance(element.value, cst.Name) else "" for element in targets]


def _otherwise(statement: cst.If) -> Sequence[cst.CSTNode]:
    """Return the statements that run where the test does not hold."""
    orelse = statement.orelse
    if isinstance(orelse, cst.If):
        return [orelse]
    return () if orelse is None else orelse.body.body


def _kind(node: cst.CSTNode) -> str:
    return type(node).__name__
