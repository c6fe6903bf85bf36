"""Small questions that transforms ask about expressions and statements, and the code they build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from rewrite.module import Module, names_in, self_attribute, walk

LINE_LENGTH = 119
"""transformers' own line length: generated statements wrap where its formatter would wrap them."""


def expression(text: str) -> cst.BaseExpression:
    """Parse an expression."""
    return cst.parse_expression(text)


def statement(text: str, module: Module, indent: int = 8) -> cst.SimpleStatementLine:
    """Parse a one-line statement, wrapped at the last argument list where it would pass `LINE_LENGTH`."""
    if indent + len(text) > LINE_LENGTH and text.endswith(")"):
        start = text.index("(", text.find("= ") + 1)
        pad = " " * indent
        text = f"{text[: start + 1]}\n{pad}    {text[start + 1 : -1]}\n{pad})"
    parsed = cst.parse_statement(text, config=module.tree.config_for_parsing)
    if not isinstance(parsed, cst.SimpleStatementLine):
        raise TypeError(f"not a simple statement: {text}")
    return parsed


def called_attribute(node: cst.CSTNode) -> str | None:
    """Return `x` of the call `self.x(...)`, else None."""
    return self_attribute(node.func) if isinstance(node, cst.Call) else None


def calls_in(node: cst.CSTNode) -> Iterator[cst.Call]:
    """Yield every call below `node`, in source order."""
    return (inner for inner in walk(node) if isinstance(inner, cst.Call))


def single_argument(call: cst.Call) -> cst.BaseExpression | None:
    """Return the argument of a call with exactly one plain positional argument, else None."""
    if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
        return None
    return call.args[0].value


def fresh_name(wanted: str, taken: set[str]) -> str:
    """Return `wanted`, or the first of `wanted_1`, `wanted_2`, … that is not in `taken`; adds it to `taken`."""
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name


def parameters(function: cst.FunctionDef) -> list[str]:
    """Return the names of all parameters, `self` included."""
    params = function.params
    named = [*params.posonly_params, *params.params, *params.kwonly_params]
    starred = [p for p in (params.star_arg, params.star_kwarg) if isinstance(p, cst.Param)]
    return [param.name.value for param in (*named, *starred)]


def bound_names(node: cst.CSTNode) -> set[str]:
    """Return the local names that `node` may bind or write through: targets, `x[...] =`, `x += `, `x.op_(...)`."""
    bound: set[str] = set()
    for inner in walk(node):
        if isinstance(inner, cst.AssignTarget):
            bound |= _target_names(inner.target)
        elif isinstance(inner, (cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr, cst.CompFor)):
            bound |= _target_names(inner.target)
        elif isinstance(inner, cst.Del):
            bound |= names_in([inner])
        elif isinstance(inner, cst.AsName):
            bound |= names_in([inner.name])
        elif isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute):
            if inner.func.attr.value.endswith("_") and not inner.func.attr.value.endswith("__"):
                bound |= names_in([inner.func.value])
    return bound


def block_of(node: cst.CSTNode, module: Module) -> Sequence[cst.CSTNode]:
    """Return the statements of the block that `node`'s statement stands in."""
    parent = module.parent(module.statement(node))
    body = getattr(parent, "body", ())
    return body if isinstance(body, Sequence) else ()


def _target_names(target: cst.CSTNode) -> set[str]:
    if isinstance(target, cst.Name):
        return {target.value}
    if isinstance(target, (cst.Tuple, cst.List)):
        return {name for element in target.elements for name in _target_names(element.value)}
    if isinstance(target, cst.StarredElement):
        return _target_names(target.value)
    if isinstance(target, (cst.Subscript, cst.Attribute)):
        return _target_names(target.value)
    return set()
