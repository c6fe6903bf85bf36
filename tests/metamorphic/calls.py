"""Which function or class of the file a call reaches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in


@dataclass(frozen=True)
class Target:
    """What a call reaches: a function of the file, the `forward` of a class of it, or something from elsewhere."""

    function: cst.FunctionDef | None
    is_method: bool = False
    layer: str = ""
    """Name of the class whose `forward` it is."""

    @property
    def parameters(self) -> list[cst.Param]:
        """Parameters that take positions, without `self`."""
        assert self.function is not None
        params = self.function.params
        found = [*params.posonly_params, *params.params]
        return found[1:] if self.is_method else found


ELSEWHERE = Target(None)


class Calls:
    """The calls of a module by what they reach; a call that is not understood reaches None."""

    def __init__(self, module: Module):
        self.module = module

    @cached_property
    def all(self) -> list[tuple[cst.Call, Target | None]]:
        """Every call of the file."""
        return [(call, self.target(call)) for call in calls_in(self.module.tree)]

    def target(self, call: cst.Call) -> Target | None:
        """Return what a call reaches, None where that is not certain."""
        function = call.func
        if isinstance(function, cst.Name):
            return self._named(function)
        attribute, owner = self_attribute(function), self._owner(call)
        if attribute is not None and owner is not None:
            if self.module.method(owner, attribute) is not None:
                return None
            made = {self._built(value) for value in self.module.assignments(owner, attribute)}
            return self._forward(made)
        root = self.module.qualified(function).split(".")[0]
        return ELSEWHERE if root in ("torch", "math", "super") else None

    def layers_of(self, loop: cst.For) -> set[str]:
        """Return the classes whose instances a loop over `self.layers` goes through; `""` stands for any."""
        nodes = [n for n in walk(loop.iter) if isinstance(n, cst.Attribute)]
        owner = self._owner(loop)
        found: set[str] = set()
        for node in nodes:
            attribute = self_attribute(node)
            if attribute is None or owner is None:
                continue
            for value in self.module.assignments(owner, attribute):
                names = [self.module.qualified(c.func) for c in calls_in(value)]
                inside = [name for name in names if name in self.module.classes]
                found |= set(inside) if inside and not isinstance(value, cst.Name) else {""}
        return found or {""}

    def _named(self, function: cst.Name) -> Target | None:
        name = function.value
        bound = self._bound_inside(function)
        if name in bound:
            return self._forward(bound[name])
        if name in self.module.functions:
            return Target(self.module.functions[name])
        if name in self.module.classes:
            init = self.module.method(self.module.classes[name], "__init__")
            return Target(init, True) if init is not None else ELSEWHERE
        is_builtin = name in __builtins__ if isinstance(__builtins__, dict) else hasattr(__builtins__, name)
        return ELSEWHERE if name in self.module.imports or is_builtin else None

    def _bound_inside(self, node: cst.CSTNode) -> dict[str, set[str]]:
        """By local name, the classes that a loop binds it to; `{""}` where it is bound in another way."""
        above = [n for n in self.module.ancestors(node) if isinstance(n, cst.FunctionDef)]
        if not above:
            return {}
        found: dict[str, set[str]] = {}
        for inner in walk(above[-1]):
            if isinstance(inner, cst.For):
                target = inner.target
                if isinstance(target, cst.Tuple) and target.elements:
                    target = target.elements[-1].value
                if isinstance(target, cst.Name):
                    found.setdefault(target.value, set()).update(self.layers_of(inner))
            elif isinstance(inner, (cst.AssignTarget, cst.AnnAssign, cst.NamedExpr)):
                if isinstance(inner.target, cst.Name):
                    found.setdefault(inner.target.value, set()).add("")
            elif isinstance(inner, cst.Param) or (isinstance(inner, cst.FunctionDef) and inner is not above[-1]):
                found.setdefault(inner.name.value, set()).add("")
        return found

    def _forward(self, made: set[str]) -> Target | None:
        if made and all(name.startswith("torch.nn.") for name in made):
            return ELSEWHERE
        if len(made) != 1:
            return None
        name = next(iter(made))
        if name not in self.module.classes:
            return ELSEWHERE if name == "ACT2FN[]" else None
        forward = self.module.method(self.module.classes[name], "forward")
        return Target(forward, True, name) if forward is not None else None

    def _built(self, value: cst.BaseExpression) -> str:
        if isinstance(value, cst.Call):
            return self.module.qualified(value.func)
        is_table = isinstance(value, cst.Subscript) and self.module.code(value.value) == "ACT2FN"
        return "ACT2FN[]" if is_table else ""

    def _owner(self, node: cst.CSTNode) -> ClassInfo | None:
        above = [n for n in self.module.ancestors(node) if isinstance(n, cst.ClassDef)]
        return self.module.classes.get(above[-1].name.value) if above else None


def derives(info: ClassInfo, module: Module, ending: str) -> bool:
    """Whether a class has a base, at any height, whose name ends so."""
    return any(_ends(base, module, ending) for base in info.bases)


def _ends(base: str, module: Module, ending: str) -> bool:
    if base.endswith(ending):
        return True
    return base in module.classes and derives(module.classes[base], module, ending)


def plain_names(node: cst.CSTNode, module: Module) -> Iterator[cst.Name]:
    """Yield the names below a node that are neither attributes nor keywords of a call."""
    for inner in walk(node):
        if not isinstance(inner, cst.Name):
            continue
        above = module.parent(inner)
        attribute = isinstance(above, cst.Attribute) and above.attr is inner
        keyword = isinstance(above, cst.Arg) and above.keyword is inner
        if not attribute and not keyword:
            yield inner
