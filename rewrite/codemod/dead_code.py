"""What rewriting leaves behind: definitions, imports and locals that the file read before and nothing reads now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import libcst as cst

from rewrite.analysis.effects import effects_of
from rewrite.analysis.tree.module import ClassInfo, Module, bound_name, walk
from rewrite.analysis.tree.nodes import replace_nodes


def without_unused(module: Module, before: Module) -> cst.Module:
    """Return the tree without what `before` read somewhere and `module` reads nowhere: functions and imports at the
    top, methods and locals whose names are private to a class or a function.
    """
    while True:
        if unused := _unused(module, before):
            tree: cst.CSTNode = module.tree.visit(_Remove(unused))
        elif dead := {
            id(node): ()
            for node in (*_methods(module, before), *_locals(module, before), *_identities(module, before))
        }:
            tree = replace_nodes(module.tree, dead)
        else:
            return module.tree
        if not isinstance(tree, cst.Module):
            raise TypeError("removing names replaced the module itself")
        module = Module(tree)


def _methods(module: Module, before: Module) -> Iterator[cst.FunctionDef]:
    """Yield methods with a leading underscore that nothing reads any more."""
    for info, name, method in module.methods():
        there = before.classes[info.name].methods if info.name in before.classes else {}
        private = name.startswith("_") and not name.startswith("__")
        if private and name in there and before.references.get(name, 0) > 0 and module.references.get(name, 0) == 0:
            if len(info.methods) > 1:
                yield method


def _locals(module: Module, before: Module) -> Iterator[cst.SimpleStatementLine]:
    """Yield assignments to locals that nothing reads any more, where the value does nothing else."""
    earlier = {where: function for where, _, function in _functions(before)}
    for where, owner, function in _functions(module):
        if where not in earlier or not (gone := _read(earlier[where]) - _read(function)):
            continue
        scope = effects_of(module).scope(function, owner)
        for node in walk(function.body):
            name = _assigned(node)
            if name in gone and name not in _shared(function) and scope.of(_value(node)).is_pure:
                if len(getattr(module.parent(node), "body", ())) > 1 and isinstance(node, cst.SimpleStatementLine):
                    yield node


def _identities(module: Module, before: Module) -> Iterator[cst.CSTNode]:
    """Yield lines such as `k, v = k, v`, which the file did not have."""
    earlier = {where: function for where, _, function in _functions(before)}
    for where, _, function in _functions(module):
        if where in earlier and not any(_is_identity(node) for node in walk(earlier[where].body)):
            for node in walk(function.body):
                if _is_identity(node) and len(getattr(module.parent(node), "body", ())) > 1:
                    yield node


def _is_identity(node: cst.CSTNode) -> bool:
    if (
        not isinstance(node, cst.SimpleStatementLine)
        or len(node.body) != 1
        or not isinstance(node.body[0], cst.Assign)
    ):
        return False
    line = node.body[0]
    sides = [_names(side) for side in (*(target.target for target in line.targets), line.value)]
    return sides[0] is not None and all(side == sides[0] for side in sides)


def _names(node: cst.BaseExpression) -> list[str] | None:
    """Return the names of a name or of a tuple of names, None for anything else."""
    if isinstance(node, cst.Name):
        return [node.value]
    if not isinstance(node, cst.Tuple):
        return None
    names = [element.value.value for element in node.elements if isinstance(element.value, cst.Name)]
    return names if len(names) == len(node.elements) and len(set(names)) == len(names) else None


def _functions(module: Module) -> Iterator[tuple[str, ClassInfo | None, cst.FunctionDef]]:
    yield from ((name, None, function) for name, function in module.functions.items())
    yield from ((f"{info.name}.{name}", info, function) for info, name, function in module.methods())


def _read(function: cst.FunctionDef) -> set[str]:
    """Return the names that a function reads, and those that it deletes or adds to."""
    targets = {id(t.target) for n in walk(function.body) if isinstance(n, cst.Assign) for t in n.targets}
    return {node.value for node in walk(function.body) if isinstance(node, cst.Name) and id(node) not in targets}


def _shared(function: cst.FunctionDef) -> set[str]:
    """Return the names that a function shares with others by `global` or `nonlocal`."""
    declared = (node for node in walk(function.body) if isinstance(node, (cst.Global, cst.Nonlocal)))
    return {item.name.value for node in declared for item in node.names}


def _assigned(node: cst.CSTNode) -> str | None:
    """Return `x` of a line `x = value`."""
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 and isinstance(node.body[0], cst.Assign):
        target = node.body[0].targets[0].target
        return target.value if isinstance(target, cst.Name) and len(node.body[0].targets) == 1 else None
    return None


def _value(node: cst.CSTNode) -> cst.BaseExpression:
    return cst.ensure_type(cst.ensure_type(node, cst.SimpleStatementLine).body[0], cst.Assign).value


def _unused(module: Module, before: Module) -> set[str]:
    named = {*module.functions, *module.imports}
    exported = _exported(module)
    return {
        name for name in named - exported if before.references.get(name, 0) > 0 and module.references.get(name, 0) == 0
    }


def _exported(module: Module) -> set[str]:
    """Return the names in `__all__`, which are text and therefore not references."""
    for statement in module.tree.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for small in statement.body:
            if isinstance(small, cst.Assign) and module.code(small.targets[0].target) == "__all__":
                elements = getattr(small.value, "elements", ())
                values = (element.value for element in elements)
                return {str(v.evaluated_value) for v in values if isinstance(v, cst.SimpleString)}
    return set()


_Import = TypeVar("_Import", cst.Import, cst.ImportFrom)


class _Remove(cst.CSTTransformer):
    """Removes top-level functions and import names."""

    def __init__(self, names: set[str]):
        super().__init__()
        self.names = names

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef | cst.RemovalSentinel:
        return cst.RemoveFromParent() if original_node.name.value in self.names else updated_node

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import | cst.RemovalSentinel:
        kept = [alias for alias in updated_node.names if bound_name(alias).split(".")[0] not in self.names]
        return self._with_names(updated_node, kept)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        kept = [alias for alias in updated_node.names if bound_name(alias) not in self.names]
        return self._with_names(updated_node, kept)

    def _with_names(self, node: _Import, kept: list[cst.ImportAlias]) -> _Import | cst.RemovalSentinel:
        if isinstance(node.names, cst.ImportStar) or len(kept) == len(node.names):
            return node
        if not kept:
            return cst.RemoveFromParent()
        one_line = node.names[-1].comma == cst.MaybeSentinel.DEFAULT
        last = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT if one_line else node.names[-1].comma)
        return node.with_changes(names=[*kept[:-1], last])
