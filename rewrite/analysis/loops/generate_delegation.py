"""To whom a `generate` of a class's own leaves the loop: the inherited one, or that of a model which it holds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

_STATES = "output_hidden_states"


def hands_up(method: ast.FunctionDef) -> bool:
    """Whether a method calls the one of its name that it overrides."""
    return _calls_above(method, method.name)


def always_hands_up(method: ast.FunctionDef) -> bool:
    """Whether no way through a method returns before it has called the one that it overrides."""
    passed, left = _through(method.body, method.name)
    return passed and not left


def generating_parts(method: ast.FunctionDef) -> Iterator[str]:
    """Yield `x` of every call `self.x.generate(…)`, in source order, each once."""
    seen = set()
    for call in _calls(method):
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr != "generate":
            continue
        of = function.value
        if isinstance(of, ast.Attribute) and ast.unparse(of.value) == "self" and of.attr not in seen:
            seen.add(of.attr)
            yield of.attr


def asks_states(method: ast.FunctionDef) -> bool:
    """Whether a method wants hidden states in every call: it says so by keyword, or puts it among its keywords."""
    for statement in method.body:  # not in a branch
        if isinstance(statement, ast.Assign) and _is_true(statement.value):
            if any(isinstance(target, ast.Subscript) and _is_states(target.slice) for target in statement.targets):
                return True
    above = (call for call in _calls(method) if _is_above(call, method.name))
    return any(keyword.arg == _STATES and _is_true(keyword.value) for call in above for keyword in call.keywords)


def _through(body: Sequence[ast.stmt], name: str) -> tuple[bool, bool]:
    """Return whether every way through statements calls `super().<name>`, and whether one returns without."""
    for statement in body:
        if isinstance(statement, ast.If):
            if _calls_above(statement.test, name):
                return True, False
            ways = [_through(statement.body, name), _through(statement.orelse, name)]
            if any(left for _, left in ways):
                return False, True
            if all(passed for passed, _ in ways):
                return True, False
        elif isinstance(statement, (ast.With, ast.Try)):
            passed, left = _through(statement.body, name)
            if passed or left:
                return passed, left
        elif isinstance(statement, (ast.For, ast.While)):
            if any(isinstance(inner, ast.Return) and not _calls_above(inner, name) for inner in ast.walk(statement)):
                return False, True
        elif _calls_above(statement, name) or isinstance(statement, ast.Raise):
            return True, False
        elif isinstance(statement, ast.Return):
            return False, True
    return False, False


def _calls_above(node: ast.AST, name: str) -> bool:
    return any(_is_above(call, name) for call in _calls(node))


def _is_above(call: ast.Call, name: str) -> bool:
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr != name or not isinstance(function.value, ast.Call):
        return False
    return ast.unparse(function.value.func) == "super"


def _calls(node: ast.AST) -> Iterable[ast.Call]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_states(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == _STATES
