"""Imports and definitions at the top of a rewritten file: what the new code needs in, what nothing reads out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import libcst as cst

from rewrite.analysis.syntax.module import Module, bound_name
from rewrite.analysis.syntax.nodes import LINE_LENGTH


def without_unused(module: Module, before: Module) -> cst.Module:
    """Return the tree without the functions and imports that `before` read somewhere and `module` reads nowhere."""
    while unused := _unused(module, before):
        tree = module.tree.visit(_Remove(unused))
        if not isinstance(tree, cst.Module):
            raise TypeError("removing names replaced the module itself")
        module = Module(tree)
    return module.tree


def with_runtime(tree: cst.Module, uses: Sequence[str]) -> cst.Module:
    """Return the tree with one `from .runtime.<room> import <functions>` a room, after its last top-level import."""
    by_room: dict[str, list[str]] = {}
    for use in uses:
        room, function = use.split(".")
        by_room.setdefault(room, []).append(function)
    return insert_imports(tree, [_from_runtime(room, sorted(by_room[room])) for room in sorted(by_room)])


def with_lines(tree: cst.Module, lines: Sequence[str]) -> cst.Module:
    """Return the tree with those of the import `lines` that bind a name which it reads and does not import yet."""
    module = Module(tree)

    def is_needed(line: str) -> bool:
        parsed = cst.parse_module(line)
        return any(module.references.get(name) and name not in module.imports for name in Module(parsed).imports)

    return insert_imports(tree, [line for line in lines if is_needed(line)])


def _from_runtime(room: str, functions: Sequence[str]) -> str:
    line = f"from .runtime.{room} import {', '.join(functions)}"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"from .runtime.{room} import (", *(f"    {function}," for function in functions), ")"])


def insert_imports(tree: cst.Module, lines: Sequence[str]) -> cst.Module:
    """Return the tree with import `lines` as a group of their own after its last top-level import."""
    body = list(tree.body)
    places = [index for index, statement in enumerate(body) if _is_import(statement)]
    place = places[-1] + 1 if places else 0
    new = [cst.parse_statement(line, config=tree.config_for_parsing) for line in lines]
    if places and new:
        new[0] = new[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return tree.with_changes(body=[*body[:place], *new, *body[place:]])


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and any(
        isinstance(small, (cst.Import, cst.ImportFrom)) for small in statement.body
    )


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
