"""Whether layers of a modeling file may keep states of fixed size in a cache, beside keys and values or without them.

Where none may, a package does without what holds such at fixed addresses (`runtime/cache/states.py`): a cache that has
one nevertheless is refused there.
"""

from __future__ import annotations

import ast
import re

_NAMES = re.compile(r"(conv|recurrent|ssm)_states?$|previous_state")
_KINDS = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
"""How transformers' configurations call layers that have some."""


def may_keep_states(tree: ast.Module) -> bool:
    """Return whether a file names states, or a kind of layer that keeps them."""
    return any(map(_is_said, ast.walk(tree)))


def _is_said(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in _KINDS
    name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
    return isinstance(name, str) and _NAMES.search(name) is not None
