"""What a package takes from transformers: which names, with which keywords, and their fingerprints.

Source is read, never imported, so that one version of transformers can be compared with another that is not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from rewrite.runtime.compat.digests import of_nodes
from rewrite.runtime.compat.fingerprints import Files, fingerprint

_HOPS = 4


def of_module(text: str) -> str:
    """Return the digest of a whole file.

    Raises:
        SyntaxError: if it does not parse.
    """
    return of_nodes([ast.parse(text)])


def of_functions(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each of `names` that is a function, sorted by name.

    Args:
        root: the package folder of transformers.
        names: module below `root` and name in it, `masking_utils:create_causal_mask`.
    """
    found = {}
    for name in sorted(names):
        place = defining(root, name)
        definitions = _definitions(place[0])[place[1]] if place is not None else []
        if any(isinstance(definition, ast.FunctionDef) for definition in definitions):
            found[name] = of_nodes(definitions)
    return found


def imported_names(text: str, package: str = "transformers") -> dict[str, str]:
    """Return what a file imports of `package`, as `of_functions` takes it, by the name that it has in the file.

    Raises:
        SyntaxError: if the file does not parse.
    """
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            first, *rest = node.module.split(".")
            if first == package:
                found |= {alias.asname or alias.name: f"{'.'.join(rest)}:{alias.name}" for alias in node.names}
    return found


def calls(text: str) -> dict[str, list[str]]:
    """Return every function of transformers that a file calls, with the keywords that it gives.

    Raises:
        SyntaxError: if the file does not parse.
    """
    imported = imported_names(text)
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            given = found.setdefault(imported[node.func.id], set())
            given.update(keyword.arg for keyword in node.keywords if keyword.arg is not None)
    return {name: sorted(given) for name, given in sorted(found.items())}


def misfits(root: Path, called: Mapping[str, Sequence[str]]) -> list[str]:
    """Return in words which of the functions `called` (as `calls` returns them) take no such keyword any more."""
    return [problem for name, given in sorted(called.items()) if (problem := _misfit(root, name, given))]


def missing(root: Path, text: str) -> list[str]:
    """Return what a file imports of transformers and calls with keywords, and `root` does not have or take."""
    gone = []
    for name in imported_names(text).values():
        module, _, symbol = name.partition(":")
        places = [root.joinpath(*module.split(".")) if module else root]
        file = places[0].with_suffix(".py") if module else root / "__init__.py"
        if not module:
            continue  # the lazy top of the package binds names as strings
        found = defining(root, name) is not None or (places[0] / f"{symbol}.py").is_file()
        if not found and not (places[0] / symbol).is_dir() and _binds_all(file, places[0]):
            gone.append(name.replace(":", "."))
    return sorted({*gone, *misfits(root, calls(text))})


def _binds_all(file: Path, folder: Path) -> bool:
    """Return whether what a module binds can be read off its statements: no `*`, no lazy structure."""
    path = file if file.is_file() else folder / "__init__.py"
    if not path.is_file():
        return True
    text = path.read_text(encoding="utf-8")
    return "import *" not in text and "_LazyModule" not in text and "__getattr__" not in text


def _misfit(root: Path, name: str, given: Sequence[str]) -> str | None:
    place = defining(root, name)
    if place is None:
        return None  # the import itself fails, or it is a module
    definition = _definitions(place[0])[place[1]][-1]
    if not isinstance(definition, ast.FunctionDef) or definition.args.kwarg is not None:
        return None
    if definition.decorator_list:
        return None  # what a decorated function takes is not written here
    taken = {argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)}
    missing = sorted(set(given) - taken)
    return f"{name.replace(':', '.')} takes no {', '.join(missing)}" if missing else None


def forget() -> None:
    """Let go of the files that were read."""
    _definitions.cache_clear()


@lru_cache(maxsize=64)
def _definitions(path: Path) -> Mapping[str, list[ast.stmt]]:
    """Return the statements that bind each name at the top of a file; branches of `if` and `try` count as the top."""
    found: dict[str, list[ast.stmt]] = {}
    waiting: list[ast.stmt] = list(ast.parse(path.read_bytes()).body)
    while waiting:
        statement = waiting.pop(0)
        if isinstance(statement, (ast.If, ast.Try)):
            inner = [*statement.body, *statement.orelse]
            handlers = getattr(statement, "handlers", [])
            waiting = [*inner, *(line for handler in handlers for line in handler.body), *waiting]
        for name in _bound(statement):
            found.setdefault(name, []).append(statement)
    return found


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def defining(root: Path, named: str) -> tuple[Path, str] | None:
    """Return the file that defines what is `named`, and its name there, by following imports that only pass it on."""
    dotted, _, name = named.partition(":")
    module = tuple(dotted.split(".")) if dotted else ()
    for _ in range(_HOPS):
        path, package = root.joinpath(*module[:-1], f"{module[-1]}.py") if module else root, module[:-1]
        if not path.is_file():
            path, package = root.joinpath(*module, "__init__.py"), module
        if not path.is_file():
            return None
        statements = _definitions(path).get(name)
        if statements is None:
            return None
        passed_on = statements[-1]
        if not isinstance(passed_on, ast.ImportFrom) or not passed_on.level:
            return path, name
        base = package[: len(package) - passed_on.level + 1]
        module = (*base, *(passed_on.module or "").split(".")) if passed_on.module else base
        name = next(alias.name for alias in passed_on.names if (alias.asname or alias.name) == name)
    return None


def of_names(root: Path, names: Collection[str], used: Collection[str]) -> dict[str, str]:
    """Return the fingerprint of each of `names` that is a function or a class, sorted by name.

    It is: file, name there, digests of the text, of the parameters and of the code, and the methods that count.

    Args:
        root: the package folder of transformers.
        names: module below `root` and name in it, `masking_utils:create_causal_mask`.
        used: names of methods that may be called: of a class the others do not count.
    """
    files, found = Files(root), {}
    for name in sorted(names):
        if (place := defining(root, name)) is not None:
            file = place[0].relative_to(root).as_posix()
            if (text := files.definition(file, place[1])) is not None:
                found[name] = f"{file} {place[1]} {fingerprint(text, used)}"
    return found


def elsewhere(files: Files, name: str) -> str | None:
    """Return the text of a definition that moved to another file of a release that is not installed."""
    forget()  # what was read of another release
    place = defining(files.root, name)
    forget()
    return files.definition(place[0].relative_to(files.root).as_posix(), place[1]) if place is not None else None
