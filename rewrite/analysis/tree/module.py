"""What one pass of the engine knows about a modeling file: classes, what their `__init__` assigns, names, parents.

libcst's metadata providers answer the same questions for 0.2–0.7 s a pass (scopes and qualified names of a 1,600-line
file); modeling files are flat, one level of classes and functions, so one visit of 0.03 s is enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import chain
from typing import Any, TypeVar, overload

import libcst as cst

from rewrite.offers import is_of_runtime

MOVES = frozenset({"to", "float", "half", "double", "bfloat16", "cuda", "cpu", "train", "eval", "requires_grad_"})
"""Methods with which a module of torch changes itself in place, and which return it."""
_MADE_BY = frozenset({*MOVES, "_apply", "__new__", "__getattribute__"})
"""What a class must not define for its moves to be torch's own."""


@dataclass(frozen=True)
class ClassInfo:
    """A top-level class."""

    name: str
    node: cst.ClassDef
    bases: tuple[str, ...]
    """Qualified names of its bases."""
    methods: dict[str, cst.FunctionDef]
    assigned: dict[str, list[cst.BaseExpression]] = field(default_factory=dict)
    """Every expression that any method assigns to `self.<attribute>`, in source order; of modules what builds them."""


class Module:
    """A parsed modeling file and its index. Nodes are compared by identity; the tree never changes."""

    def __init__(self, tree: cst.Module):
        self.tree = tree
        self.imports: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        """Classes of torch by the other names that lines of the file give them: `Norm = nn.RMSNorm`."""
        self.classes: dict[str, ClassInfo] = {}
        self.functions: dict[str, cst.FunctionDef] = {}
        self.remembered: dict[str, object] = {}
        """What analyses have found out about this module, each under its own name."""
        self._parents: dict[int, cst.CSTNode] = {}
        self._made_from: dict[int, list[cst.ClassDef | None]] = {}
        """The classes that were the bases of a class when it was made, by the `id` of its node."""
        self._adopt()
        for statement in tree.body:
            self._index(statement)
        self._index_aliases()
        self.classes = {name: self._without_rebound_bases(info) for name, info in self.classes.items()}
        for info in self.classes.values():
            for attribute, values in info.assigned.items():
                info.assigned[attribute] = [self.built(value) for value in values]

    def code(self, node: cst.CSTNode) -> str:
        """Return the source text of `node` without surrounding whitespace."""
        return self.tree.code_for_node(node).strip()

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the node that holds `node`."""
        return self._parents[id(node)]

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the parent of `node`, its parent, and so on up to the module."""
        while (above := self._parents.get(id(node))) is not None:
            yield above
            node = above

    def statement(self, node: cst.CSTNode) -> cst.BaseStatement:
        """Return the innermost statement (a line or a compound statement) that `node` is part of."""
        return next(n for n in (node, *self.ancestors(node)) if isinstance(n, cst.BaseStatement))

    def indentation(self, node: cst.CSTNode) -> int:
        """Return how many columns the statement of `node` is indented by."""
        blocks = [above for above in self.ancestors(self.statement(node)) if isinstance(above, cst.IndentedBlock)]
        return sum(len(block.indent or self.tree.default_indent) for block in blocks)

    def qualified(self, expression: cst.BaseExpression) -> str:
        """Return the dotted name with imports resolved (`nn.Linear` → `torch.nn.Linear`), or `""` if it is none."""
        parts: list[str] = []
        while isinstance(expression, cst.Attribute):
            parts.append(expression.attr.value)
            expression = expression.value
        if not isinstance(expression, cst.Name):
            return ""
        name = expression.value
        parts.append(self.imports.get(name) or self.aliases.get(name, name))
        return ".".join(reversed(parts))

    def methods(self) -> Iterator[tuple[ClassInfo, str, cst.FunctionDef]]:
        """Yield every method of every class, in source order."""
        for info in self.classes.values():
            for name, function in info.methods.items():
                yield info, name, function

    def assignments(self, owner: ClassInfo, attribute: str) -> list[cst.BaseExpression]:
        """Return what the class or, if it assigns nothing, its bases in this file assign to `self.<attribute>`."""
        if attribute in owner.assigned:
            return owner.assigned[attribute]
        for base in owner.bases:
            if base in self.classes and (found := self.assignments(self.classes[base], attribute)):
                return found
        return []

    def method(self, owner: ClassInfo, name: str) -> cst.FunctionDef | None:
        """Return a method of the class or of its bases in this file."""
        if name in owner.methods:
            return owner.methods[name]
        found = (self.method(self.classes[base], name) for base in owner.bases if base in self.classes)
        return next((method for method in found if method is not None), None)

    def built(self, value: cst.BaseExpression) -> cst.BaseExpression:
        """Return the call that builds a module which a value moves in place: `Norm(…)` of `Norm(…).to(dtype=…)`."""
        inner = value
        while isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute) and inner.func.attr.value in MOVES:
            inner = inner.func.value
        moved = inner is not value and isinstance(inner, cst.Call) and self._moves_as_torch(self.qualified(inner.func))
        return inner if moved and not MOVES & self._set_from_outside else value

    def _moves_as_torch(self, name: str) -> bool:
        """Whether a class is a module whose moves are torch's own, and return the module."""
        root, _, kind = name.rpartition(".")
        if root == "torch.nn" or root.startswith("torch.nn.modules."):
            return not kind.endswith(("Parameter", "Buffer"))  # tensors: a move makes another one
        info = self.classes.get(name)
        if info is None or len(info.bases) != 1 or _MADE_BY & _defined(info):
            return False
        return info.bases[0] != name and self._moves_as_torch(info.bases[0])

    @cached_property
    def _set_from_outside(self) -> set[str]:
        """The attributes that the file sets of anything but `self`."""
        targets = (node.target for node in of_kind(self.tree, cst.AssignTarget))
        return {t.attr.value for t in targets if isinstance(t, cst.Attribute) and self_attribute(t) is None}

    @cached_property
    def references(self) -> dict[str, int]:
        """How often each identifier stands anywhere in the file other than as a definition's or import's name."""
        counts: Counter[str] = Counter()
        stack: list[cst.CSTNode] = [self.tree]
        while stack:
            node = stack.pop()
            if type(node) is cst.Name:
                counts[node.value] += 1
            elif type(node) not in (cst.Import, cst.ImportFrom):
                stack.extend(parts(node))
            if type(node) in (cst.FunctionDef, cst.ClassDef):
                counts[node.name.value] -= 1  # type: ignore[attr-defined]
        return dict(counts)

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """By class, the names of the other classes whose `__init__` builds several of it, in source order."""
        found: dict[str, list[str]] = {}
        for info in self.classes.values():
            init = info.methods.get("__init__")
            called = [info.methods.get(str(self_attribute(c.func))) for c in _calls(init)] if init is not None else []
            bodies = [method.body for method in (init, *called) if method is not None]
            for name in dict.fromkeys(name for body in bodies for name in self._repeated(body)):
                if name in self.classes and name != info.name:
                    found.setdefault(name, []).append(info.name)
        return found

    def _repeated(self, top: cst.CSTNode) -> Iterator[str]:
        """Yield the qualified names of what loops and comprehensions below `top` call."""
        stack: list[tuple[cst.CSTNode, bool]] = [(top, False)]
        while stack:
            node, repeated = stack.pop()
            repeated = repeated or isinstance(node, (cst.BaseComp, cst.For))
            if repeated and isinstance(node, cst.Call):
                yield from self._named_in(node.func, top)
            stack.extend((part, repeated) for part in reversed(parts(node)))

    def _named_in(self, func: cst.BaseExpression, top: cst.CSTNode) -> Iterator[str]:
        """Yield the qualified name of what is called; those in a table of the file where it is taken from one."""
        chosen = func
        if isinstance(func, cst.Name):
            lines = (node for node in walk(top) if isinstance(node, cst.Assign) and len(node.targets) == 1)
            given = [line.value for line in lines if func.deep_equals(line.targets[0].target)]
            chosen = given[0] if len(given) == 1 else func
        if isinstance(chosen, cst.Subscript) and isinstance(chosen.value, cst.Name):
            for table in self.tables.get(chosen.value.value, ()):
                yield from (self.qualified(e.value) for e in table.elements if isinstance(e, cst.DictElement))
        else:
            yield self.qualified(func)

    @cached_property
    def tables(self) -> dict[str, list[cst.Dict]]:
        """The dictionaries in braces that the file gives a name at its top."""
        found: dict[str, list[cst.Dict]] = {}
        lines = (statement for statement in self.tree.body if isinstance(statement, cst.SimpleStatementLine))
        for small in (small for line in lines for small in line.body if isinstance(small, cst.Assign)):
            for target in small.targets:
                if isinstance(target.target, cst.Name) and isinstance(small.value, cst.Dict):
                    found.setdefault(target.target.value, []).append(small.value)
        return found

    def _adopt(self) -> None:
        for part in parts(self.tree):
            self._parents[id(part)] = self.tree
            self._parents |= _parents_below(part)

    def _index(self, statement: cst.CSTNode) -> None:
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                if isinstance(small, (cst.Import, cst.ImportFrom)):
                    self.imports.update(imported_names(small))
        elif isinstance(statement, cst.FunctionDef):
            self.functions[statement.name.value] = statement
        elif isinstance(statement, cst.ClassDef):
            self._index_class(statement)
        elif isinstance(statement, (cst.If, cst.Try)):
            for inner in statement.body.body:
                self._index(inner)

    def _index_aliases(self) -> None:
        """Find the names of classes of torch that the file binds once: as `name = nn.Kind`, or by a class that is
        torch's RMSNorm with another `__init__`.
        """
        found = {
            info.name: info.bases[0]
            for info in self.classes.values()
            if info.bases == ("torch.nn.RMSNorm",)
            and {*info.methods} <= {"__init__"}
            and not info.node.decorators
            and all(isinstance(line, (cst.FunctionDef, cst.SimpleStatementLine)) for line in info.node.body.body)
            and not any(isinstance(small, (cst.Assign, cst.AnnAssign)) for small in _lines(info))
        }
        lines = [line for line in self.tree.body if isinstance(line, cst.SimpleStatementLine)]
        for small in (small for line in lines for small in line.body if isinstance(small, cst.Assign)):
            target = small.targets[0].target
            value = self.qualified(small.value)
            if len(small.targets) == 1 and isinstance(target, cst.Name) and value.startswith("torch.nn."):
                found[target.value] = value
        if not found:
            return
        kinds = (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.Del)
        bound = [node.target for node in of_kind(self.tree, *kinds)]
        bound += [node.name for node in of_kind(self.tree, cst.FunctionDef, cst.ClassDef, cst.Param, cst.AsName)]
        times = Counter(name.value for target in bound for name in walk(target) if isinstance(name, cst.Name))
        self.aliases = {name: value for name, value in found.items() if times[name] == 1 and name not in self.imports}

    def _index_class(self, node: cst.ClassDef) -> None:
        methods = {n.name.value: n for n in node.body.body if isinstance(n, cst.FunctionDef)}
        info = ClassInfo(
            name=node.name.value,
            node=node,
            bases=tuple(self.qualified(base.value) for base in node.bases),
            methods=methods,
        )
        for method in methods.values():
            for attribute, value in self_assignments(method):
                info.assigned.setdefault(attribute, []).append(value)
        self._made_from[id(node)] = [self.classes[base].node if base in self.classes else None for base in info.bases]
        self.classes[info.name] = info

    def _without_rebound_bases(self, info: ClassInfo) -> ClassInfo:
        """Return the class with bases that had another class of their name when it was made under no class's name.

        `class A(A)` is made from an earlier A, and no class is its own base.
        """
        now = [self.classes[base].node if base in self.classes else None for base in info.bases]
        then = self._made_from[id(info.node)]
        same = zip(info.bases, (one is other for one, other in zip(now, then, strict=True)), strict=True)
        return replace(info, bases=tuple(base if kept else f"an earlier {base}" for base, kept in same))


def _lines(info: ClassInfo) -> Iterator[cst.BaseSmallStatement]:
    """Yield the simple statements in the body of a class."""
    for line in info.node.body.body:
        yield from line.body if isinstance(line, cst.SimpleStatementLine) else ()


def _defined(info: ClassInfo) -> set[str]:
    """Return the names that the body of a class gives its methods and, in a line each, its attributes."""
    lines = (line for line in info.node.body.body if isinstance(line, cst.SimpleStatementLine))
    targets = [target for line in lines for small in line.body for target in _targets(small)]
    return {*info.methods, *(target.value for target in targets if isinstance(target, cst.Name))}


def _targets(statement: cst.BaseSmallStatement) -> list[cst.BaseExpression]:
    if isinstance(statement, cst.Assign):
        return [target.target for target in statement.targets]
    return [statement.target] if isinstance(statement, cst.AnnAssign) else []


def imported_names(statement: cst.Import | cst.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield (local name, qualified name) of everything an import binds; relative dots are kept."""
    if isinstance(statement.names, cst.ImportStar):
        return
    prefix = ""
    if isinstance(statement, cst.ImportFrom):
        dots = "." * len(statement.relative)
        prefix = f"{dots}{dotted(statement.module)}" if statement.module else dots
        prefix += "" if prefix.endswith(".") else "."
    for alias in statement.names:
        name, local = dotted(alias.name), bound_name(alias)
        if isinstance(statement, cst.Import) and alias.asname is None:
            yield name.split(".")[0], name.split(".")[0]
        else:
            yield local, prefix + name


def bound_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds; for a plain `import a.b` the whole dotted name."""
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return dotted(alias.name)


def dotted(node: cst.BaseExpression) -> str:
    """Return `a.b.c` of a Name or Attribute chain."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    if isinstance(node, cst.Name):
        return node.value
    raise TypeError(f"not a dotted name: {type(node).__name__}")


def self_assignments(function: cst.FunctionDef) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Yield (attribute, value) of every `self.attribute = value` in a method, in source order, also of tuples."""
    for node in small_statements(function.body):
        if isinstance(node, cst.Assign):
            for given in node.targets:
                for target, value in assigned_pairs(given.target, node.value):
                    if (attribute := self_attribute(target)) is not None:
                        yield attribute, value
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            if (attribute := self_attribute(node.target)) is not None:
                yield attribute, node.value


def assigned_pairs(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Yield what an assignment gives to what: one by one where a tuple is written out on both sides."""
    sides = [side.elements if isinstance(side, (cst.Tuple, cst.List)) else () for side in (target, value)]
    starred = any(isinstance(element, cst.StarredElement) for side in sides for element in side)
    if not sides[0] or starred or len(sides[0]) != len(sides[1]):
        yield target, value
        return
    for one, other in zip(*sides, strict=True):
        yield from assigned_pairs(one.value, other.value)


def small_statements(block: cst.CSTNode) -> Iterator[cst.BaseSmallStatement]:
    """Yield every simple statement below `block`, in source order, without a look at expressions."""
    for part in parts(block):
        if isinstance(part, cst.BaseSmallStatement):
            yield part
        elif not isinstance(part, (cst.BaseExpression, cst.BaseParenthesizableWhitespace)):
            yield from small_statements(part)


def _calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    return of_kind(node, cst.Call)


def self_attribute(node: cst.CSTNode) -> str | None:
    """Return `x` of the expression `self.x`, else None."""
    if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
        return node.attr.value
    return None


MOST_KEPT = 2**18
"""Nodes; the largest modeling file of transformers 5.23 has 170,000."""
_Found = TypeVar("_Found")
_Node = TypeVar("_Node", bound=cst.CSTNode)


def kept(function: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    """Return a function of a node that remembers its answers, which nobody may change.

    Nodes never change and a pass shares most of them with the one before. They are known by their `id`, and kept with
    the answer so that it stays theirs: their `__hash__` is written in Python, and would be called millions of times.
    """
    answers: dict[int, tuple[Any, _Found]] = {}

    @wraps(function)
    def answered(node: Any) -> _Found:
        found = answers.get(id(node))
        if found is None:
            if len(answers) >= MOST_KEPT:
                answers.clear()
            found = answers[id(node)] = (node, function(node))
        return found[1]

    return answered


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield `node` and everything below it, in source order."""
    if type(node) is cst.Module:  # one pass makes another module of mostly the same statements
        return chain((node,), *map(walk, parts(node)))
    return iter(_everything(node)) if type(node) in _LARGE else _walk(node)


@overload
def of_kind(node: cst.CSTNode, kind: type[_Node], /) -> Iterator[_Node]: ...
@overload
def of_kind(node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> Iterator[Any]: ...
def of_kind(node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> Iterator[Any]:
    """Yield those of `walk(node)` that are of one of these kinds, each a class without a subclass.

    Many times as fast as `isinstance`: the kinds of nodes are abstract classes, which answer it in Python.
    """
    wanted = frozenset(kinds)
    return (inner for inner in walk(node) if type(inner) in wanted)


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    stack: list[cst.CSTNode] = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(parts(current)))


_LARGE = frozenset({cst.FunctionDef, cst.IndentedBlock, cst.ClassDef, cst.For, cst.If, cst.While})


@kept
def _parents_below(node: cst.CSTNode) -> dict[int, cst.CSTNode]:
    """Return the parents of everything below `node`, by the `id` of what they hold."""
    found: dict[int, cst.CSTNode] = {}
    stack: list[cst.CSTNode] = [node]
    while stack:
        above = stack.pop()
        below = parts(above)
        found.update(dict.fromkeys(map(id, below), above))
        stack.extend(below)
    return found


@kept
def _everything(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    return tuple(_walk(node))


@kept
def parts(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    """Return the nodes directly below `node` in source order: `node.children`, many times as fast."""
    found: list[cst.CSTNode] = []
    names = _FIELDS.get(type(node))
    for name in _learn(node) if names is None else names:
        value = getattr(node, name)
        if type(value) in (list, tuple):
            found.extend(item for item in value if _is_node(item))
        elif _is_node(value):
            found.append(value)
    return tuple(found)


def _is_node(value: object) -> bool:
    kind = type(value)
    known = _NODES.get(kind)
    if known is None:
        known = _NODES[kind] = isinstance(value, cst.CSTNode)
    return known


_NODES: dict[type, bool] = {}
"""Whether values of a kind are nodes: to ask an abstract class is slow."""
_FIELDS: dict[type[cst.CSTNode], tuple[str, ...]] = {}
"""The fields of each kind of node in the order of the source, as they were visited in the first node of the kind.

The order of the fields of the class is another one: parentheses come last in it.
"""


def _learn(node: cst.CSTNode) -> tuple[str, ...]:
    """Return the fields of a node in source order: a visitor is told of every one, also where nothing is in it.

    Of a kind whose nodes tell only of what is in them (`FormattedStringExpression`), each node is asked.
    """
    order = _FieldOrder(node)
    node.visit(order)
    if isinstance(node, cst.FormattedStringExpression):
        return tuple(order.fields)
    return _FIELDS.setdefault(type(node), tuple(order.fields))


class _FieldOrder(cst.CSTVisitor):
    """Visits one node and nothing below it."""

    def __init__(self, node: cst.CSTNode):
        super().__init__()
        self.node = node
        self.fields: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node is self.node

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        self.fields.append(attribute)


def names_in(nodes: Iterable[cst.CSTNode]) -> set[str]:
    """Return every identifier that stands anywhere below `nodes`, attributes included."""
    found: set[str] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if type(node) is cst.Name:  # not `isinstance`: nodes are abstract classes, for which that is slow
            found.add(node.value)
        else:
            stack.extend(parts(node))
    return found


def without_runtime(name: str) -> str:
    """Return the bare name of what the runtime offers, which a file imports only once it has been rewritten."""
    return name.rsplit(".", 1)[-1] if is_of_runtime(name) else name
