"""Whether what a modeling file's models capture may call functions of torch that are no kernel of ours.

A model that is only called does. One that generates is asked for its steps: where every layer has its method for a
token, and no mask is made for it, next to nothing is left, and a package does without what makes kernels of the rest
(`runtime/products/chain.py`) and what keeps what they compute of parameters alone (`runtime/decode/constants.py`). It
is as right without; a no only has to be likely.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_MASK = re.compile(r"create_\w*mask\w*")
_TESTS = frozenset({"decodes", "needs_no_mask"})
_LEARNED = re.compile(r"xielu|prelu", re.IGNORECASE)
_OTHER_ROOMS = re.compile(r"\.runtime\.(moe|mixers)$")
"""Of blocks that bring more than products: routers, states."""


def may_call_functions(tree: ast.Module) -> bool:
    """Return whether a step, or a forward of a file without steps, may call more than kernels of ours."""
    imported = {f"{'.' * node.level}{node.module}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if ".runtime.decode" not in imported:
        return ".runtime.forward" in imported
    if any(map(_OTHER_ROOMS.search, imported)) or "attend_step" in _imported_names(tree):
        return True
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _TESTS & {*_called(node.test)}]
    if not guards or not all(isinstance(guard.test, ast.Call) for guard in guards):  # or a layer asks for more
        return True
    chosen = {
        id(node.orelse) for node in ast.walk(tree) if isinstance(node, ast.IfExp) and _TESTS & {*_called(node.test)}
    }
    masks = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _MASK.fullmatch(_name(node.func)))
    return any(id(mask) not in chosen for mask in masks)


def may_compute_of_parameters(tree: ast.Module) -> bool:
    """Return whether a step may compute something of parameters alone: an activation with some of its own does."""
    said = (getattr(node, "value", None) or getattr(node, "attr", None) for node in ast.walk(tree))
    return may_call_functions(tree) or any(isinstance(one, str) and _LEARNED.search(one) for one in said)


def _imported_names(tree: ast.Module) -> set[str]:
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


def _called(test: ast.AST) -> Iterator[str]:
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            yield _name(node.func)


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
