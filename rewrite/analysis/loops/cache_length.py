"""Places that use the number of cached tokens as a host integer, and their forms for a number that is on the device.

Against a cache of fixed size the number is a 0-dimensional tensor: the host may add to it, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from rewrite.analysis.syntax.module import Module, walk
from rewrite.analysis.syntax.nodes import parameters, single_assignments

_PARAMETER = re.compile(r"past_\w*(length|tokens|len)$")


@dataclass(frozen=True)
class Lengths:
    """The local names of a function that hold a number of cached tokens, and whose tokens they are."""

    caches: dict[str, str | None]
    """Code of the cache by name; None for a parameter."""
    values: dict[str, cst.BaseExpression]
    """What each local that is assigned once holds."""

    def more_than(self, end: cst.BaseExpression, start: str, module: Module) -> str | None:
        """Return the code of `n` if `end` is `start + n` or `n + start`, by name or not."""
        if isinstance(end, cst.Name):
            end = self.values.get(end.value, end)
        if not isinstance(end, cst.BinaryOperation) or not isinstance(end.operator, cst.Add):
            return None
        for one, other in ((end.left, end.right), (end.right, end.left)):
            if isinstance(one, cst.Name) and one.value == start and not _names(other) & set(self.caches):
                return module.code(other)
        return None


def lengths(function: cst.FunctionDef, module: Module) -> Lengths:
    """Return the names in `function` that hold what `get_seq_length()` returned, here or in the caller."""
    values = single_assignments(function)
    caches: dict[str, str | None] = {name: None for name in parameters(function) if _PARAMETER.match(name)}
    for name, value in values.items():
        call = next((node for node in walk(value) if _asks_length(node)), None)
        if call is not None and isinstance(value, (cst.Call, cst.IfExp)):
            caches[name] = module.code(call.func.value)  # type: ignore[attr-defined]
    return Lengths(caches, values)


def uses(function: cst.FunctionDef, known: Lengths, module: Module) -> Iterator[cst.CSTNode]:
    """Yield ranges, slices, sizes and tests that take the number of cached tokens to the host, in source order."""
    for node in walk(function.body):
        is_call = isinstance(node, cst.Call) and (
            _starts_range(node, known, module) or sized_argument(node, known, module) is not None
        )
        is_slice = isinstance(node, cst.Subscript) and sliced(node, known) is not None
        if is_call or is_slice or (isinstance(node, cst.If) and tests(node, known) is not None):
            yield node


def _starts_range(call: cst.Call, known: Lengths, module: Module) -> bool:
    if module.qualified(call.func) != "torch.arange" or len(call.args) < 2 or call.args[1].keyword is not None:
        return False
    start = call.args[0].value
    return isinstance(start, cst.Name) and start.value in known.caches


def sized_argument(call: cst.Call, known: Lengths, module: Module) -> tuple[cst.BaseExpression, str, str] | None:
    """Return (argument, length, n) of `torch.ones(…, length + n)`, whose size is a number of keys."""
    if module.qualified(call.func) not in ("torch.ones", "torch.zeros"):
        return None
    sizes: list[cst.BaseExpression] = [argument.value for argument in call.args if argument.keyword is None]
    if len(sizes) == 1 and isinstance(sizes[0], (cst.Tuple, cst.List)):
        sizes = [element.value for element in sizes[0].elements]
    for size in sizes:
        for name in known.caches:
            if (more := known.more_than(size, name, module)) is not None:
                return size, name, more
    return None


def sliced(node: cst.Subscript, known: Lengths) -> tuple[int, str, cst.Slice] | None:
    """Return (dimension, length, slice) of `x[:, length:…]`."""
    for dimension, element in enumerate(node.slice):
        part = element.slice
        if isinstance(part, cst.Slice) and isinstance(part.lower, cst.Name) and part.lower.value in known.caches:
            return dimension, part.lower.value, part
    return None


def tests(node: cst.If, known: Lengths) -> str | None:
    """Return the length, or the sum with one, that an `if` compares with something."""
    for comparison in (inner for inner in walk(node.test) if isinstance(inner, cst.Comparison)):
        left = comparison.left
        if not isinstance(left, cst.Name) or _is_none(comparison):
            continue
        value = known.values.get(left.value)
        summed = isinstance(value, cst.BinaryOperation) and bool(_names(value) & set(known.caches))
        if left.value in known.caches or summed:
            return left.value
    return None


def _is_none(comparison: cst.Comparison) -> bool:
    return any(isinstance(target.operator, (cst.Is, cst.IsNot)) for target in comparison.comparisons)


def _asks_length(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "get_seq_length"
    )


def _names(node: cst.CSTNode) -> set[str]:
    return {inner.value for inner in walk(node) if isinstance(inner, cst.Name)}
