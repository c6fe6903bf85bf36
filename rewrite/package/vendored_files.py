"""A package with a runtime of its own: whole files beside it, names unchanged, imports made relative."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterator
from functools import cache

from rewrite import operators
from rewrite.offers import DISTRIBUTION, VENDORED
from rewrite.source.neighbours import is_for_types

_IMPORT = re.compile(rf"^(\s*)from {DISTRIBUTION}(?=\.| )", re.MULTILINE)
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


@cache
def runtime() -> tuple[str, str]:
    """Return version and sha256 of the runtime that this tool is of."""
    texts = {name: operators.own_text(name) for name in names()}
    version = _VERSION.search(texts["__init__"])
    assert version is not None
    lines = (f"{name} {hashlib.sha256(texts[name].encode('utf-8')).hexdigest()}\n" for name in sorted(texts))
    return version[1], hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def names() -> tuple[str, ...]:
    """Return every file of the runtime, `norms/rms_norm`."""
    return ("__init__", *operators.files())


def relative(text: str) -> str:
    """Return the text of a file at the top of a package with the imports of the runtime made relative."""
    return _IMPORT.sub(rf"\1from .{VENDORED}", text)


def absolute(text: str) -> str:
    """Return the text of a file at the top of a package with the imports of the runtime as they were."""
    return re.sub(rf"^(\s*)from \.{VENDORED}(?=\.| )", rf"\1from {DISTRIBUTION}", text, flags=re.MULTILINE)


def files(texts: Collection[str]) -> dict[str, bytes]:
    """Return the files of the runtime that `texts` import, and all that these import, by their path in a package."""
    known = {*names()}
    found: set[str] = set()
    waiting = [name for text in texts for name in _modules(ast.parse(text), "", known)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        waiting += _modules(ast.parse(operators.own_text(name)), name, known)
    found |= {f"{name.split('/')[0]}/__init__" for name in found if "/" in name} | {"__init__"}
    return {f"{VENDORED}/{name}.py": operators.own_text(name).encode("utf-8") for name in sorted(found)}


def _modules(tree: ast.Module, file: str, known: Collection[str]) -> Iterator[str]:
    """Yield the files of the runtime that a file imports: one of it, or for an empty name one of a package."""
    room = file.split("/")[:-1]
    for node in _running(tree):
        path = (node.module or "").split(".") if node.module else []
        if file and node.level:
            path = [*room[: len(room) - node.level + 1], *path]
        elif path[:1] != [VENDORED if node.level else DISTRIBUTION]:
            continue
        else:
            path = path[1:]
        places = ["/".join([*path, alias.name]) for alias in node.names]
        yield from (name for name in ("/".join(path), *places) if name in known)


def _running(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Yield every import of a file that runs at some time: those for types alone do not."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom):
            yield node
        if not is_for_types(node):
            waiting += ast.iter_child_nodes(node)
