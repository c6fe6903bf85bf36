"""What a call may do: known functions, methods and modules, and those of the file, which are followed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import libcst as cst

from rewrite.analysis.effects import known
from rewrite.analysis.effects.attributes import attribute
from rewrite.analysis.effects.effect import HEAP, Effect, Value, union
from rewrite.analysis.effects.effect_summary import arguments
from rewrite.analysis.effects.name_bindings import dotted_end, is_self
from rewrite.analysis.tree.module import ClassInfo, self_attribute
from rewrite.analysis.tree.nodes import parameters

if TYPE_CHECKING:
    from rewrite.analysis.effects.scope import Scope

MAX_DEPTH = 5
"""How many calls inside calls are followed."""
_HEAP = frozenset({HEAP})
_FALSE = ("False", "None")


def called(scope: Scope, node: cst.Call) -> Value:
    """Return what a call does, the evaluation of its arguments included, and whose memory its value may share."""
    given = [scope.value(argument.value) for argument in node.args]
    before = union(value.effect for value in given)
    before = before | union(
        scope._iterates(a.value) for a in node.args if a.star and not _is_parameter(a.value, scope)
    )
    if isinstance(node.func, cst.Attribute) and not _is_super(node.func.value):
        before = scope.value(node.func).effect | before
    roots = frozenset[str]().union(*(value.roots for value in given))
    result = _Call(scope, node, roots).result()
    effect = before | result.effect
    if effect.anything:
        held = scope.value(node.func.value).roots if isinstance(node.func, cst.Attribute) else frozenset[str]()
        return Value(roots | held | _HEAP, effect, (roots | held | _HEAP,))
    return Value(result.roots, effect, result.joins)


def _is_parameter(node: cst.BaseExpression, scope: Scope) -> bool:
    """Whether this is the function's own `*args` or `**kwargs`, which are a tuple and a dictionary."""
    stars = (scope.function.params.star_arg, scope.function.params.star_kwarg)
    return isinstance(node, cst.Name) and any(isinstance(p, cst.Param) and p.name.value == node.value for p in stars)


class _Call:
    """One call and the roots of its arguments."""

    def __init__(self, scope: Scope, node: cst.Call, roots: frozenset[str]):
        self.scope, self.node, self.roots = scope, node, roots
        self.names = scope.names

    def result(self) -> Value:
        """Return the value of the call, apart from the evaluation of its arguments."""
        return self.of(self.node.func)

    def of(self, func: cst.BaseExpression) -> Value:
        """Return what calling `func` with these arguments does."""
        if isinstance(func, cst.Name):
            return self._name(func)
        if isinstance(func, cst.Attribute):
            resolved = "" if self._is_local(func) else self.names.resolved(func)
            if resolved and (found := self._torch(resolved)) is not None:
                return found
            if _tells(func, self.scope):
                return Value(frozenset())
            if not self._is_local(func) and (not resolved or _root(func) in self.scope.module.imports):
                return self._unknown(f"`{self.scope.module.code(func)}`")
            if is_self(func.value) and self.scope.owner is not None and "self" not in self.scope.single:
                return self._own(func.attr.value)
            if _is_super(func.value) and self.scope.owner is not None:
                return self._inherited(func.attr.value, self.scope.owner)
            return self._method(func)
        if isinstance(func, cst.Subscript) and isinstance(func.value, cst.Name) and not self._is_local(func.value):
            return _with(self._built(func, "a computed function"), self.scope.value(func).effect)
        return self._unknown("a computed function")

    def _inherited(self, name: str, owner: ClassInfo) -> Value:
        """`super().name(…)`: a method of a base in this file, or `forward` of a module of torch."""
        if len(owner.bases) != 1 or not self.names.means("super"):
            return self._unknown(f"`super().{name}`")
        base = self.names.class_of(owner.bases[0])
        if base is not None and name in base.methods and self.names.method_is_plain(base, name):
            return self._follow(base.methods[name], base)
        if name == "forward" and known.torch_module(owner.bases[0]) in known.FRESH_MODULES - {"Embedding"}:
            return Value(frozenset(), Effect(attributes=known.MODULE_STATE))
        return self._unknown(f"`super().{name}`")

    def _is_local(self, func: cst.BaseExpression) -> bool:
        """Whether `func` starts with something computed here, and not with a name of the file."""
        return _root(func) in ("", *self.scope.locals)

    def _name(self, func: cst.Name) -> Value:
        name = func.value
        if name in self.scope.locals:
            value = self.scope.single.get(name)
            if value is not None and self_attribute(value) is not None and self.scope.owner is not None:
                return self._own(value.attr.value)  # type: ignore[attr-defined]
            if (function := self.scope.functions.get(name)) is not None:
                return _with(self._follow(function, self.scope.owner), Effect(reads=self.scope.captured(function)))
            return self._unknown(f"`{name}`, a local")
        if name in known.RUNTIME and not self.names.is_bound(name):
            return Value(self.roots)
        if not self.names.means(name):
            return self._unknown(f"`{name}`, which may mean several things")
        if name in self.scope.module.functions:
            return self._follow(self.scope.module.functions[name], None)
        if name in self.scope.module.imports:
            return self._torch(self.scope.module.imports[name]) or self._unknown(f"`{name}`")
        return self._builtin(name) if name in known.BUILTINS else self._unknown(f"`{name}`")

    def _builtin(self, name: str) -> Value:
        if name in known.NAMELESS:
            key = self.node.args[1].value if len(self.node.args) > 1 else None
            if not isinstance(key, cst.SimpleString) or key.raw_value in self.names.properties:
                return self._unknown(f"`{name}` of a computed name")
            return Value(self.roots | _HEAP, Effect(attributes=frozenset({str(key.raw_value)})))
        if name in known.CALLS_BACK and any(
            a.keyword is not None and a.keyword.value == "key" for a in self.node.args
        ):
            return self._unknown(f"`{name}` with a function of its own")
        return Value(self.roots)

    def _torch(self, resolved: str) -> Value | None:
        """Return what a function of torch does, or one that only tells something."""
        root = resolved.split(".")[0]
        if (
            resolved in known.TORCH
            or root in known.QUIET
            or resolved.endswith(("is_torchdynamo_compiling", "is_tracing"))
        ):
            return Value(frozenset())
        if resolved in known.HOLDERS:
            return Value(self.roots)
        name = known.torch_function(resolved)
        if not name:
            return None
        if (written := self._written_by_keyword()) is not None:
            return written
        if name.endswith("_"):
            return Value(self.roots, Effect(writes=self.roots))
        if name == "embedding" and _renormalises(self.node, 4):
            return Value(frozenset(), Effect(writes=self.roots))
        if name in known.RANDOM:
            return Value(self.roots, Effect(draws=f"{name} draws random numbers"))
        if name in known.FRESH:
            return Value(frozenset())
        return Value(self.roots) if name in known.VIEWS else None

    def _written_by_keyword(self) -> Value | None:
        """`out=y` writes y; `inplace=` anything but False writes every argument."""
        for argument in self.node.args:
            word = argument.keyword.value if argument.keyword is not None else ""
            constant = argument.value.value if isinstance(argument.value, cst.Name) else ""
            if word in ("out", "inplace") and constant not in _FALSE:
                return Value(self.roots, Effect(writes=self.roots))
            if argument.star == "**":
                return self._unknown("keywords that are not written out")
        flags = [a.value for a in self.node.args[1:] if isinstance(a.value, cst.Name) and a.value.value == "True"]
        if flags and dotted_end(self.node.func) in _POSITIONAL_INPLACE:
            return Value(self.roots, Effect(writes=self.roots))
        return None

    def _own(self, name: str) -> Value:
        """`self.name(…)`: a method of the class, or what its attribute may be."""
        owner = self.scope.owner
        assert owner is not None
        family = {info.name: info for info in (*self.names.owners(owner), *self.names.heirs(owner))}
        assigned = any(name in info.assigned for info in family.values())
        holders = [info for info in family.values() if name in info.methods]
        if holders and not assigned:
            return self._methods(name, holders, owner)
        found = attribute(owner, name, self.names)
        if found.unknown or holders:
            return self._unknown(f"self.{name}: {found.unknown or 'a method that is also assigned'}")
        return _together(self._built(value, f"self.{name}") for value in found.values)

    def _methods(self, name: str, holders: list[ClassInfo], owner: ClassInfo) -> Value:
        first = next((info for info in self.names.owners(owner) if name in info.methods), None)
        heirs = {info.name for info in self.names.heirs(owner)}
        run = [info for info in holders if info is first or info.name in heirs]
        if first is None or name in self.names.stored or "*" in self.names.stored:
            return self._unknown(f"self.{name}, which may be replaced")
        for info in run:
            if why := self.names.why_strange(info):
                return self._unknown(f"self.{name}: {why}")
            if not self.names.means(info.name) or not self.names.method_is_plain(info, name):
                return self._unknown(f"self.{name}, which is decorated or defined more than once")
        return _together(self._follow(info.methods[name], owner if info is first else info) for info in run)

    def _built(self, value: cst.BaseExpression, what: str) -> Value:
        """Return what calling an attribute does that was given this value."""
        value = self.scope.module.built(value)
        if isinstance(value, cst.IfExp):
            return _together(self._built(choice, what) for choice in (value.body, value.orelse))
        if isinstance(value, cst.Name) and value.value == "None":
            return Value(frozenset())
        if isinstance(value, cst.Subscript):
            if self.names.resolved(value.value).endswith("activations.ACT2FN"):
                return Value(frozenset())
            return self._unknown(what)
        if not isinstance(value, cst.Call):
            resolved = self.names.resolved(value)
            return (self._torch(resolved) if resolved else None) or self._unknown(what)
        resolved = self.names.resolved(value.func)
        if (kind := known.torch_module(resolved)) != "":
            return self._torch_module(kind, value, what)
        info = self.names.class_of(resolved) if resolved else None
        if info is None:
            return self._unknown(what)
        return self._instance(info, what)

    def _instance(self, info: ClassInfo, what: str) -> Value:
        holder = next((above for above in self.names.owners(info) if "forward" in above.methods), None)
        if holder is None or not self.names.method_is_plain(holder, "forward") or "forward" in self.names.stored:
            return self._unknown(f"{what}, a {info.name}")
        return self._follow(holder.methods["forward"], info)

    def _torch_module(self, kind: str, built: cst.Call, what: str) -> Value:
        return _with(self._plain_torch_module(kind, built, what), Effect(attributes=known.MODULE_STATE))

    def _plain_torch_module(self, kind: str, built: cst.Call, what: str) -> Value:
        flags = [a for a in built.args if a.keyword is not None and a.keyword.value == "inplace"]
        if any(argument.star for argument in built.args):
            return self._unknown(what)
        positional = [a.value for a in built.args if a.keyword is None]
        if kind in known.INPLACE_MODULES or kind in ("SiLU", "Mish") or kind in known.RANDOM_MODULES:
            words = [*(a.value for a in flags), *(v for v in positional if isinstance(v, cst.Name))]
            if any(not (isinstance(word, cst.Name) and word.value in _FALSE) for word in words):
                return Value(self.roots, Effect(writes=self.roots))
        if kind in known.RANDOM_MODULES:
            return Value(self.roots, Effect(draws=f"{what} draws random numbers in training"))
        if kind == "Embedding" and _renormalises(built, 4):
            return Value(frozenset(), Effect(writes=_HEAP))
        if kind in known.FRESH_MODULES or kind in known.INPLACE_MODULES:
            return Value(frozenset())
        if kind in known.VIEW_MODULES:
            return Value(self.roots)
        if kind == "Sequential" and built.args:
            return _together((self._built(a.value, what) for a in built.args), self.roots)
        return self._unknown(f"{what}, a {kind}")

    def _method(self, func: cst.Attribute) -> Value:
        """`x.name(…)` of something that may be a tensor."""
        name, held = func.attr.value, self.scope.value(func.value)
        roots = self.roots | held.roots
        if name in self.names.methods:
            return self._unknown(f"`.{name}`, which classes of the file define")
        if name in known.FRESH | known.VIEWS | known.ABOUT and _is_object(func.value, self.scope):
            return self._unknown(f"`.{name}(…)` of what is no tensor")
        if name.endswith("_") and not name.endswith("__"):
            return Value(roots, Effect(writes=held.roots))
        if name in known.MOVES_MODULES and _may_be_module(func.value, self.scope):
            return Value(roots, Effect(writes=_HEAP))
        if (written := self._written_by_keyword()) is not None:
            return written
        if name in known.RANDOM:
            return Value(roots, Effect(draws=f"{name} draws random numbers"))
        given = any(argument.keyword is None for argument in self.node.args)
        if name in known.NO_METHODS or (name in known.ALONE and given):
            return self._unknown(f"`.{name}(…)` of what may be a module")
        if name in known.FRESH or name in known.ABOUT:
            if name == "add" and not _is_tensor_like(func.value):
                return Value(roots)
            return Value(frozenset())
        if name in known.VIEWS or name in known.CONTAINER_READS or name in known.CONFIG_READS:
            return Value(roots)
        if name in known.CONTAINER_WRITES and _is_container(func.value, self.scope):
            return Value(roots, Effect(writes=held.roots))
        return self._unknown(f"`.{name}(…)`")

    def _follow(self, function: cst.FunctionDef, owner: ClassInfo | None) -> Value:
        """Return what a function of the file does to these arguments."""
        name = function.name.value
        if owner is None and not self.names.function_is_plain(function):
            return self._unknown(f"`{name}`, which is decorated")
        summary = self.scope.effects.summary(function, owner, self.scope.depth + 1)
        everything = self.roots | _HEAP
        if summary.effect.anything:
            return Value(everything, Effect(anything=f"`{name}`: {summary.effect.anything}"), (everything,))
        given = arguments(function, owner, self.node, self.scope)
        if given is None:
            given = {HEAP: everything} | dict.fromkeys(parameters(function), everything)
        return summary.given(given, self.node)

    def _unknown(self, what: str) -> Value:
        everything = self.roots | _HEAP
        return Value(everything, Effect(anything=f"{what} is not known to write nothing"), (everything,))


_POSITIONAL_INPLACE = ("dropout", "relu", "relu6", "silu", "elu", "leaky_relu", "hardswish", "mish", "selu", "celu")


def _together(values: Iterable[Value], roots: frozenset[str] = frozenset()) -> Value:
    found = list(values)
    roots = frozenset[str]().union(roots, *(value.roots for value in found))
    joins = tuple(group for value in found for group in value.joins)
    return Value(roots, union(value.effect for value in found), joins)


def _is_super(node: cst.BaseExpression) -> bool:
    return (
        isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value == "super" and not node.args
    )


def _root(node: cst.BaseExpression) -> str:
    """Return `a` of `a.b.c`, `""` of what starts otherwise."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def _renormalises(node: cst.Call, place: int) -> bool:
    """Whether a call names `max_norm`, for which an embedding writes its weights at every use."""
    words = [a.keyword.value for a in node.args if a.keyword is not None]
    return "max_norm" in words or len(node.args) - len(words) >= place


def _with(value: Value, effect: Effect) -> Value:
    return Value(value.roots, value.effect | effect, value.joins)


def _tells(func: cst.Attribute, scope: Scope) -> bool:
    """Whether this is a method of the file's logger or the like."""
    root = _root(func)
    return root in known.QUIET and root not in scope.locals and scope.names.means(root)


def _may_be_module(node: cst.BaseExpression, scope: Scope, seen: frozenset[str] = frozenset()) -> bool:
    """Whether `node` may be a module: an attribute of self that the file does not make a tensor, or a local for it."""
    if isinstance(node, cst.Name):
        if node.value == "self":
            return True
        if node.value in seen or node.value in parameters(scope.function) or node.value not in scope.locals:
            return False
        return any(_may_be_module(value, scope, seen | {node.value}) for value in scope.assigned(node.value))
    if isinstance(node, cst.IfExp):
        return any(_may_be_module(side, scope, seen) for side in (node.body, node.orelse))
    if isinstance(node, cst.Subscript):
        return _may_be_module(node.value, scope, seen)
    if not isinstance(node, cst.Attribute) or node.attr.value in ("weight", "bias", "data"):
        return False
    name = self_attribute(node)
    if name is None or scope.owner is None:
        return _may_be_module(node.value, scope, seen)
    values = attribute(scope.owner, name, scope.names).values
    return any(not makes_tensor(value, scope) for value in values)


def _is_object(node: cst.BaseExpression, scope: Scope) -> bool:
    """Whether the function asks a local, or what it was assigned, for an attribute that no tensor has."""
    if not isinstance(node, cst.Name) or node.value not in scope.locals:
        return False
    if node.value in scope.objects:
        return True
    value = scope.single.get(node.value)
    return isinstance(value, cst.Name) and _is_object(value, scope)


def makes_tensor(value: cst.BaseExpression, scope: Scope) -> bool:
    """Whether a value that an attribute is given is certainly no module."""
    if isinstance(value, cst.Call):
        name = scope.names.resolved(value.func)
        return known.torch_function(name) != "" or name.endswith(("nn.Parameter", "nn.Buffer"))
    return not isinstance(value, (cst.Name, cst.Attribute, cst.IfExp))


def is_parameter(value: cst.BaseExpression, scope: Scope) -> bool:
    """Whether a value that an attribute is given is a tensor."""
    if not isinstance(value, cst.Call):
        return False
    name = scope.names.resolved(value.func)
    return name.endswith(("nn.Parameter", "nn.Buffer")) or known.torch_function(name) in known.FRESH


def makes_new_tensor(scope: Scope, node: cst.Call) -> bool:
    """Whether a call certainly returns a tensor: a method or function that only tensors have, or a module of torch."""
    if isinstance(node.func, cst.Attribute):
        name = known.torch_function(scope.names.resolved(node.func))
        if name or self_attribute(node.func) is None:
            name = name or node.func.attr.value
            return name in known.TENSORS and name not in scope.names.methods
    attribute_name = self_attribute(node.func)
    if attribute_name is None or scope.owner is None:
        return False
    values = attribute(scope.owner, attribute_name, scope.names)
    kinds = [
        known.torch_module(scope.names.resolved(v.func)) if isinstance(v, cst.Call) else "" for v in values.values
    ]
    return not values.unknown and bool(kinds) and all(kind in known.FRESH_MODULES for kind in kinds)


def _is_tensor_like(node: cst.BaseExpression) -> bool:
    return not isinstance(node, (cst.Set, cst.SetComp))


def _is_container(node: cst.BaseExpression, scope: Scope) -> bool:
    """Whether `node` is a list, set or dictionary that this function made."""
    if isinstance(node, (cst.List, cst.Dict, cst.Set, cst.ListComp, cst.DictComp, cst.SetComp)):
        return True
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
        return node.func.value in ("list", "dict", "set") and scope.names.means(node.func.value)
    return isinstance(node, cst.Name) and node.value in scope.single and _is_container(scope.single[node.value], scope)
