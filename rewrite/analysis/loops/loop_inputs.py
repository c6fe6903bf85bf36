"""What a model's own `prepare_inputs_for_generation` adds to transformers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.tree.cache_names import PASSED

_NAME = "prepare_inputs_for_generation"
_SUPER = m.Call(func=m.Attribute(value=m.Call(func=m.Name("super"), args=[]), attr=m.Name(_NAME)))
_CACHE = m.OneOf(*map(m.Name, PASSED))
_ASKS_LENGTH = m.Call(func=m.Attribute(value=_CACHE, attr=m.Name("get_seq_length")), args=[])
_NONE = m.Name("None")
_SWITCH = "original_max_position_embeddings"


def only_recomputes(method: cst.FunctionDef) -> bool:
    """Whether a method forgets the cache at the end of the original context, and else is what it overrides.

    That is `if …original_max_position_embeddings…: past_key_values = None`, then `super()` with every argument under
    its own name, and the return of what that gives.
    """
    body = [s for s in method.body.body if not _is_docstring(s)]
    if len(body) != 3:
        return False
    test, call, end = body
    if not isinstance(test, cst.If):
        return False
    forgets = _only_forgets(test) and bool(m.findall(test, m.Attribute(attr=m.Name(_SWITCH))))
    return forgets and _passes_on(call) and m.matches(end, _returned(call))


def _is_docstring(statement: cst.BaseStatement | cst.BaseSmallStatement) -> bool:
    return m.matches(statement, m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())]))


def _only_forgets(test: cst.If) -> bool:
    """Whether all that a branch does is to set the cache, and items of the rest of the arguments, to None."""
    if test.orelse is not None:
        return False
    forgets = False
    for small in _statements(test.body.body):
        if small is None or not isinstance(small, cst.Assign) or len(small.targets) != 1:
            return False
        target, value = small.targets[0].target, small.value
        if m.matches(target, _CACHE) and m.matches(value, _NONE):
            forgets = True
        elif m.matches(target, m.Subscript(value=m.Name("kwargs"))) and m.matches(value, _NONE):
            continue
        elif not (isinstance(target, cst.Name) and m.matches(value, _ASKS_LENGTH)):
            return False
    return forgets


def _statements(body: Sequence[cst.BaseStatement | cst.BaseSmallStatement]) -> Iterator[cst.BaseSmallStatement | None]:
    """Yield the small statements of a body and of the `if`s in it; None for anything else."""
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        elif isinstance(statement, cst.If) and statement.orelse is None:
            yield from _statements(statement.body.body)
        else:
            yield None


def _passes_on(statement: cst.CSTNode) -> bool:
    """Whether a statement assigns what `super()` makes of the arguments, each under its own name."""
    if not m.matches(statement, m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget()], value=_SUPER)])):
        return False
    call = next(iter(m.findall(statement, _SUPER)))
    return all(_is_own(argument) for argument in cst.ensure_type(call, cst.Call).args)


def _is_own(argument: cst.Arg) -> bool:
    if argument.star == "**":
        return m.matches(argument.value, m.Name("kwargs"))
    keyword = argument.keyword
    return keyword is None or (isinstance(argument.value, cst.Name) and argument.value.value == keyword.value)


def _returned(statement: cst.CSTNode) -> m.SimpleStatementLine:
    """Return what matches the return of what a statement assigns."""
    found = m.findall(statement, m.AssignTarget(target=m.Name()))
    name = cst.ensure_type(cst.ensure_type(found[0], cst.AssignTarget).target, cst.Name).value if found else ""
    return m.SimpleStatementLine(body=[m.Return(value=m.Name(name))])
