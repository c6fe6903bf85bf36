"""Imports at the top of a rewritten file: what the new code needs, in the order in which formatters put them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from rewrite.analysis.syntax.module import Module, dotted
from rewrite.analysis.syntax.nodes import LINE_LENGTH


def with_runtime(tree: cst.Module, uses: Sequence[str]) -> cst.Module:
    """Return the tree with one `from .runtime.<room> import <functions>` a room, after its last top-level import."""
    by_room: dict[str, list[str]] = {}
    for use in uses:
        room, function = use.split(".")
        by_room.setdefault(room, []).append(function)
    rooms = {room: sorted(functions, key=isort_key) for room, functions in sorted(by_room.items())}
    return insert_imports(tree, [from_line(f".runtime.{room}", functions) for room, functions in rooms.items()])


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


def sorted_library(tree: cst.Module, library: str) -> cst.Module:
    """Return the tree with the imports from `library` in every block of imports sorted as isort does.

    They were relative once, in a group of their own, and sorted by their dots.
    """
    sorter = _Sorter(library)
    return _module(tree.visit(sorter))


class _Sorter(cst.CSTTransformer):
    def __init__(self, library: str):
        super().__init__()
        self.library = library

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=list(self._sorted(updated_node.body)))

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=list(self._sorted(updated_node.body)))

    def _sorted(self, body: Sequence[cst.BaseStatement]) -> Iterator[cst.BaseStatement]:
        block: list[cst.SimpleStatementLine] = []
        for statement in body:
            if _is_import(statement) and isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
                block.append(statement)
                continue
            yield from self._block(block)
            block = []
            yield statement
        yield from self._block(block)

    def _block(self, block: Sequence[cst.SimpleStatementLine]) -> list[cst.SimpleStatementLine]:
        """Sort those of the library where the first of them stands; the others keep their order."""
        own = [line for line in block if self._root(line) == self.library]
        if len(own) < 2:
            return list(block)
        first = next(place for place, line in enumerate(block) if line is own[0])
        ordered = sorted(_merged(own), key=_module_key)
        if ordered == own:
            return list(block)
        blank = [line for line in own[0].leading_lines if line.comment is None]
        lines = [_without_blank(line) for line in ordered]
        lines[0] = lines[0].with_changes(leading_lines=[*blank, *lines[0].leading_lines])
        before = [line for line in block[:first] if self._root(line) != self.library]
        return [*before, *lines, *(line for line in block[first:] if self._root(line) != self.library)]

    def _root(self, line: cst.SimpleStatementLine) -> str:
        imported = line.body[0]
        if isinstance(imported, cst.ImportFrom):
            return dotted(imported.module).split(".")[0] if imported.module and not imported.relative else ""
        return ""


def _merged(lines: Sequence[cst.SimpleStatementLine]) -> list[cst.SimpleStatementLine]:
    """Join plain imports from the same module, which two numbers of dots had kept apart."""
    found: dict[str, cst.SimpleStatementLine] = {}
    for number, line in enumerate(lines):
        statement = cst.ensure_type(line.body[0], cst.ImportFrom)
        name = dotted(statement.module) if statement.module is not None else ""
        other = found.get(name)
        if other is None or not _is_plain(line) or not _is_plain(other):
            found[name if other is None else f"{name} #{number}"] = line
            continue
        aliases = [*_names(cst.ensure_type(other.body[0], cst.ImportFrom)), *_names(statement)]
        text = from_line(name, sorted(set(aliases), key=isort_key))
        found[name] = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine).with_changes(
            leading_lines=other.leading_lines
        )
    return list(found.values())


def _is_plain(line: cst.SimpleStatementLine) -> bool:
    """Whether an import has neither aliases nor comments."""
    statement = cst.ensure_type(line.body[0], cst.ImportFrom)
    aliases = () if isinstance(statement.names, cst.ImportStar) else statement.names
    return bool(aliases) and not any(a.asname for a in aliases) and "#" not in cst.Module([line]).code


def _names(statement: cst.ImportFrom) -> list[str]:
    return [] if isinstance(statement.names, cst.ImportStar) else [dotted(alias.name) for alias in statement.names]


def _module_key(line: cst.SimpleStatementLine) -> tuple[object, ...]:
    """Order imports as isort does: by module without regard to case, numbers by their value; then by first name."""
    statement = cst.ensure_type(line.body[0], cst.ImportFrom)
    name = dotted(statement.module) if statement.module is not None else ""
    return (_natural(name), *(_natural(member) for member in _names(statement)[:1]))


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", text.lower()))


def _without_blank(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    return line.with_changes(leading_lines=[empty for empty in line.leading_lines if empty.comment is not None])


def _module(tree: cst.Module | cst.RemovalSentinel | cst.FlattenSentinel[cst.Module]) -> cst.Module:
    if not isinstance(tree, cst.Module):
        raise TypeError("sorting imports replaced the module itself")
    return tree
