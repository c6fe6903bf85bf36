"""Digests of Python source that stay equal where only its looks change.

Comments, docstrings, annotations, formatting, log messages and the texts of errors are left out.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable

LENGTH = 16
"""Hexadecimal digits of a digest: an accident, not an attack, is what it is there to notice."""
_LOOKS = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params", "type_ignores"}
_FIELDS = {
    kind: tuple(field for field in kind._fields if field not in _LOOKS)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
_SAID = ("logger", "warnings", "logging")


def of_nodes(nodes: Iterable[ast.AST]) -> str:
    """Return the digest of syntax trees."""
    pieces: list[str] = []
    for node in nodes:
        _add(node, pieces)
    text = "\0".join([*pieces, ""])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]


def _says_only(statement: ast.AST) -> bool:
    """Return whether a statement is a docstring, an ellipsis, or talks to a log."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    if isinstance(value, ast.Constant):
        return True
    call = value.func if isinstance(value, ast.Call) else None
    return isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id in _SAID


def _add(value: object, pieces: list[str]) -> None:
    """Append what decides what a syntax tree does."""
    if isinstance(value, ast.AST):
        pieces.append(f"({type(value).__name__}")
        for field in _FIELDS[type(value)]:
            inner = getattr(value, field, None)
            if inner is None or inner == []:
                continue
            if field == "body" and isinstance(inner, list):
                inner = [line for line in inner if not _says_only(line)]
            elif isinstance(value, ast.Raise) and isinstance(inner, ast.Call):
                inner = inner.func
            pieces.append(field)
            _add(inner, pieces)
        pieces.append(")")
    elif isinstance(value, list):
        pieces.append("[")
        for item in value:
            _add(item, pieces)
        pieces.append("]")
    else:
        pieces.append(repr(value))
