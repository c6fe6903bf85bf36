"""Methods that say again what `forward` of their class says, for a step: edits of the one and not of the other.

Found by reading. Whether they compute the same nevertheless is for a verification to say (`itself: decode step`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FIRST = "forward"
SECOND = ("decode", "decode_residual", "rule", "form")
"""What stands beside it in a generated class: its form for a step, or what kernels are told of it."""


@dataclass(frozen=True)
class EditedAlone:
    """Methods of a class by name, with their lines, of which one was edited and the other not."""

    edited: str
    line: int
    other: str
    other_line: int

    def __str__(self) -> str:
        return f"{self.edited} was edited, and {self.other} (line {self.other_line}), its other form, was not"


def edited_alone(generated: str, text: str) -> list[EditedAlone]:
    """Return the edits of a file that are in one of two methods alone.

    Raises:
        SyntaxError: if a text does not parse.
    """
    before, now = (_methods(ast.parse(one.removeprefix("\ufeff"))) for one in (generated, text))
    return list(_edited_alone(before, now))


def _edited_alone(before: Mapping[str, ast.FunctionDef], now: Mapping[str, ast.FunctionDef]) -> Iterator[EditedAlone]:
    for name in before:
        kind, _, method = name.rpartition(".")
        first = f"{kind}.{FIRST}"
        if method not in SECOND or not all(one in found for one in (first, name) for found in (before, now)):
            continue
        changed = [one for one in (first, name) if _said(before[one]) != _said(now[one])]
        if len(changed) == 1:
            other = name if changed[0] == first else first
            yield EditedAlone(changed[0], now[changed[0]].lineno, other, now[other].lineno)


def _methods(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {f"{c.name}.{node.name}": node for c in classes for node in c.body if isinstance(node, ast.FunctionDef)}


def _said(method: ast.FunctionDef) -> list[str]:
    """What a method does: its arguments and statements, not how they are laid out, annotated or explained."""
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    names = [arg.arg for arg in ast.walk(method.args) if isinstance(arg, ast.arg)]
    return [*names, *(ast.dump(node) for node in (*method.args.defaults, *body))]
