"""One function: which of its locals may share memory, and what each statement of it may do.

Sharing is decided once for the whole function, whatever the order of its statements: two locals are in one class
where one was ever made from the other by something that may return a view. Everything that code outside the function
can reach, parameters and attributes included, is one class, `HEAP`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import libcst as cst

from rewrite.analysis.effects.attributes import attribute
from rewrite.analysis.effects.bound import bound, locals_of, targets
from rewrite.analysis.effects.call_effects import called, is_parameter, makes_new_tensor
from rewrite.analysis.effects.effect import HEAP, NOTHING, Effect, Value, union
from rewrite.analysis.effects.effect_summary import own_parameters
from rewrite.analysis.effects.known import NO_TENSOR, OF_TENSORS
from rewrite.analysis.effects.name_bindings import is_self
from rewrite.analysis.tree.module import ClassInfo, of_kind, parts, self_attribute, walk
from rewrite.analysis.tree.nodes import given_names, parameters

if TYPE_CHECKING:
    from rewrite.analysis.effects.analysis import Effects

_OWN = (cst.FunctionDef, cst.Lambda, cst.ClassDef)
_SHARING = (
    *(cst.Assign, cst.AugAssign, cst.AnnAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.WithItem),
    *(cst.MatchAs, cst.MatchStar, *_OWN, cst.Call),
)
"""What may make a name mean what another one does."""


class Scope:
    """What is known about one function of the file."""

    def __init__(
        self, effects: Effects, function: cst.FunctionDef, owner: ClassInfo | None, depth: int, apart: bool = False
    ):
        self.effects = effects
        self.names = effects.names
        self.module = effects.module
        self.function = function
        self.owner = owner
        self.depth = depth
        self.apart = apart
        """Whether each parameter is memory of its own, for who knows what a call gives."""
        self._values: dict[int, Value] = {}
        self._classes: dict[str, str] = {}
        self._indexed: set[int] = set()

    @cached_property
    def locals(self) -> frozenset[str]:
        """Every name that the function binds, parameters included."""
        return locals_of(self.function)

    @cached_property
    def single(self) -> dict[str, cst.BaseExpression]:
        """The value of each local that is bound once, by `name = value` or beside others, and is no parameter."""
        found: dict[str, cst.BaseExpression] = {}
        for node in of_kind(self.function.body, cst.Assign, cst.AnnAssign):
            if isinstance(node, cst.Assign):
                made = given_names(node)
            elif isinstance(node.target, cst.Name) and node.value is not None:
                made = {node.target.value: node.value}
            else:
                continue
            found |= {name: value for name, value in made.items() if self.times[name] == 1}
        return {name: value for name, value in found.items() if name not in parameters(self.function)}

    @cached_property
    def unpacked(self) -> list[tuple[cst.Tuple, cst.BaseExpression]]:
        """The targets and value of every assignment of several names at once, none of which is assigned elsewhere."""
        lines = [node for node in walk(self.function.body) if isinstance(node, cst.Assign)]
        found = [(line.targets[0].target, line.value) for line in lines if len(line.targets) == 1]
        times = self.times
        return [
            (target, value)
            for target, value in found
            if isinstance(target, cst.Tuple) and all(times[name] == 1 or name == "_" for name in targets(target))
        ]

    @cached_property
    def gathered(self) -> frozenset[str]:
        """The locals that are lists since a star gathers them, `*rest, last = shape`, and nothing else binds them."""
        stars = [e for target, _ in self.unpacked for e in target.elements if isinstance(e, cst.StarredElement)]
        return frozenset(star.value.value for star in stars if isinstance(star.value, cst.Name))

    def assigned(self, name: str) -> list[cst.BaseExpression]:
        """Return every value that a statement `name = value` gives a local."""
        return self._assigned.get(name, [])

    @cached_property
    def _assigned(self) -> dict[str, list[cst.BaseExpression]]:
        found: dict[str, list[cst.BaseExpression]] = {}
        for node in walk(self.function.body):
            if type(node) is cst.Assign:
                for target in node.targets:
                    for name in targets(target.target):
                        found.setdefault(name, []).append(node.value)
        return found

    @cached_property
    def functions(self) -> dict[str, cst.FunctionDef]:
        """The functions that the function defines inside itself, each the only meaning of its name, undecorated."""
        found = [node for node in walk(self.function.body) if isinstance(node, cst.FunctionDef)]
        return {node.name.value: node for node in found if self.times[node.name.value] == 1 and not node.decorators}

    @cached_property
    def objects(self) -> frozenset[str]:
        """The locals that are asked for an attribute that neither tensors nor containers have: modules, for one."""
        asked = (node for node in walk(self.function.body) if isinstance(node, cst.Attribute))
        return frozenset(
            node.value.value
            for node in asked
            if isinstance(node.value, cst.Name) and node.attr.value not in OF_TENSORS and node.value.value != "self"
            if not node.attr.value.endswith("_")
        )

    def captured(self, function: cst.FunctionDef) -> frozenset[str]:
        """Return the locals that a function inside this one reads when it is called."""
        names = {node.value for node in walk(function.body) if isinstance(node, cst.Name)}
        return frozenset(names) & self.locals - frozenset(parameters(function))

    @cached_property
    def order(self) -> dict[int, int]:
        """The place of every statement of the function in the text, by its `id`."""
        lines = (node for node in walk(self.function.body) if isinstance(node, cst.BaseStatement))
        return {id(line): place for place, line in enumerate(lines)}

    @cached_property
    def unknown(self) -> str:
        """Why nothing can be said about the function, `""` if something can."""
        if self.function.asynchronous is not None:
            return "it is asynchronous"
        if "self" in bound(self.function.body):
            return "it binds `self` anew"
        declared = [node for node in walk(self.function.body) if isinstance(node, (cst.Nonlocal, cst.Global))]
        if declared:
            return f"it has `{self.module.code(declared[0])}`"
        return ""

    def of(self, node: cst.CSTNode) -> Effect:
        """Return what running a statement, or evaluating an expression, may do."""
        self._settled  # noqa: B018  decides which locals share memory
        return Effect(anything=self.unknown) if self.unknown else self._effect(node)

    def trusting(self, calls: Iterable[cst.Call]) -> Scope:
        """Return a scope of the same function that takes these calls for pure, each giving a tensor of its own."""
        scope = Scope(self.effects, self.function, self.owner, self.depth, self.apart)
        for call in calls:
            inside = union(self.of(argument.value) for argument in call.args)
            scope._values[id(call)] = Value(frozenset(), inside | self.of(call.func))
        return scope

    def root(self, name: str) -> str:
        """Return what stands for all locals that may share memory with `name`; `HEAP` where others may."""
        self._settled  # noqa: B018
        return self._find(name)

    def memory(self, names: Iterable[str]) -> frozenset[str]:
        """Return the classes of roots."""
        return frozenset(self.root(name) for name in names)

    def value(self, node: cst.BaseExpression) -> Value:
        """Return what an expression does and whose memory its value may share."""
        found = self._values.get(id(node))
        if found is None:
            found = self._values[id(node)] = self._value(node)
        return found

    def join(self, roots: Iterable[str]) -> None:
        """Take all these roots for one."""
        first = ""
        for name in roots:
            name = self._find(name)
            if first and name != first:
                first, name = (name, first) if name == HEAP else (first, name)
                self._classes[name] = first
            first = first or name

    # Which locals share memory

    @cached_property
    def _settled(self) -> bool:
        own = own_parameters(self.function, self.owner, self.names) if self.apart else []
        self.join([HEAP, *(name for name in parameters(self.function) if name not in own)])
        for node in of_kind(self.function.body, *_SHARING):
            self._share(node)
        return True

    def _find(self, name: str) -> str:
        while (above := self._classes.get(name, name)) != name:
            name = above
        return name

    def _share(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            for target in node.targets:
                self._share_target(target.target, self.value(node.value).roots)
        elif isinstance(node, cst.AugAssign):  # a list that is added to holds what was added
            holds = isinstance(node.operator, cst.AddAssign) and not _is_number(node.value)
            if holds and not self.is_tensor(node.target):
                self._share_target(node.target, self.value(node.value).roots)
        elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)) and node.value is not None:
            self._share_target(node.target, self.value(node.value).roots)
        elif isinstance(node, (cst.For, cst.CompFor)):
            self._share_target(node.target, self.value(node.iter).roots)
        elif isinstance(node, cst.WithItem) and node.asname is not None:
            self._share_target(node.asname.name, frozenset({HEAP}))
        elif isinstance(node, (cst.MatchAs, cst.MatchStar)) and node.name is not None:
            self.join([HEAP, node.name.value])
        elif isinstance(node, _OWN):
            captured = {inner.value for inner in walk(node.body) if isinstance(inner, cst.Name)} & self.locals
            self.join([HEAP, *captured])  # whoever calls it may keep what it sees
        elif isinstance(node, cst.Call):
            value = self.value(node)
            for group in value.joins:
                self.join(group)
            if value.effect.writes:  # a list now holds what was appended
                self.join(value.roots)

    def _share_target(self, target: cst.CSTNode, roots: frozenset[str]) -> None:
        if isinstance(target, cst.Name):
            self.join([target.value, *roots])
        elif isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._share_target(element.value, roots)
        elif isinstance(target, cst.StarredElement):
            self._share_target(target.value, roots)
        elif isinstance(target, (cst.Attribute, cst.Subscript)):
            copied = isinstance(target, cst.Subscript) and self.is_tensor(target.value)  # numbers, no reference
            self.join([*self.value(target.value).roots, *(() if copied else roots)])

    # Statements

    def _effect(self, node: cst.CSTNode) -> Effect:
        if isinstance(node, cst.BaseExpression):
            return self.value(node).effect
        special = _STATEMENTS.get(type(node))
        if special is not None:
            return special(self, node)
        return self._all(parts(node))

    def _all(self, nodes: Iterable[cst.CSTNode]) -> Effect:
        return union(self._effect(node) for node in nodes if not isinstance(node, cst.BaseParenthesizableWhitespace))

    def _assign(self, node: cst.Assign) -> Effect:
        return self._effect(node.value) | union(self._target(target.target) for target in node.targets)

    def _annotated(self, node: cst.AnnAssign) -> Effect:
        return NOTHING if node.value is None else self._effect(node.value) | self._target(node.target)

    def _augmented(self, node: cst.AugAssign) -> Effect:
        """`x += y` binds x and may write the memory that it had."""
        held = self.value(node.target)
        return self._effect(node.value) | held.effect | self._target(node.target) | Effect(writes=held.roots)

    def _target(self, node: cst.CSTNode) -> Effect:
        if isinstance(node, cst.Name):
            return Effect(binds=frozenset({node.value}))
        if isinstance(node, (cst.Tuple, cst.List)):
            return union(self._target(element.value) for element in node.elements)
        if isinstance(node, cst.StarredElement):
            return self._target(node.value)
        if isinstance(node, cst.Attribute):
            stored = Effect(stores=frozenset({node.attr.value})) | self.value(node.value).effect
            if node.attr.value in self.names.properties or "__setattr__" in self.names.methods:
                stored = stored | Effect(anything=f"setting .{node.attr.value} runs code")
            if node.attr.value == "data":  # the tensor keeps its identity, and holds other numbers
                stored = stored | Effect(writes=self.value(node.value).roots)
            return stored
        if isinstance(node, cst.Subscript):
            written = Effect(writes=self.value(node.value).roots)
            return written | self._effect(node.value) | self._all(node.slice) | self._overloaded()
        return Effect(anything="an assignment of an unknown form")

    def _overloaded(self) -> Effect:
        owner = self.names.own_operators
        return Effect(anything=f"{owner} defines operators of its own") if owner else NOTHING

    def _loop(self, node: cst.For) -> Effect:
        inside = self._all([node.body, *([node.orelse] if node.orelse is not None else [])])
        inside = replace(inside, leaves=inside.leaves - {"break", "continue"})
        return self._effect(node.iter) | self._iterates(node.iter) | self._target(node.target) | inside

    def _while(self, node: cst.While) -> Effect:
        inside = self._all([node.body, *([node.orelse] if node.orelse is not None else [])])
        inside = replace(inside, leaves=inside.leaves - {"break", "continue"})
        return self._effect(node.test) | inside

    def _iterates(self, node: cst.BaseExpression) -> Effect:
        """Iterating runs code where the iterable may be a generator or an object of one's own."""
        if self.effects.plain_containers:
            return NOTHING
        if isinstance(node, (cst.Tuple, cst.List, cst.Set, cst.Dict, cst.ListComp)):
            return NOTHING
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
            if node.func.value in ("range", "len", "list", "tuple", "sorted"):
                return NOTHING
            if node.func.value in ("enumerate", "zip", "reversed"):
                return union(self._iterates(argument.value) for argument in node.args)
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):  # `x.shape[:-1] + (8, 64)`
            if any(isinstance(side, (cst.Tuple, cst.List)) for side in (node.left, node.right)):
                return self._overloaded()
        if isinstance(node, cst.Name) and node.value in self.single:
            return self._iterates(self.single[node.value])
        if isinstance(node, cst.Attribute) and is_self(node.value) and not self.names.own_operators:
            return NOTHING
        if not self.value(node).roots:  # sizes
            return NOTHING
        if isinstance(node, cst.Name) and node.value in self.gathered:
            return NOTHING
        return Effect(anything=f"iterating over {self.module.code(node)} may run code")

    def _with(self, node: cst.With) -> Effect:
        total = self._effect(node.body)
        for item in node.items:
            total = total | self._effect(item.item)
            if not _is_mode(self.names.resolved(item.item.func) if isinstance(item.item, cst.Call) else ""):
                total = total | Effect(anything=f"`with {self.module.code(item.item)}` may run code")
            if item.asname is not None:
                total = total | self._target(item.asname.name)
        return total

    def _defines(self, node: cst.FunctionDef | cst.ClassDef) -> Effect:
        total = Effect(binds=frozenset({node.name.value}))
        if isinstance(node, cst.ClassDef) or node.decorators:
            total = total | Effect(anything=f"defining {node.name.value} may run code")
        elif isinstance(node, cst.FunctionDef):
            defaults = [p.default for p in (*node.params.params, *node.params.kwonly_params) if p.default is not None]
            total = total | self._all(defaults)
        return total

    def _leaves(self, node: cst.CSTNode) -> Effect:
        word = type(node).__name__.lower()
        return self._all(parts(node)) | Effect(leaves=frozenset({word}))

    def _deletes(self, node: cst.Del) -> Effect:
        return self._target(node.target)

    def _imports(self, node: cst.CSTNode) -> Effect:
        return Effect(anything="an import runs code")

    def _matches(self, node: cst.CSTNode) -> Effect:
        return Effect(anything="a match statement")

    # Expressions

    def _value(self, node: cst.BaseExpression) -> Value:
        if isinstance(node, cst.Name):
            return self._named(node)
        if isinstance(node, cst.Attribute):
            return self._attribute(node)
        if isinstance(node, cst.Call):
            return called(self, node)
        if isinstance(node, cst.NamedExpr):
            inner = self.value(node.value)
            return Value(inner.roots, inner.effect | self._target(node.target))
        if isinstance(node, (cst.Await, cst.Yield)):
            return Value(frozenset({HEAP}), Effect(anything="others run in between", leaves=frozenset({"yield"})))
        if isinstance(node, cst.Lambda):
            return Value(frozenset({HEAP}))
        if isinstance(node, cst.GeneratorExp) and not isinstance(self.module.parent(node), cst.Arg):
            return Value(frozenset({HEAP}), Effect(anything="a generator runs later"))
        inside = list(_expressions(node))
        effect = union(self._effect(part) for part in inside)
        if isinstance(node, cst.BaseComp):
            effect = effect | self._iterates(node.for_in.iter)
        if isinstance(node, (cst.BinaryOperation, cst.UnaryOperation, cst.Comparison, cst.Subscript)):
            effect = effect | self._overloaded()
        if isinstance(node, cst.Subscript):
            effect = effect | self._indexes(node.value)
        return Value(self._roots(node, inside), effect)

    def _indexes(self, base: cst.BaseExpression) -> Effect:
        """Indexing what an unknown call has made may run code: a `defaultdict` does."""
        made = self.single.get(base.value) if isinstance(base, cst.Name) else None
        if made is None or id(made) in self._indexed or self.effects.plain_containers:
            return NOTHING
        self._indexed.add(id(made))
        anything = isinstance(made, cst.Call) and self.value(made).effect.anything
        self._indexed.discard(id(made))
        if anything:
            return Effect(anything=f"indexing `{self.module.code(base)}` may run code")
        return NOTHING

    def _roots(self, node: cst.BaseExpression, inside: Sequence[cst.BaseExpression]) -> frozenset[str]:
        if isinstance(node, cst.Subscript):
            return self.value(node.value).roots
        if isinstance(node, cst.BinaryOperation):
            if any(self.is_tensor(side) for side in inside):  # arithmetic on tensors makes a new one
                return frozenset()
            lists = isinstance(node.operator, cst.Add) and not any(map(_is_number, inside))
            lists = lists or (
                isinstance(node.operator, cst.Multiply) and not any(isinstance(i, cst.Float) for i in inside)
            )
            return frozenset[str]().union(*(self.value(side).roots for side in inside)) if lists else frozenset()
        if isinstance(node, (cst.Comparison, cst.UnaryOperation, cst.BaseNumber, cst.BaseString)):
            return frozenset()
        return frozenset[str]().union(*(self.value(part).roots for part in inside))

    def is_tensor(self, node: cst.BaseExpression, depth: int = 6) -> bool:
        """Whether an expression is certainly a tensor, as far as its spelling shows."""
        if depth == 0:
            return False
        if isinstance(node, cst.BinaryOperation):
            return self.is_tensor(node.left, depth - 1) or self.is_tensor(node.right, depth - 1)
        if isinstance(node, cst.UnaryOperation):
            return self.is_tensor(node.expression, depth - 1)
        if isinstance(node, cst.Name):
            values = self.assigned(node.value)
            known = node.value in self.locals and node.value not in parameters(self.function) and bool(values)
            single = node.value in self.single or len(values) == self.times[node.value] - self._added[node.value]
            return known and single and all(self.is_tensor(value, depth - 1) for value in values)
        if isinstance(node, cst.Call):
            return makes_new_tensor(self, node)
        name = self_attribute(node)
        if name is None or self.owner is None:
            return False
        given = attribute(self.owner, name, self.names).values
        return bool(given) and all(is_parameter(value, self) for value in given)

    @cached_property
    def times(self) -> Counter[str]:
        """How often the function's statements bind each local."""
        return Counter(bound(self.function.body, False))

    @cached_property
    def _added(self) -> Counter[str]:
        """How often `x += …` and the like bind each local, which leave a tensor a tensor."""
        lines = (node for node in walk(self.function.body) if isinstance(node, cst.AugAssign))
        return Counter(name for line in lines for name in targets(line.target))

    def _named(self, node: cst.Name) -> Value:
        if node.value in self.locals:
            return Value(frozenset({node.value}), Effect(reads=frozenset({node.value})))
        roots = frozenset[str]() if node.value in ("None", "True", "False") else frozenset({HEAP})
        return Value(roots, Effect(attributes=frozenset({node.value})))

    def _attribute(self, node: cst.Attribute) -> Value:
        base, name = self.value(node.value), node.attr.value
        effect = base.effect | Effect(attributes=frozenset({name}))
        if name in self.names.properties or "__getattr__" in self.names.methods:
            effect = effect | Effect(anything=f"reading .{name} runs code")
        return Value(frozenset() if name in NO_TENSOR else base.roots, effect)


def _is_number(node: cst.BaseExpression) -> bool:
    inner = node.expression if isinstance(node, cst.UnaryOperation) else node
    return isinstance(inner, (cst.Float, cst.Integer))


def _is_mode(name: str) -> bool:
    modes = ("no_grad", "enable_grad", "inference_mode", "autocast", "set_grad_enabled", "nullcontext")
    return name.rpartition(".")[2] in modes and name.split(".")[0] in ("torch", "contextlib")


def _expressions(node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """Yield the expressions directly inside `node`, through what is no expression itself."""
    for part in parts(node):
        if isinstance(part, cst.BaseExpression):
            yield part
        elif isinstance(part, (cst.Annotation, cst.Param, cst.Parameters)):
            continue
        elif not isinstance(part, cst.BaseParenthesizableWhitespace):
            yield from _expressions(part)


_STATEMENTS: dict[type[cst.CSTNode], Callable[[Scope, Any], Effect]] = {
    cst.Assign: Scope._assign,
    cst.AnnAssign: Scope._annotated,
    cst.AugAssign: Scope._augmented,
    cst.Del: Scope._deletes,
    cst.For: Scope._loop,
    cst.While: Scope._while,
    cst.With: Scope._with,
    cst.Match: Scope._matches,
    cst.FunctionDef: Scope._defines,
    cst.ClassDef: Scope._defines,
    cst.Import: Scope._imports,
    cst.ImportFrom: Scope._imports,
    cst.Return: Scope._leaves,
    cst.Raise: Scope._leaves,
    cst.Assert: Scope._leaves,
    cst.Break: Scope._leaves,
    cst.Continue: Scope._leaves,
}
