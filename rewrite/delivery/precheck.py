"""Checks of a generated package before it is put in place: by reading it, and by importing it in a clean process."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rewrite import gc_paused
from rewrite.errors import GateFailed, SourceDoesNotImport
from rewrite.offers import DISTRIBUTION
from rewrite.package import syntax
from rewrite.package.assemble import KEPT
from rewrite.source import importable, neighbours
from rewrite.source.statements import statements

IMPORT_SECONDS = 300
_NEEDED = ("torch", "transformers", DISTRIBUTION)

# A package or a file is imported by path under a name of its own: its folder's name need not be an identifier, and
# nothing in the working folder may stand in for torch or transformers.
_IMPORT = """
import importlib, importlib.util, os, sys, types
path = sys.argv[1]
sys.path[:] = [place for place in sys.path if place]
if os.path.isdir(path):
    spec = importlib.util.spec_from_file_location(
        "rewritten_package", path + "/__init__.py", submodule_search_locations=[path]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["rewritten_package"] = module
    spec.loader.exec_module(module)
elif sys.argv[2]:
    importlib.import_module(sys.argv[2])
else:  # its neighbours are imported from its folder
    folder = sys.modules["of_the_file"] = types.ModuleType("of_the_file")
    folder.__path__ = [os.path.dirname(path)]
    spec = importlib.util.spec_from_file_location("of_the_file.rewritten", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


@gc_paused.paused()
def check_text(folder: Path, files: Iterable[str]) -> None:
    """Check that the generated `files` parse and that every name that one imports from another exists there.

    Raises:
        GateFailed: if not.
    """
    trees = {folder / name: _parsed(folder / name) for name in sorted(files) if name.endswith(".py")}
    for path, line, said in broken_names(trees):
        raise GateFailed(path.name, f"line {line} {said}")


def broken_names(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, what is wrong) of names that keep the files of a package from being imported.

    They are imported from another file of it, or listed in `__all__`, and nothing there has them.
    """
    known: dict[Path, set[str]] = {}
    for path, tree in trees.items():
        if path.parent.name == KEPT:
            continue
        for line, name, place in _relative_names(tree, path):
            if place not in known:
                known[place] = _offered(place, trees)
            if name != "*" and not known[place] & {name, "*"}:
                yield path, line, f"imports {name} from {place.name}, which does not have it"
        own = bound(tree)
        for line, name in _listed(tree) if "*" not in own else ():
            if name not in own and not (path.parent / f"{name}.py").is_file():
                yield path, line, f"lists {name} in `__all__`, and nothing defines it"


def _offered(place: Path, trees: Mapping[Path, ast.Module]) -> set[str]:
    """What may be imported from a file: one of those given, or of the user's own beside them."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        return bound(trees[place] if place in trees else syntax.parsed(place.read_bytes()))
    return set()


def _listed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of what `__all__` lists as plain text."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            listed = getattr(getattr(node, "value", None), "elts", ())
            for item in listed:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    yield item.lineno, item.value


def missing_libraries() -> list[str]:
    """Return what an import of the package would need and is not installed."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


@contextlib.contextmanager
def importing(folder: Path, source: Path) -> Iterator[None]:
    """Import the package in a process of its own while the block runs.

    Raises:
        SourceDoesNotImport: at its end, if that failed, and the file it was made from cannot be imported either.
        GateFailed: if only the package failed, with the last line of the error.
    """
    with _importing(folder) as process:
        try:
            yield
            why = _error(process, folder)
        finally:
            process.kill()
    if why is None:
        return
    with _importing(source) as process:
        of_source = _error(process, source)
    if of_source is not None and not _in_library(source):
        raise SourceDoesNotImport(source, of_source)
    raise GateFailed("package", why)


def _in_library(source: Path) -> bool:
    """Return whether a file is one of transformers' own, which import their neighbours and not by path."""
    return "transformers" in source.resolve().parts


def _name_of(path: Path) -> str:
    """Return the name by which a file of an installed package is imported, nothing for a package or another file."""
    return (importable.name_of(path) or "") if path.is_file() else ""


def _importing(path: Path) -> subprocess.Popen[str]:
    """Start a process that imports a package or a file."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    command = [sys.executable, "-c", _IMPORT, str(path), _name_of(path)]
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=pipe, text=True, env=environment)


def _error(process: subprocess.Popen[str], path: Path) -> str | None:
    """The last line of the error with which an import ended, None without one."""
    try:
        _, errors = process.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired as error:
        process.kill()
        raise GateFailed(path.name, f"no end after {IMPORT_SECONDS} s") from error
    if process.returncode == 0:
        return None
    return (errors.strip().splitlines() or [f"the process ended with {process.returncode}"])[-1]


def _parsed(path: Path) -> ast.Module:
    try:
        return syntax.parsed(path.read_bytes())
    except SyntaxError as error:
        raise GateFailed(path.name, f"line {error.lineno}: {error.msg}") from error


def _relative_names(tree: ast.Module, path: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield (line, name, file) of every name that `path` imports relatively; a submodule counts as a name of itself.

    What may fail, because a `try` catches it, is left out.
    """
    for node, optional in neighbours.relative(tree):
        if not optional:
            base = path.parent
            for _ in range(node.level - 1):
                base = base.parent
            base = base.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                if (base / f"{alias.name}.py").is_file():
                    continue
                yield node.lineno, alias.name, base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def bound(tree: ast.Module) -> set[str]:
    """Return every name that a file may offer: broad, so that no correct file is refused."""
    names = {name for node in statements(tree) if isinstance(node, ast.Global) for name in node.names}
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        waiting.extend(ast.iter_child_nodes(node))
    return names
