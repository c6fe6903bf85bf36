"""The statements of a Python file, without a look into their expressions: most of a tree is those."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")


def blocks(node: ast.AST) -> list[ast.AST]:
    """Return the statements directly below a statement, and its `except` and `case` parts, in source order."""
    if isinstance(node, (ast.Lambda, ast.IfExp)):
        return []
    return [inner for name in _BLOCKS for inner in getattr(node, name, ())]


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement at and below `tree`, in source order."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt):
            yield node
        waiting.extend(reversed(blocks(node)))
