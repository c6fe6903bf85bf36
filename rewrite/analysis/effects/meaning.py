"""Whether a function of the file does what its text says, however it is called and whatever the file does besides."""

from __future__ import annotations

import builtins

import libcst as cst

from rewrite.analysis.effects import known
from rewrite.analysis.effects.analysis import Effects
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk


def why_not_plain(effects: Effects, function: cst.FunctionDef, owner: ClassInfo | None = None) -> str:
    """Return why a function, or what it calls of the file, may be another one than its text; `""` where it is not.

    That is a decorator that is not known, a name that is bound again, changed from outside or imported with a star, a
    method that a class of the file overrides, a function with state of its own.
    """
    return _Meaning(effects).why(function, owner)


def why_unsure(effects: Effects, function: cst.FunctionDef, owner: ClassInfo | None = None) -> str:
    """Return which name that a function reads, or that what it calls of the file reads, may mean something else.

    For a rule that changes a function's own statements only: who calls it, and by which name, is left as it was.
    """
    return _Meaning(effects).reads(function, owner)


def own_names(function: cst.FunctionDef, module: Module) -> list[str]:
    """Return every name that a function's statements read or bind, attributes and keywords left out, in order."""
    found: dict[str, None] = {}
    for node in walk(function.body):
        if isinstance(node, cst.Name):
            above = module.parent(node)
            if not (isinstance(above, cst.Attribute) and above.attr is node) and not (
                isinstance(above, cst.Arg) and above.keyword is node
            ):
                found[node.value] = None
    return list(found)


class _Meaning:
    def __init__(self, effects: Effects):
        self.effects = effects
        self.names = effects.names
        self.module = effects.module
        self.seen: set[int] = set()

    def why(self, function: cst.FunctionDef, owner: ClassInfo | None) -> str:
        """Return what is not known about one function."""
        if id(function) in self.seen:
            return ""
        self.seen.add(id(function))
        return self._itself(function, owner) or self.reads(function, owner)

    def _itself(self, function: cst.FunctionDef, owner: ClassInfo | None) -> str:
        name = function.name.value
        if not self.names.function_is_plain(function):
            return f"{name} is decorated by `{self.module.code(function.decorators[0].decorator)}`"
        if owner is None:
            return "" if self.names.means(name) else f"`{name}` may be bound to something else"
        holder = next((info for info in self.names.owners(owner) if info.methods.get(name) is function), owner)
        if not self.names.method_is_plain(holder, name) or name in self.names.stored:
            return f"{holder.name}.{name} may be bound to something else"
        heir = next((info.name for info in self.names.heirs(owner) if name in info.methods), "")
        return f"{heir} overrides {name}" if heir else ""

    def reads(self, function: cst.FunctionDef, owner: ClassInfo | None) -> str:
        """Return which name that a function reads is not known."""
        scope = self.effects.scope(function, owner)
        if scope.unknown:
            return f"{function.name.value}: {scope.unknown}"
        for name in own_names(function, self.module):
            if name in scope.locals or (name in known.RUNTIME and not self.names.is_bound(name)):
                continue
            if not self.names.means(name) and (self.names.is_bound(name) or hasattr(builtins, name)):
                return f"`{name}` may be bound to something else"
            if name in self.module.functions and name in self.names.stored:
                return f"`.{name}` is set, which may be the function of the file"
            if name in self.module.functions and (found := self.why(self.module.functions[name], None)):
                return found
        for node in walk(function.body) if owner is not None else ():
            method = self_attribute(node.func) if isinstance(node, cst.Call) else None
            helper = self.module.method(owner, method) if method is not None and owner is not None else None
            if helper is not None and (found := self.why(helper, owner)):
                return found
        return ""
