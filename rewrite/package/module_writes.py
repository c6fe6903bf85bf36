"""Whether code of a modeling file may leave something on a module: a state, a count, a tensor written in place.

Where none may, a decode step changes nothing of its model, and a package does without what looks for that
(`runtime/decode/changes.py`). So a yes is cheap and a no has to be certain.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

_MUTATES = re.compile(
    r"append|extend|insert|pop|popitem|popleft|appendleft|clear|update|setdefault|add|remove|discard|sort|reverse|"
    r"set_\w+|__setattr__|__setitem__|__dict__|add_module|register_\w+|[a-z]\w*[a-z0-9]_"
)
"""Methods that write to what they are called of, by the names that Python and torch give such."""
_BUILTINS = frozenset({"setattr", "delattr", "vars", "globals", "exec", "eval"})
_CACHES = frozenset({"cache", "past_key_values", "past_key_value", "cache_params"})
"""What models call the cache that they are given, which is none of theirs."""
_BUILDS = frozenset({"__init__", "_init_weights"})
"""What runs where a model is made."""


_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "transformers", "numpy"})
"""Packages whose functions leave modules alone, and whose modules keep nothing in evaluation."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def may_change_modules(tree: ast.Module) -> bool:
    """Return whether code of a file, but for what builds a model, may write to what it did not make."""
    functions = (node for node in ast.walk(tree) if isinstance(node, _Function))
    return any(not _is_known(node) for node in ast.walk(tree)) or any(
        _writes(function) for function in functions if getattr(function, "name", "") not in _BUILDS
    )


def _is_known(node: ast.AST) -> bool:
    """Return whether a node imports from nowhere but packages that are known, and this package's own files."""
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in _KNOWN for alias in node.names)
    if isinstance(node, ast.ImportFrom) and not node.level:
        return (node.module or "").split(".")[0] in _KNOWN
    return True


def _writes(function: _Function) -> bool:
    own = {*_made(function)} | _CACHES
    return any(_may_write(node, own) for node in ast.walk(function))


def _may_write(node: ast.AST, own: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return not isinstance(node.ctx, ast.Load) or node.attr in ("__dict__", "data")
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and not _is_one_of(node.value, own)
    if isinstance(node, ast.AugAssign):
        return not _is_one_of(node.target, own)
    if isinstance(node, ast.Call):
        return _calls_a_writer(node, own) or any(keyword.arg in ("out", "inplace") for keyword in node.keywords)
    return isinstance(node, (ast.Global, ast.Nonlocal))


def _calls_a_writer(call: ast.Call, own: set[str]) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in _BUILTINS
    if not isinstance(call.func, ast.Attribute):
        return True
    return bool(_MUTATES.fullmatch(call.func.attr)) and not _is_one_of(call.func.value, own)


def _is_one_of(node: ast.expr, own: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in own


def _made(function: _Function) -> Iterator[str]:
    """Yield the locals that are containers made in the function, and nothing else anywhere in it."""
    made: set[str] = set()
    others: set[str] = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    known = set[ast.AST]()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
                made.add(node.targets[0].id)
                known.add(node.targets[0])
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in known:
            others.add(node.id)
    yield from made - others
