"""Imports at the top of a rewritten file: what the new code needs, in the order in which formatters put them."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from rewrite.analysis.tree.module import Module
from rewrite.analysis.tree.nodes import LINE_LENGTH
from rewrite.operators import module_of


def with_runtime(tree: cst.Module, uses: Sequence[str]) -> cst.Module:
    """Return the tree with one `from hf_rewrite_runtime.<room>.<file> import <names>` a file, after its last import.

    Raises:
        UsageError: if the runtime offers no such thing: a rule of the user's own asked for it.
    """
    by_module: dict[str, list[str]] = {}
    for use in uses:
        by_module.setdefault(module_of(use), []).append(use)
    modules = {module: sorted(names, key=isort_key) for module, names in sorted(by_module.items())}
    return insert_imports(tree, [from_line(module, names) for module, names in modules.items()])


def with_lines(tree: cst.Module, lines: Sequence[str]) -> cst.Module:
    """Return the tree with those of the import `lines` that bind a name which it reads and does not import yet."""
    module = Module(tree)

    def is_needed(line: str) -> bool:
        parsed = cst.parse_module(line)
        return any(module.references.get(name) and name not in module.imports for name in Module(parsed).imports)

    return insert_imports(tree, [line for line in lines if is_needed(line)])


def from_line(module: str, names: Sequence[str]) -> str:
    """Return `from <module> import <names>`, one name a line where it is too long for one."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def isort_key(name: str) -> tuple[int, str]:
    """Order names as isort does: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


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
