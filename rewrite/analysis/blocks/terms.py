"""What a method computes in one decode step: in evaluation, one token a row, with a cache that is there.

A symbolic execution that knows the outcome of the tests that a step decides, leaves out dropout, and reads the calls
that earlier transforms have put in by what their operators declare.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import libcst as cst
import libcst.matchers as m

from rewrite.analysis import effects
from rewrite.analysis.blocks.called import Called, check_calls
from rewrite.analysis.blocks.keywords import Gathering
from rewrite.analysis.effects import Scope, effects_of
from rewrite.analysis.patterns.norm_patterns import runtime_norm
from rewrite.analysis.terms.computation import Bindings, NotComputable, subterms
from rewrite.analysis.terms.operator_terms import as_declared
from rewrite.analysis.terms.spelling import NONE, Term, constant, make, softmax_of
from rewrite.analysis.tree import cache_names
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, without_runtime
from rewrite.analysis.tree.nodes import calls_in, parameters

MAX_DEPTH = 4
PASSED = cache_names.PASSED
CACHE = PASSED[0]
"""What terms call the cache, by whichever name it is passed on."""
CACHES = (*PASSED, "past_key_value", "layer_past")
"""That, and what files call it that are older than the names."""
_OF_CACHES = ("update", "get_conv_state", "get_recurrent_state")
DROPOUT = ("torch.nn.Dropout", "torch.nn.Identity")
"""Modules that return their input in evaluation."""
SOFTMAX = ("torch.nn.Softmax",)
LINEAR = ("torch.nn.Linear", "torch.nn.modules.linear.Linear")
NORMS = ("torch.nn.LayerNorm", "torch.nn.RMSNorm")
_NEW = ("add", "mul", "div", "neg", "pow", "rsqrt", "matmul", "softmax", "sigmoid", "tanh")
"""Operations whose result is a tensor of its own."""
_IN_PLACE = {cst.AddAssign: "add", cst.MultiplyAssign: "mul", cst.DivideAssign: "div"}
_FILLS = m.Call(
    func=m.Attribute(
        value=m.SaveMatchedNode(m.Subscript(value=m.Name(m.SaveMatchedNode(m.DoNotCare(), "name"))), "target"),
        attr=m.Name("copy_"),
    ),
    args=[m.Arg(keyword=None, star="")],
)
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


def computed_in_step(
    function: cst.FunctionDef, module: Module, owner: ClassInfo, names: Mapping[str, str] | None = None
) -> Term:
    """Return what a method of `owner` returns in a decode step, over its parameters and the attributes of `self`.

    Args:
        function: the method.
        module: its file.
        owner: its class.
        names: what some of the parameters are called in the term, by their own names; the cache is `CACHE`.

    Raises:
        NotComputable: if it does something that has no canonical form, or besides what it returns.
    """
    return run_step(Step(module, owner, MAX_DEPTH), function, names or {})


def run_step(
    step: Step, function: cst.FunctionDef, names: Mapping[str, str], trusted: Container[str] | None = ()
) -> Term:
    """Do what `computed_in_step` does with another kind of execution.

    Calls of the attributes that are `trusted` may write their arguments in place, None for all: who reads the term
    calls them in the order of the method.
    """
    if step.owner is not None and (why := why_not_read(step.owner, function, step.module)):
        raise NotComputable(why)
    known = dict.fromkeys(cache_parameters(function)[:1], CACHE) | dict(names)
    taken = set(known.values())
    environment = {
        name: Term("parameter", (), known.get(name) or (f"{name} of the caller" if name in taken else name))
        for name in parameters(function)
        if name != "self"
    }
    result = step.function(function, environment)
    check_calls(step.calls, result, trusted)
    return result


def why_not_read(owner: ClassInfo, function: cst.FunctionDef, module: Module) -> str:
    """Say why a method of a class may run other code than it shows; empty where it does not."""
    names = effects_of(module).names
    if not names.means(owner.name):
        return f"{owner.name} is defined or changed more than once"
    if why := names.why_strange(owner):
        return why
    name = function.name.value
    holder = next((info for info in names.owners(owner) if name in info.methods), owner)
    if holder.methods.get(name) is function and not names.method_is_plain(holder, name):
        return f"{holder.name}.{name} is decorated or defined more than once"
    if name in names.stored or "*" in names.stored:
        return f"{name} is also set from outside"
    if any(name in info.assigned for info in (*names.owners(owner), *names.heirs(owner))):
        return f"{name} is also set by an object itself"
    return ""


def passed_cache(function: cst.FunctionDef | None) -> str | None:
    """Return the parameter that is the cache by the name under which transformers passes it on."""
    names = parameters(function) if function is not None else []
    return next((name for name in PASSED if name in names), None)


def canonical(names: list[str]) -> list[str]:
    """Return names of parameters as terms have them: the cache that is passed on is `CACHE`."""
    return [CACHE if name in PASSED else name for name in names]


def cache_parameters(function: cst.FunctionDef) -> list[str]:
    """Return the parameters that are caches: by what transformers calls them, or because of what they are asked."""
    takes = parameters(function)
    named = [name for name in takes if name in CACHES]
    updated = [m.Attribute(value=m.Name(name), attr=m.OneOf(*map(m.Name, _OF_CACHES))) for name in takes]
    return named or [
        name
        for name, update in zip(takes, updated, strict=True)
        if any(m.matches(call.func, update) for call in calls_in(function.body))
    ]


@dataclass
class Step(Gathering):
    """One symbolic execution of a decode step."""

    max_size: ClassVar[int] = 20_000
    """Latents are the result of one update, and everything after it is made of them: DeepSeek-V3's takes 8,790."""
    calls: list[Called] = field(default_factory=list)
    """Every call of something else than torch's functions, in the order of execution."""
    scope: Scope | None = None

    def function(self, function: cst.FunctionDef, environment: Bindings) -> Term:
        """Return what the function returns where its parameters are bound as in `environment`."""
        self.scope = effects_of(self.module).scope(function, self.owner)
        if self.scope.unknown:
            raise NotComputable(self.scope.unknown)
        return super().function(function, environment)

    def block(self, statements: Sequence[cst.CSTNode], environment: Bindings) -> Term | None:
        """Execute statements, those left out that only complain."""
        return super().block([s for s in statements if not complains(s)], environment)

    def decided(self, test: Term) -> bool | None:
        """Return what a step decides a test to be."""
        return _outcome(test)

    def small(self, small: cst.BaseSmallStatement, environment: Bindings) -> None:
        """Execute one simple statement; `x += y` is `x = x + y` where nothing shares x."""
        if isinstance(small, cst.AnnAssign) and small.value is None:
            return
        if isinstance(small, cst.AugAssign) and isinstance(small.target, cst.Name):
            environment[small.target.value] = self.augmented(small, environment)
            return
        if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
            if self.fills(small.value, environment):
                return
            raise NotComputable(f"a call for its effect: {self.module.code(small.value.func)}")
        super().small(small, environment)

    def fills(self, call: cst.Call, environment: Bindings) -> bool:
        """Execute `new[..., a:b].copy_(part)` of a local that is a new tensor of nobody else: see `filled`."""
        found = m.extract(call, _FILLS)
        if found is None or (name := str(found["name"])) not in environment:
            return False
        old = environment[name]
        if any(inner == old for other, term in environment.items() if other != name for inner in subterms(term)):
            return False
        target = cst.ensure_type(found["target"], cst.Subscript)
        items = [self.slice(element.slice, environment) for element in target.slice]
        new = filled(old, items, self.expression(call.args[0].value, environment))
        if new is not None:
            environment[name] = new
        return new is not None

    def augmented(self, small: cst.AugAssign, environment: Bindings) -> Term:
        """Return what the target of `x += y` is afterwards, unless another local may share the tensor."""
        value, added = self.expression(small.target, environment), self.expression(small.value, environment)
        operation = _IN_PLACE.get(type(small.operator))
        if operation == "add" and value.op == added.op == "tuple":
            return Term("tuple", (*value.args, *added.args))
        holders = [name for name, term in environment.items() if self.may_share(term, value)]
        if operation is None or value.op == "parameter" or len(holders) > 1:
            raise NotComputable("an operation in place")
        return make(operation, value, added)

    def may_share(self, term: Term, value: Term) -> bool:
        """Whether a tensor may lie in the memory of another one that it is computed from, or be it."""
        if term == value or not term.args:
            return term == value
        if term.op in _NEW or self.is_norm(term):
            return False
        return any(self.may_share(argument, value) for argument in term.args)

    def is_norm(self, term: Term) -> bool:
        """Whether a term is the call of a norm of the file that an operator computes, or of torch's."""
        if term.op != "call" or term.args[0].op != "attribute" or self.owner is None:
            return False
        names, classes = effects_of(self.module).names, self.module.classes
        built = [getattr(v, "func", None) for v in values_of(term.args[0].value, self.owner, self.module)]
        known = [names.resolved(func) if isinstance(func, cst.BaseExpression) else "" for func in built]
        return bool(known) and all(
            name in NORMS or (name in classes and runtime_norm(classes[name], self.module) is not None)
            for name in known
        )

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
        root, names = node, effects_of(self.module).names
        while isinstance(root, cst.Attribute):
            root = root.value
        if isinstance(root, cst.Name) and names.is_bound(root.value) and not names.means(root.value):
            raise NotComputable(f"`{root.value}` may mean several things")
        return Term("name", (), without_runtime(self.module.qualified(node)))

    def element(self, node: cst.Arg | cst.BaseElement, environment: Bindings) -> Term:
        """Return the term of an argument or element, `star` of one that stands for several."""
        if isinstance(node, cst.StarredElement) or (isinstance(node, cst.Arg) and node.star == "*"):
            return Term("star", (self.expression(node.value, environment),))
        return super().element(node, environment)

    def call(self, node: cst.Call, environment: Bindings) -> Term:
        """Return the term of a call: none of dropout, and what earlier transforms merged taken apart again."""
        attribute = self_attribute(node.func)
        if attribute is not None and self.owner is not None and len(node.args) == 1:
            if is_built_from(attribute, DROPOUT, self.owner, self.module):
                return self.expression(node.args[0].value, environment)
            if (made := self.softmax(attribute, node.args[0], environment)) is not None:
                return made
        self.check_helper(node)
        called = super().call(node, environment)
        if called.op in ("nn.functional.dropout", "dropout"):
            return _without_dropout(called)
        if called.op == "call" and called.args[0].op == "attribute" and self.owner is not None:
            called = self.by_position(called)
        if self.scope is not None and (called.op == "call" or self.is_foreign(node.func)):
            self.calls.append(Called(called, self.scope.value(node).effect))
        return as_declared(called)

    def softmax(self, attribute: str, argument: cst.Arg, environment: Bindings) -> Term | None:
        """Return what a module that is certainly one `nn.Softmax(dim=number)` computes, None if it is another."""
        assert self.owner is not None
        values = values_of(attribute, self.owner, self.module)
        if len(values) != 1 or not is_built_from(attribute, SOFTMAX, self.owner, self.module):
            return None
        made = Term("call", tuple(self.element(a, {}) for a in cst.ensure_type(values[0], cst.Call).args))
        numbers = made.args if all(number.op == "constant" for number in made.args) else ()
        return softmax_of(Term("call", numbers), self.expression(argument.value, environment))

    def is_foreign(self, function: cst.BaseExpression) -> bool:
        """Whether a function is another library's, whose call may do something besides what it returns."""
        root = function
        while isinstance(root, cst.Attribute):
            root = root.value
        if not isinstance(root, cst.Name) or root.value not in self.module.imports:
            return False
        return not self.module.imports[root.value].startswith(".")

    def by_position(self, called: Term) -> Term:
        """Return the call of a part with keywords at their positions, where its class says which those are."""
        assert self.owner is not None
        names = effects_of(self.module).names
        built = [v.func for v in values_of(called.args[0].value, self.owner, self.module) if isinstance(v, cst.Call)]
        orders = {tuple(_takes(self.module, names.resolved(func))) for func in built}
        plain = [argument for argument in called.args[1:] if argument.op != "keyword"]
        named = {argument.value: argument.args[0] for argument in called.args[1:] if argument.op == "keyword"}
        order = orders.pop() if len(orders) == 1 else ()
        while named and len(plain) < len(order) and order[len(plain)] in named:
            plain.append(named.pop(order[len(plain)]))
        rest = (Term("keyword", (named[name],), name) for name in sorted(named))
        return Term("call", (called.args[0], *plain, *rest))

    def check_helper(self, node: cst.Call) -> None:
        """Refuse a function or method of the file that may not be what its definition says."""
        names, method = effects_of(self.module).names, self_attribute(node.func)
        if isinstance(node.func, cst.Name) and node.func.value in self.module.functions:
            name = node.func.value
            if not names.means(name) or not names.function_is_plain(self.module.functions[name]):
                raise NotComputable(f"`{name}` is decorated or may mean several things")
        elif method is not None and self.owner is not None:
            helper = self.module.method(self.owner, method)
            if helper is None:
                return
            heirs = [heir.name for heir in names.heirs(self.owner) if method in heir.methods]
            assigned = method in self.owner.assigned
            if heirs or assigned or (why := why_not_read(self.owner, helper, self.module)):
                raise NotComputable(f"self.{method} may be replaced" if heirs or assigned else why)


def filled(tensor: Term, items: Sequence[Term], part: Term) -> Term | None:
    """Return a new tensor after a part of its last dimension was written, None where that has no term.

    Both parts written, it is `joined(first, second, new)`: `cat((first, second), -1)` in the shape and dtype of `new`.
    """
    if len(items) != 2 or items[0] != Term("constant", (), "...") or items[1].op != "slice":
        return None
    start, end, step = items[1].args
    if tensor.op == "new_empty" and (start, step) == (NONE, NONE) and end != NONE:
        return Term("half_filled", (tensor, end, part))
    if tensor.op == "half_filled" and (start, end, step) == (tensor.args[1], NONE, NONE):
        return Term("joined", (tensor.args[2], part, tensor.args[0]))
    return None


def _takes(module: Module, name: str) -> list[str]:
    """Return what `forward` of a class takes, in order: of the file, or one of torch's with a single input."""
    if name in module.classes:
        forward = module.method(module.classes[name], "forward")
        if forward is None or forward.params.star_arg is not cst.MaybeSentinel.DEFAULT:
            return []
        return [param.name.value for param in (*forward.params.posonly_params, *forward.params.params)][1:]
    return ["input"] if name.startswith("torch.nn.") else []


def complains(statement: cst.CSTNode) -> bool:
    """Whether a statement does nothing but complain, if something is not as it should be."""
    if isinstance(statement, cst.If) and statement.orelse is None:
        return all(m.matches(inner, _COMPLAINS) for inner in statement.body.body)
    return m.matches(statement, _COMPLAINS)


def _without_dropout(called: Term) -> Term:
    """Return what goes into a call of the function `dropout`, which does nothing in evaluation.

    Raises:
        NotComputable: if it is told to do something in evaluation too.
    """
    plain = [argument for argument in called.args if argument.op != "keyword"]
    training = keyword(called, "training") or (plain[2] if len(plain) > 2 else None)
    never = Term("name", (), "False")
    if plain and (training == never or training == Term("attribute", (), "training")):
        return plain[0]
    rate = keyword(called, "p") or (plain[1] if len(plain) > 1 else None)
    if plain and rate == constant(0):
        return plain[0]
    raise NotComputable("dropout that is not only for training")


def values_of(attribute: str, owner: ClassInfo, module: Module) -> tuple[cst.BaseExpression, ...]:
    """Return all that `self.<attribute>` may be; nothing where it may be something else."""
    found = effects.attribute(owner, attribute, effects_of(module).names)
    return () if found.unknown else found.values


def is_built_from(attribute: str, classes: tuple[str, ...], owner: ClassInfo, module: Module) -> bool:
    """Whether all that `self.<attribute>` may be is an object of one of `classes`."""
    values, names = values_of(attribute, owner, module), effects_of(module).names
    return bool(values) and all(isinstance(v, cst.Call) and names.resolved(v.func) in classes for v in values)


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


@dataclass
class Assuming(Step):
    """An execution that takes for granted that what the configuration decides and nobody can read is not asked for.

    Who writes a step by what it returns asks, before the step, that no test of `assumed` holds.
    """

    assumed: list[Term] = field(default_factory=list)

    def branch(self, test: Term, statement: cst.If, environment: Bindings) -> None:
        """Execute a conditional statement, or leave out one without an `else`."""
        calls = len(self.calls)
        try:
            super().branch(test, statement, environment)
        except NotComputable:
            if statement.orelse is not None or not of_the_object(test):
                raise
            del self.calls[calls:]
            self.assumed.append(test)


def is_number(attribute: str, info: ClassInfo, module: Module, depth: int = 4) -> bool:
    """Whether an attribute is a number: a field of the configuration, or computed from such; surely no tensor."""
    field = m.Attribute(value=m.Name("config") | m.Attribute(value=m.Name("self"), attr=m.Name("config")))

    def counts(value: cst.BaseExpression) -> bool:
        if m.matches(value, field | m.Integer() | m.Float()):
            return True
        if isinstance(value, cst.UnaryOperation):
            return counts(value.expression)
        if isinstance(value, cst.BinaryOperation):
            return counts(value.left) and counts(value.right)
        if m.matches(value, m.Attribute(value=m.Name("self"))):
            return depth > 0 and is_number(value.attr.value, info, module, depth - 1)  # type: ignore[attr-defined]
        return (
            isinstance(value, cst.Call) and module.qualified(value.func) == "math.sqrt" and counts(value.args[0].value)
        )

    values = values_of(attribute, info, module)
    return bool(values) and all(map(counts, values))


def affirmed(test: Term) -> Term:
    """Return a test without the `not` before it."""
    return test.args[0] if test.op == "not" else test


def decided(term: Term, test: Term, holds: bool) -> Term:
    """Return a term in which the choices by a test, which is no `not`, have been made."""
    known: dict[Term, Term] = {}

    def read(inner: Term) -> Term:
        if inner.args and inner not in known:
            known[inner] = _read(inner)
        return known.get(inner, inner)

    def _read(inner: Term) -> Term:
        if inner.op == "select" and affirmed(inner.args[0]) == test:
            return read(inner.args[1 if holds is (inner.args[0] == test) else 2])
        return Term(inner.op, tuple(map(read, inner.args)), inner.value)

    return read(term)


def of_the_object(term: Term) -> bool:
    """Whether a term is made of the object's attributes, and of constants beside them."""
    plain, leaves = (NONE, Term("name", (), "True"), Term("name", (), "False")), list(_leaves(term))
    known = all(leaf.op in ("attribute", "constant") or leaf in plain for leaf in leaves)
    return known and any(leaf.op == "attribute" for leaf in leaves)


def _leaves(term: Term) -> Iterator[Term]:
    if not term.args:
        yield term
    for argument in term.args:
        yield from _leaves(argument)
