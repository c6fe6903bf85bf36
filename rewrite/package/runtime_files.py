"""The runtime of an output package: which of its files a modeling file needs, and the `__init__.py` of each room.

A modeling file says `from .runtime.norms import rms_norm`: in a package a room offers, in its `__init__.py`, what its
files declare that they offer (`rewrite/operators.py`). It has only the files that are needed, and no declarations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from rewrite.engine.imports import isort_key
from rewrite.errors import UnknownOperator
from rewrite.operators import offered, own_text, without_declarations

ALWAYS = (
    "core/backend", "core/explain", "core/rocm", "origin/guard", "package/auto", "package/selftest",
    "package/upload",
)  # fmt: skip
"""What every package has: it is called by the package's `__init__.py` or by its user."""

_INIT = '''\
"""What the modeling file beside this folder calls. Generated with it: edit the modeling file instead."""

{imports}

__all__ = [{exported}]
'''

_EXPORTS = {
    "core": ("rocm",),
    "core.backend": ("get_backend", "set_backend", "use_backend"),
    "core.explain": ("explain",),
    "decode.graph": ("DecodeGraph",),
    "decode.graph_store": ("release_graphs",),
}
"""What users call of the runtime, by file; of a file that a package does not have, nothing."""


def closure(uses: Iterable[str]) -> list[str]:
    """Return the files behind `uses` (as `Found.uses`), those every package has, and all that these import, sorted.

    A file is named as `norms/rms_norm`.
    """
    wanted = {file_of(use) for use in uses} | set(ALWAYS)
    done: set[str] = set()
    while waiting := sorted(wanted - done):
        for file in waiting:
            done.add(file)
            wanted.update(_imported(file))
    return sorted(done)


def files(names: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a package's runtime by their path in it: those of `names`, and an `__init__.py` a folder."""
    rooms = sorted({name.split("/")[0] for name in names})
    return {
        "runtime/__init__.py": init(names).encode("utf-8"),
        **{f"runtime/{room}/__init__.py": room_init(room, names).encode("utf-8") for room in rooms},
        **{f"runtime/{name}.py": runtime_file(name) for name in names},
    }


@cache
def runtime_file(name: str) -> bytes:
    """Return the file `name` of the runtime, `norms/rms_norm`, as it goes into a package.

    Raises:
        FileNotFoundError: if this version has none of that name.
    """
    return without_declarations(own_text(name)).encode("utf-8")


def shipped(path: str) -> bytes:
    """Return this version's own copy of a runtime file by its path in a package, `runtime/norms/rms_norm.py`.

    Raises:
        FileNotFoundError: if this version has none of that name.
    """
    return runtime_file(path.removeprefix("runtime/").removesuffix(".py"))


def file_of(use: str) -> str:
    """Return the file, `norms/rms_norm`, of what a modeling file imports as `norms.rms_norm`.

    Raises:
        UnknownOperator: if the runtime offers no such thing: a rule of the user's own asked for it.
    """
    room, _, function = use.partition(".")
    try:
        return f"{room}/{offered(room)[function]}"
    except KeyError as error:
        raise UnknownOperator(use) from error


def init(names: Sequence[str]) -> str:
    """Return the text of the `__init__.py` of the runtime of a package that has the files `names`."""
    modules = {name.replace("/", ".") for name in names} | {name.split("/")[0] for name in names}
    exports = {module: exported for module, exported in _EXPORTS.items() if module in modules}
    imports = [f"from .{module} import {', '.join(exported)}" for module, exported in exports.items()]
    exported = sorted((name for names in exports.values() for name in names), key=isort_key)
    return _INIT.format(imports="\n".join(imports), exported=", ".join(f'"{name}"' for name in exported))


def room_init(room: str, names: Sequence[str]) -> str:
    """Return the text of the `__init__.py` of a room of a package that has the files `names`."""
    text = runtime_file(f"{room}/__init__").decode("utf-8")
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    by_file: dict[str, list[str]] = {}
    for function, file in offered(room).items():
        if f"{room}/{file}" in names:
            by_file.setdefault(file, []).append(function)
    if not by_file:
        return f'"""{docstring}"""\n'
    imports = [f"from .{file} import {', '.join(functions)}" for file, functions in by_file.items()]
    exported = sorted((name for functions in by_file.values() for name in functions), key=isort_key)
    listed = ", ".join(f'"{name}"' for name in exported)
    return "\n".join([f'"""{docstring}"""', "", *imports, "", f"__all__ = [{listed}]", ""])


def _imported(name: str) -> frozenset[str]:
    """Return the runtime files that a file imports; one imported under `except ImportError` is optional."""
    room = name.split("/")[0]
    return frozenset(_relative(ast.parse(runtime_file(name)), room))


def _relative(tree: ast.AST, room: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try) and any(_catches_missing(handler) for handler in node.handlers):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            inner = [room] if node.level == 1 else []
            path = [*inner, *(node.module.split(".") if node.module else [])]
            yield from ["/".join(path)] if len(path) > 1 else [f"{path[0]}/{alias.name}" for alias in node.names]
        yield from _relative(node, room)


def _catches_missing(handler: ast.ExceptHandler) -> bool:
    caught = ast.walk(handler.type) if handler.type is not None else ()
    return any(isinstance(node, ast.Name) and node.id in ("ImportError", "ModuleNotFoundError") for node in caught)
