"""A package in the form that transformers' dynamic modules load: flat files that import each other with one dot.

`AutoModel.from_pretrained(…, trust_remote_code=True)` copies the file that `auto_map` names and those that it imports
as `from .name import …`: no folders, and in transformers 5.0 only what that one file names itself. So
`runtime/norms.py` becomes `rewrite_runtime_norms.py`, a file `runtime/norms/rms_norm.py` of an older package
`rewrite_runtime_norms_rms_norm.py`, and the modeling file names them all. Reads text, imports nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MARK = "# Flat copy by hf-rewrite (Apache-2.0) of "
"""Begins every flat file of the runtime; the modeling file and those beside it keep their own headers and notices."""
UPSTREAM = "runtime/upstream.py"
_GUARDS = ("runtime/origin.py", "runtime/origin/guard.py", "runtime/guard.py")
"""The file of the guard, now and in packages of older layouts."""
_LOCK = " rewrite.lock lists what was changed and what was skipped."


class NotFlat(ValueError):
    """A package has no flat form."""


def flat_files(folder: Path, modeling: str, shared: Sequence[Path] = ()) -> dict[str, str]:
    """Return the flat files, by name, of the package in `folder` whose modeling file is `modeling`.

    Args:
        folder: the package.
        modeling: the name of its modeling file.
        shared: where else the files of its `runtime/` are looked for.

    Raises:
        NotFlat: if a file imports one that is not there, or two would have the same name.
    """
    places = _Places(folder, shared)
    guard = _guard(folder / "__init__.py")
    found: dict[str, str] = {}
    made_from = next((name for name in _GUARDS if places.has(name)), "")
    waiting = [modeling, *([made_from, UPSTREAM] if guard else [])]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], needed = _flattened(places, name)
            waiting += needed
    names = {name: flat_name(name) for name in sorted(found)}
    if len(set(names.values())) < len(names):
        raise NotFlat(f"two files would have one name: {', '.join(sorted(names.values()))}")
    runtime = [names[name] for name in sorted(found) if name != modeling]
    texts = {names[name]: _marked(name, text) for name, text in sorted(found.items()) if name != modeling}
    return {modeling: _with_names(found[modeling].replace(_LOCK, "", 1), guard, made_from, runtime), **texts}


@dataclass(frozen=True)
class _Places:
    """Where the files of a package lie."""

    folder: Path
    shared: Sequence[Path]

    def path(self, name: PurePosixPath | str) -> Path:
        """Return where a file is, by its name in the package."""
        parts = PurePosixPath(name).parts
        others = [place.joinpath(*parts[1:]) for place in self.shared if parts[0] == "runtime"]
        return next((path for path in (self.folder / name, *others) if path.is_file()), self.folder / name)

    def has(self, name: PurePosixPath | str) -> bool:
        """Return whether there is such a file."""
        return self.path(name).is_file()


def _marked(name: str, text: str) -> str:
    """Return the text of a flat file; one that lies beside the modeling file is the user's own."""
    return f"{MARK}{name}\n{text}" if "/" in name else text


def flat_name(name: str) -> str:
    """Return the name of the flat file of a file in a package: one at its top keeps its own."""
    path = PurePosixPath(name)
    parts = path.parent.parts if path.name == "__init__.py" else (*path.parent.parts, path.stem)
    return f"{'_'.join(('rewrite', *parts)) if path.parent.parts else path.stem}.py"


def _flattened(places: _Places, name: str) -> tuple[str, list[str]]:
    """Return the text of a file with one dot in each of its relative imports, and the files that these name."""
    text = places.path(name).read_text(encoding="utf-8")
    lines = text.split("\n")
    needed: list[str] = []
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.level]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):
        found = [_imported(places, name, node, alias) for alias in node.names]
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


def _imported(places: _Places, name: str, node: ast.ImportFrom, alias: ast.alias) -> _Imported:
    base = PurePosixPath(name).parents[node.level - 1].joinpath(*(node.module or "").split("."))
    init = base / "__init__.py"
    if node.module is not None and places.has(f"{base}.py"):
        return _Imported(alias, f"{base}.py", is_module=False)
    if base.name and places.has(init) and alias.name in _bound(places.path(init)):  # before a file of that name
        return _Imported(alias, init.as_posix(), is_module=False)
    for path in (base / f"{alias.name}.py", base / alias.name / "__init__.py"):
        if places.has(path):
            return _Imported(alias, path.as_posix(), is_module=True)
    raise NotFlat(f"{name} imports {alias.name}, which no file beside the modeling file or below it has")


def _bound(path: Path) -> set[str]:
    """Return the names that a room's `__init__.py` imports from its files."""
    imports = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imports for alias in node.names}


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


def _guard(init: Path) -> list[str]:
    """Return the arguments with which a package looks at the installed transformers when it is imported."""
    if not init.is_file():
        return []
    for node in ast.parse(init.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.With) and isinstance(call := node.items[0].context_expr, ast.Call):
            if ast.unparse(call.func).endswith("made_from"):
                given = {k.arg: ast.unparse(k.value) for k in call.keywords}
                given["command"] = f"{given['command']} + ', and export it again'"
                tables = {"called", "replaced", "imported"} & given.keys()
                given |= {name: f"_upstream.{name.upper()}" for name in sorted(tables)}
                return [f"{name}={value}," for name, value in given.items()]
    return []


def _with_names(text: str, guard: list[str], guarding: str, files: Iterable[str]) -> str:
    """Return the text of the modeling file with a block before its imports that names every other file."""
    block = ["from typing import TYPE_CHECKING", ""]
    if guard:
        made_from, upstream = (flat_name(name).removesuffix(".py") for name in (guarding, UPSTREAM))
        block += [
            f"from . import {upstream} as _upstream",
            f"from .{made_from} import made_from",
            "",
            "with made_from(",
        ]
        block += [*(f"    {argument}" for argument in guard), "):", "    pass", ""]
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
