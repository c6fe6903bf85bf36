"""What a file of a package imports of its runtime and does not find there: edits made for an older layout, mostly."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewrite.deliver.precheck import bound
from rewrite.package import parts
from rewrite.package.parts import Own
from rewrite.package.syntax import parsed


@dataclass(frozen=True)
class Lacking:
    """An import that finds nothing."""

    line: int
    said: str
    """`imports .runtime.norms.rms_norm, …`: goes on from the file's name."""


def lacking(text: str, runtime: Mapping[str, bytes]) -> list[Lacking]:
    """Return the imports of a text from its package's runtime that find nothing there.

    Args:
        text: a file at the top of a package.
        runtime: the files of its runtime, by their path in the package; those that it shares too.
    """
    return list(_lacking(ast.parse(text.removeprefix("\ufeff")), runtime))


def _lacking(tree: ast.Module, runtime: Mapping[str, bytes]) -> Iterator[Lacking]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level != 1 or (node.module or "").split(".")[0] != "runtime":
            continue
        base = (node.module or "").replace(".", "/")
        file = next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in runtime), None)
        if file is None:
            yield Lacking(node.lineno, f"imports .{node.module}, {_instead(node)}")
            continue
        names = bound(parsed(runtime[file]))
        for alias in node.names:
            if alias.name != "*" and alias.name not in names and not _is_module(f"{base}/{alias.name}", runtime):
                yield Lacking(node.lineno, f"imports {alias.name} of .{node.module}, which does not have it")


def unfound(text: str, runtime: Mapping[str, bytes]) -> list[Lacking]:
    """Return, one a line, the imports of a text that find nothing in a runtime, or will find nothing after a sync."""
    return list({one.line: one for one in (*lacking(text, runtime), *of_old_layout(text))}.values())


def of_old_layout(text: str) -> list[Lacking]:
    """Return the imports of a text that name a file of a room: of the time when that was a folder, or flat."""
    tree = ast.parse(text.removeprefix("\ufeff"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1)
    names = ((node, (node.module or "").split(".")) for node in imports)
    return [
        Lacking(node.lineno, f"imports .{node.module}, {_instead(node)}")
        for node, path in names
        if path[0] == "runtime" and _old_file(path[1:])
    ]


def _old_file(path: Sequence[str]) -> str:
    """Return the file of `runtime/` that a dotted name was in an older layout, "" if it is a room or never was one."""
    if len(path) == 2:
        return "/".join(path)
    found = [file for file in sorted(parts.modules()) if [file.split("/")[1]] == [*path]]
    rooms = {file.split("/")[0] for file in parts.modules()}
    return found[0] if len(found) == 1 and path[0] not in rooms else ""


def _is_module(base: str, runtime: Mapping[str, bytes]) -> bool:
    return f"{base}.py" in runtime or f"{base}/__init__.py" in runtime


def _instead(node: ast.ImportFrom) -> str:
    """Say what an import of a file of a room has to be now that a room is a file."""
    file = _old_file((node.module or "").split(".")[1:])
    if file not in parts.modules():
        return "which this package's runtime does not have"
    room = file.split("/")[0]
    names = parts.final_names()
    now = [(names.get(Own(file, alias.name)), alias) for alias in node.names]
    if any(name is None for name, _ in now):
        return f"a file of an older layout: a room is one file now, .runtime.{room}"
    listed = ", ".join(_as(str(name), alias) for name, alias in now)
    return f"a file of an older layout: write `from .runtime.{room} import {listed}`"


def _as(name: str, alias: ast.alias) -> str:
    own = alias.asname or alias.name
    return name if name == own else f"{name} as {own}"
