"""A package with a vendored runtime in the form that transformers' dynamic modules load: flat files.

`AutoModel.from_pretrained(…, trust_remote_code=True)` copies the file that `auto_map` names and those that it imports
as `from .name import …`: no folders, and in transformers 5.0 only what that one file names itself. So
`_runtime/norms/rms_norm.py` becomes `rewrite_runtime_norms_rms_norm.py`, and the modeling file names them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

MARK = "# Flat copy by hf-rewrite (Apache-2.0) of "
"""Begins every flat file of the runtime; the modeling file and those beside it keep their own headers and notices."""


class NotFlat(ValueError):
    """A package has no flat form."""


def flat_files(files: Mapping[str, str], modeling: str) -> dict[str, str]:
    """Return the flat files, by name, of a package whose modeling file is `modeling`.

    Args:
        files: the text of every Python file of the package, by its path in it.
        modeling: the name of its modeling file.

    Raises:
        NotFlat: if a file imports one that is not there, or two would have the same name.
    """
    found: dict[str, str] = {}
    waiting = [modeling]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], needed = _flattened(files, name)
            waiting += needed
    names = {name: flat_name(name) for name in sorted(found)}
    if len(set(names.values())) < len(names):
        raise NotFlat(f"two files would have one name: {', '.join(sorted(names.values()))}")
    others = [names[name] for name in sorted(found) if name != modeling]
    texts = {names[name]: _marked(name, text) for name, text in sorted(found.items()) if name != modeling}
    return {modeling: _with_names(found[modeling], others), **texts}


def _marked(name: str, text: str) -> str:
    """Return the text of a flat file; one that lies beside the modeling file is the user's own."""
    return f"{MARK}{name}\n{text}" if "/" in name else text


def flat_name(name: str) -> str:
    """Return the name of the flat file of a file in a package: one at its top keeps its own."""
    path = PurePosixPath(name)
    folders = tuple(part.strip("_") for part in path.parent.parts)
    parts = folders if path.name == "__init__.py" else (*folders, path.stem)
    return f"{'_'.join(('rewrite', *parts)) if path.parent.parts else path.stem}.py"


def _flattened(files: Mapping[str, str], name: str) -> tuple[str, list[str]]:
    """Return the text of a file with one dot in each of its relative imports, and the files that these name."""
    text = files[name]
    lines = text.split("\n")
    needed: list[str] = []
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.level]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):
        found = [_imported(files, name, node, alias) for alias in node.names]
        needed += [one.file for one in found]
        if not any("/" in file for file in (name, *(one.file for one in found))):
            continue  # files beside the modeling file are flat
        _replace(lines, node, list(_statements(found)))
    return "\n".join(lines), needed


@dataclass(frozen=True)
class _Imported:
    """One name that a file imports from another of its package."""

    alias: ast.alias
    file: str
    is_module: bool
    """Whether the name is the file itself, and not something in it."""


def _imported(files: Mapping[str, str], name: str, node: ast.ImportFrom, alias: ast.alias) -> _Imported:
    base = PurePosixPath(name).parents[node.level - 1].joinpath(*(node.module or "").split("."))
    if node.module is not None and f"{base}.py" in files:
        return _Imported(alias, f"{base}.py", is_module=False)
    if base.name and f"{base}/__init__.py" in files and alias.name.startswith("__"):
        return _Imported(alias, f"{base}/__init__.py", is_module=False)
    for path in (base / f"{alias.name}.py", base / alias.name / "__init__.py"):
        if path.as_posix() in files:
            return _Imported(alias, path.as_posix(), is_module=True)
    raise NotFlat(f"{name} imports {alias.name}, which no file beside the modeling file or below it has")


def _statements(imported: Iterable[_Imported]) -> Iterator[str]:
    """Yield the statements that take the place of one import: names of one file together, each module alone."""
    names: dict[str, list[str]] = {}
    for one in imported:
        flat, alias = flat_name(one.file).removesuffix(".py"), one.alias
        if one.is_module:
            yield f"from . import {flat} as {alias.asname or alias.name}"
        else:
            names.setdefault(flat, []).append(f"{alias.name} as {alias.asname}" if alias.asname else alias.name)
    for flat, listed in names.items():
        yield f"from .{flat} import {', '.join(listed)}"


def _replace(lines: list[str], node: ast.ImportFrom, statements: list[str]) -> None:
    """Put statements in the place of one, with its indentation, and keep what stands behind it in its last line."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    behind = lines[last].encode()[node.end_col_offset :].decode()
    between = "; " if before.strip() or behind.strip().startswith(";") else f"\n{before}"
    lines[first : last + 1] = f"{before}{between.join(statements)}{behind}".split("\n")


def _with_names(text: str, files: Iterable[str]) -> str:
    """Return the text of the modeling file with a block before its imports that names every other file."""
    block = ["from typing import TYPE_CHECKING", ""]
    block += ["if TYPE_CHECKING:  # transformers copies the files that it finds named in this one"]
    block += [f"    from .{name.removesuffix('.py')} import __name__ as _" for name in files] or ["    pass"]
    lines = text.split("\n")
    start = _first_line(ast.parse(text))
    return "\n".join([*lines[:start], *block, "", *lines[start:]])


def _first_line(tree: ast.Module) -> int:
    """Return where the imports of a file begin, counted from 0: behind its docstring and `from __future__`."""
    for number, node in enumerate(tree.body):
        docstring = not number and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return node.lineno - 1
    return 0
