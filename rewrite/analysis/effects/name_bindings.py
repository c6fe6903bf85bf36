"""Which names of a file surely mean what their definition says.

A second definition, an assignment, a loop target, `global`, `del` or a change from outside (`Foo.forward = …`,
`setattr(Foo, …)`) makes a name unknown: nothing may be concluded from any of its definitions.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import cast

import libcst as cst

from rewrite.analysis.effects.known import CLASS_DECORATORS, METHOD_DECORATORS
from rewrite.analysis.tree.module import ClassInfo, Module, assigned_pairs, imported_names, parts, walk

_REFLECTION = ("globals", "exec", "eval", "vars")
_STRANGE = (
    "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__new__", "__call__", "__init_subclass__",
    "__set_name__",
)  # fmt: skip
_OPERATORS = (
    "__add__", "__radd__", "__iadd__", "__sub__", "__mul__", "__rmul__", "__imul__", "__matmul__", "__truediv__",
    "__neg__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__", "__eq__", "__bool__", "__lt__",
    "__gt__", "__torch_function__", "__torch_dispatch__", "__getattr__", "__getattribute__", "__setattr__",
)  # fmt: skip


class Names:
    """What the names of a module can be relied on to mean."""

    def __init__(self, module: Module):
        self.module = module

    def means(self, name: str) -> bool:
        """Whether a name at module level has one definition, which nothing replaces; also a builtin nobody hides."""
        if self._unknowable or name in self.changed:
            return False
        times = self._bound[name]
        return times == 1 or (times == 0 and hasattr(builtins, name))

    def is_one_class(self, name: str) -> bool:
        """Whether one statement of the file makes the class of a name, and nothing changes it.

        Who binds the name to another class besides (`try: from apex … Norm = FusedNorm`) leaves this one as it is.
        """
        if self._unknowable or name in self.changed:
            return False
        made = (node for node in walk(self.module.tree) if isinstance(node, cst.ClassDef))
        return sum(node.name.value == name for node in made) == 1

    def is_bound(self, name: str) -> bool:
        """Whether the file binds a name at module level, or a function of it does with `global`."""
        return self._bound[name] > 0

    def is_free(self, name: str) -> bool:
        """Whether the file binds a name nowhere, or once, by an import."""
        return not self.is_bound(name) or (name in self.module.imports and self.means(name))

    def resolved(self, expression: cst.BaseExpression) -> str:
        """Return the dotted name as `Module.qualified` does, `""` where its root may mean something else."""
        root: cst.BaseExpression = expression
        while isinstance(root, cst.Attribute):
            root = root.value
        if not isinstance(root, cst.Name) or not self.means(root.value):
            return ""
        return self.module.qualified(expression)

    def class_of(self, name: str) -> ClassInfo | None:
        """Return the class of that name, if its methods are what its body says."""
        info = self.module.classes.get(name)
        if info is None or not self.means(name) or self.why_strange(info):
            return None
        return info

    def why_strange(self, info: ClassInfo) -> str:
        """Return why calls of an instance's methods may run other code than the class shows, `""` if they do not."""
        if not all(_harmless(d, CLASS_DECORATORS, self.module) for d in info.node.decorators):
            return f"{info.name} is decorated"
        if info.node.keywords:
            return f"{info.name} has a metaclass"
        if strange := next((name for name in _STRANGE if name in info.methods), None):
            return f"{info.name} defines {strange}"
        for base in info.bases:
            if base in self.module.classes:
                if not self.means(base):
                    return f"{base} is defined more than once"
                if why := self.why_strange(self.module.classes[base]):
                    return why
            elif base.startswith(".") and not base.startswith(".."):
                return f"{info.name} is made from {base}, which is not in the file"
        return ""

    def method_is_plain(self, info: ClassInfo, name: str) -> bool:
        """Whether a method of the class runs as it is written: defined once, with harmless decorators."""
        function = info.methods.get(name)
        if function is None or self.class_names(info)[name] != 1:
            return False
        return self.function_is_plain(function)

    def function_is_plain(self, function: cst.FunctionDef) -> bool:
        """Whether a function runs as it is written: its decorators are harmless."""
        return all(_harmless(decorator, METHOD_DECORATORS, self.module) for decorator in function.decorators)

    def class_names(self, info: ClassInfo) -> Counter[str]:
        """Return how often the body of a class binds each name."""
        found = self._class_names.get(info.name)
        if found is None:
            found = self._class_names[info.name] = Counter(_bound_in(info.node.body))
        return found

    def owners(self, info: ClassInfo) -> list[ClassInfo]:
        """Return the class and its bases in this file."""
        bases = [self.module.classes[base] for base in info.bases if base in self.module.classes and base != info.name]
        return [info, *(above for base in bases for above in self.owners(base))]

    def heirs(self, info: ClassInfo) -> list[ClassInfo]:
        """Return the classes of this file that are made from the class, however far below."""
        below = [other for other in self.module.classes.values() if info.name in other.bases and other is not info]
        return [*below, *(heir for other in below for heir in self.heirs(other))]

    @cached_property
    def properties(self) -> frozenset[str]:
        """Names of attributes whose reading runs code of the file."""
        found = set[str]()
        for info in self.module.classes.values():
            for name, function in info.methods.items():
                if any("property" in self.module.code(decorator.decorator) for decorator in function.decorators):
                    found.add(name)
        return frozenset(found)

    @cached_property
    def methods(self) -> frozenset[str]:
        """Names of all methods that classes of the file define."""
        return frozenset(name for info in self.module.classes.values() for name in info.methods)

    @cached_property
    def own_operators(self) -> str:
        """The first class of the file that defines operators itself, `""` if none does."""
        for info in self.module.classes.values():
            if any(name in info.methods for name in _OPERATORS):
                return info.name
        return ""

    @property
    def changed(self) -> frozenset[str]:
        """Names whose attributes something in the file sets: `Foo.forward = …`, `setattr(torch, "relu", …)`."""
        return self._scan.changed

    @property
    def stored(self) -> frozenset[str]:
        """Names of attributes that the file sets on something other than `self`, `*` for one that is computed."""
        return self._scan.stored

    @property
    def handed_over(self) -> frozenset[str]:
        """Names of attributes that the file sets on something from the attribute of the name of something else."""
        return self._scan.handed

    @property
    def replaced_classes(self) -> frozenset[str]:
        """Classes whose instances the file replaces wherever it finds them, by `module._modules[name] = …`."""
        return self._scan.replaced

    @property
    def tampered(self) -> frozenset[str]:
        """Names of attributes whose calls the file may change: `x` of `self.x.inplace = …`, `x.register_…_hook(…)`."""
        return self._scan.tampered

    @cached_property
    def _unknowable(self) -> bool:
        return self._scan.reflects or "__getattr__" in self.module.functions

    @cached_property
    def _bound(self) -> Counter[str]:
        counts = Counter(_bound_in(self.module.tree))
        for (name, _), times in Counter(_imports_in(self.module.tree)).items():
            counts[name] -= times - 1  # `import torch` and `import torch.fft` mean one `torch`
        counts.update(dict.fromkeys(self._scan.globals, 2))
        return counts

    @cached_property
    def _scan(self) -> _Scan:
        top = {*self.module.classes, *self.module.functions, *self.module.imports}
        scan = _Scan(self.module, top)
        for node in walk(self.module.tree):
            scan.see(node)
        return scan

    @cached_property
    def computed(self) -> dict[str, bool]:
        """For each class that was asked about, whether it sets attributes whose names it computes."""
        return {}

    @cached_property
    def _class_names(self) -> dict[str, Counter[str]]:
        return {}


class _Scan:
    """What one walk over a file finds that may change the meaning of names and attributes anywhere in it."""

    def __init__(self, module: Module, top: set[str]):
        self.module = module
        self.top = top
        self.assigned = {name for info in module.classes.values() for name in info.assigned}
        self._replaced = set[str]()
        self.reflects = False
        self._changed = set[str]()
        self._stored = set[str]()
        self._handed = set[str]()
        self._below = set[str]()
        self._line: cst.Assign | None = None
        self.globals = set[str]()

    @property
    def changed(self) -> frozenset[str]:
        return frozenset(self._changed)

    @property
    def stored(self) -> frozenset[str]:
        return frozenset(self._stored)

    @property
    def replaced(self) -> frozenset[str]:
        return frozenset(self._replaced)

    @property
    def handed(self) -> frozenset[str]:
        return frozenset(self._handed)

    @property
    def tampered(self) -> frozenset[str]:
        return frozenset(self._below)

    def see(self, node: cst.CSTNode) -> None:
        """Take note of one node."""
        kind = type(node)  # far faster than `isinstance` of libcst's abstract classes
        if kind is cst.Call:
            self._call(cast(cst.Call, node))
        elif kind is cst.Assign:
            self._line = cast(cst.Assign, node)
        elif kind in _TARGETS:
            top = cast(cst.AnnAssign, node).target
            value = self._line.value if kind is cst.AssignTarget and self._line else getattr(node, "value", None)
            pairs = {id(top): value}
            if isinstance(value, cst.BaseExpression):
                pairs = {id(one): given for one, given in assigned_pairs(top, value)}
            for target in _flat(top):
                indexed = kind in _INDEXED and id(target) in pairs
                self._target(target, indexed=indexed, value=pairs.get(id(target), value))
        elif kind is cst.Global:
            self.globals.update(item.name.value for item in cast(cst.Global, node).names)
        elif kind is cst.ImportFrom and isinstance(cast(cst.ImportFrom, node).names, cst.ImportStar):
            self.reflects = True

    def _call(self, node: cst.Call) -> None:
        name = dotted_end(node.func)
        if isinstance(node.func, cst.Name) and name in _REFLECTION:
            harmless = name == "vars" and len(node.args) == 1 and self._is_inherited(node.args[0].value)
            self.reflects = self.reflects or not harmless
        if name.startswith("register_") and name.endswith("hook") and isinstance(node.func, cst.Attribute):
            self._tamper(node.func.value)
        if name not in SETTERS:
            return
        given = [argument.value for argument in node.args]
        if isinstance(node.func, cst.Attribute) and (not name.startswith("__") or len(given) < 3):
            given = [node.func.value, *given]
        key = given[1].raw_value if len(given) > 1 and isinstance(given[1], cst.SimpleString) else ""
        computed_on = given and not key and (is_self(given[0]) or self._is_inherited(given[0]))
        if given and not computed_on:  # what is computed and set on `self` concerns one class only
            self._target(cst.Attribute(given[0], cst.Name(key or "_")), name=key or "*")

    def _is_inherited(self, node: cst.CSTNode) -> bool:
        """Whether this is an attribute that no class of the file makes, such as its configuration."""
        return isinstance(node, cst.Attribute) and node.attr.value not in self.assigned

    def _target(
        self, target: cst.CSTNode, indexed: bool = False, name: str = "", value: cst.CSTNode | None = None
    ) -> None:
        """Note the target of an assignment; `indexed` for one that `ClassInfo.assigned` lists if it is of `self`."""
        if isinstance(target, cst.Attribute) and not (indexed and is_self(target.value)):
            name = name or target.attr.value
            handed_over = isinstance(value, cst.Attribute) and value.attr.value == name
            (self._handed if handed_over else self._stored).add(name)
        inner: cst.CSTNode = target.value if isinstance(target, (cst.Attribute, cst.Subscript)) else target
        if isinstance(target, cst.Subscript) and dotted_end(inner) in _TABLES:
            guard = self._guard(target)
            self._replaced.update({guard} if guard else set())
            self._stored.update(set() if guard else {"*"})
        ordinary = isinstance(target, cst.Subscript) or dotted_end(target) in _ORDINARY
        if isinstance(target, cst.Attribute) and _configures(self.module.qualified(target)):
            return
        inner = self._tamper(inner, ordinary)
        if isinstance(inner, cst.Name) and inner is not target and inner.value in self.top:
            self._changed.add(inner.value)

    def _guard(self, target: cst.CSTNode) -> str:
        """Return the class of what is replaced where a test `isinstance(module, Class)` says so, else `""`."""
        below = target
        for above in self.module.ancestors(target):
            test = above.test if isinstance(above, cst.If) and above.body is below else None
            if isinstance(test, cst.Call) and dotted_end(test.func) == "isinstance" and len(test.args) == 2:
                return dotted_end(test.args[1].value)
            below = above
        return ""

    def _tamper(self, inner: cst.CSTNode, ordinary: bool = False) -> cst.CSTNode:
        """Note that something of `inner` is changed, unless that is its numbers; return what `inner` starts with."""
        while isinstance(inner, (cst.Attribute, cst.Subscript)):
            if isinstance(inner, cst.Attribute) and not ordinary:
                self._below.add(inner.attr.value)
            inner = inner.value
        return inner


def _configures(name: str) -> bool:
    """Whether a dotted name is a setting of torch, `torch.backends.cudnn.benchmark`: it names no function."""
    root, *within = name.split(".")
    return root == "torch" and ("config" in within[:-1] or within[:1] == ["backends"])


_TABLES = ("__dict__", "_modules", "_parameters", "_buffers")
_ORDINARY = ("weight", "bias", "data", "grad", "requires_grad")
"""Attributes of modules and tensors whose change does not change what code a call runs."""


def is_self(node: cst.CSTNode) -> bool:
    """Whether this is the name `self`."""
    return isinstance(node, cst.Name) and node.value == "self"


def dotted_end(node: cst.CSTNode) -> str:
    """Return `x` of `x` and of `a.b.x`, `""` of anything else."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


_INDEXED = (cst.AssignTarget, cst.AnnAssign)
_TARGETS = (*_INDEXED, cst.AugAssign, cst.For, cst.Del, cst.NamedExpr)
SETTERS = ("setattr", "delattr", "__setattr__", "__delattr__", "add_module", "register_module", "register_parameter")


def _flat(target: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _flat(element.value)
    elif isinstance(target, cst.StarredElement):
        yield from _flat(target.value)
    else:
        yield target


def _harmless(decorator: cst.Decorator, known: frozenset[str], module: Module) -> bool:
    node = decorator.decorator
    name = module.qualified(node.func if isinstance(node, cst.Call) else node)
    return name in known or name.rsplit(".", 1)[-1] in known


def _again(top: cst.CSTNode) -> Iterator[str]:
    """Yield every name that a module imports once more from where it comes from: `import torch`, `import torch.nn`."""
    seen: set[tuple[str, str]] = set()
    stack: list[cst.CSTNode] = [top]
    while stack:
        node = stack.pop()
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            found = list(imported_names(node))
            yield from (name for name, target in found if (name, target) in seen)
            seen.update(found)
        elif not isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.BaseExpression)):
            stack.extend(parts(node))


def _bound_in(top: cst.CSTNode) -> Iterator[str]:
    """Yield every name that the statements of a module or class body bind, functions' and classes' bodies left out."""
    for node in parts(top):
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            yield node.name.value
        elif isinstance(node, (cst.Import, cst.ImportFrom)):
            yield from (name for name, _ in imported_names(node))
        elif not isinstance(node, (cst.Lambda, cst.BaseComp, cst.BaseParenthesizableWhitespace)):
            yield from _names_bound_by(node)
            yield from _bound_in(node)


def _imports_in(top: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """Yield local and qualified name of everything that the imports of a module bind, functions' left out."""
    for node in parts(top):
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            yield from imported_names(node)
        elif not isinstance(
            node, (cst.BaseExpression, cst.FunctionDef, cst.ClassDef, cst.BaseParenthesizableWhitespace)
        ):
            yield from _imports_in(node)


def _names_bound_by(node: cst.CSTNode) -> Iterator[str]:
    targets: list[cst.CSTNode] = []
    if isinstance(node, (cst.AssignTarget, cst.AugAssign, cst.For, cst.NamedExpr, cst.Del)):
        targets = list(_flat(node.target))
    elif isinstance(node, cst.AnnAssign) and node.value is not None:
        targets = [node.target]
    elif isinstance(node, (cst.AsName, cst.MatchAs, cst.MatchStar)) and node.name is not None:
        targets = list(_flat(node.name))
    yield from (target.value for target in targets if isinstance(target, cst.Name))
