"""What a file of a package imports of the runtime and does not find there: edits made for another version, mostly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rewrite import operators
from rewrite.delivery.precheck import bound
from rewrite.offers import DISTRIBUTION, OFFERS, VENDORED
from rewrite.package import vendored_files

OLD = "runtime"
"""Folder of the runtime in packages of until 2026-11-28."""


@dataclass(frozen=True)
class Lacking:
    """An import that finds nothing."""

    line: int
    said: str
    """`imports hf_rewrite_runtime.norms.rms_norm, …`: goes on from the file's name."""


def lacking(text: str) -> list[Lacking]:
    """Return the imports of a file at the top of a package that find nothing in the runtime.

    Raises:
        SyntaxError: if it does not parse.
    """
    return list(_lacking(ast.parse(text.removeprefix("\ufeff"))))


def _lacking(tree: ast.Module) -> Iterator[Lacking]:
    files = {*vendored_files.names()}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        first, *path = (node.module or "").split(".")
        if node.level == 1 and first == OLD:
            yield Lacking(node.lineno, f"imports .{node.module}, which is gone: {_instead(node)}")
        if first != (VENDORED if node.level else DISTRIBUTION):
            continue
        name = "/".join(path) or "__init__"
        if name not in files and f"{name}/__init__" not in files:
            yield Lacking(node.lineno, f"imports {node.module}, which the runtime does not have")
            continue
        own = bound(ast.parse(operators.own_text(name))) if name in files else set[str]()
        for alias in node.names:
            inner = "/".join([*path, alias.name])
            if alias.name not in own and alias.name != "*" and inner not in files and f"{inner}/__init__" not in files:
                yield Lacking(node.lineno, f"imports {alias.name} of {node.module}, which does not have it")


def _instead(node: ast.ImportFrom) -> str:
    names = {alias.name for alias in node.names}
    found = sorted({(offer.module, offer.name) for offer in OFFERS if offer.name in names})
    if not found:
        return f"see {DISTRIBUTION}"
    return "; ".join(f"write `from {module} import {name}`" for module, name in found)
