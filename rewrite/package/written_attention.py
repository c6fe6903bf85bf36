"""Whether a model of a modeling file may attend by code of the file, where nobody asked for `eager` attention.

A step has a kernel for that (`runtime/attention/eager_step.py`). Most files have such code and do not run it: a
function that they hand to transformers, for a model that was loaded with `attn_implementation="eager"`. So a package
does without, unless the file takes a softmax elsewhere, or has models that attend in no other way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_CHOICE = "_supports_sdpa"
"""What a class says of itself whose models attend by torch's kernels if nothing else is asked for."""


def writes_attention(tree: ast.Module) -> bool:
    """Return whether the models of a file may take a softmax of their own by default; a yes is cheap."""
    if not all(_choices(tree)) or not any(_choices(tree)):
        return True
    called = {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    handed_on = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in called)
    asked_for = {id(inner) for function in handed_on for inner in ast.walk(function)}
    return any(_name(node).lower() == "softmax" and id(node) not in asked_for for node in ast.walk(tree))


def _choices(tree: ast.Module) -> Iterator[bool]:
    """Yield what each class of the file says that says it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _CHOICE in map(_name, node.targets):
            yield isinstance(node.value, ast.Constant) and node.value.value is True


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
