"""Places that use the number of cached tokens as a host integer, and their forms for a number that is on the device.

Against a cache of fixed size the number is a 0-dimensional tensor: the host may add to it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import effects_of
from rewrite.analysis.loops.host_constants import is_target
from rewrite.analysis.loops.length_flow import handed_on
from rewrite.analysis.tree.module import Module, of_kind, walk
from rewrite.analysis.tree.nodes import given_names, parameters, single_assignments

_IS_TENSOR = m.Call(
    func=m.Name("isinstance"),
    args=[m.Arg(value=m.Name()), m.Arg(value=m.Attribute(value=m.Name("torch"), attr=m.Name("Tensor")))],
)
_ELEMENT = m.Subscript(value=m.Name(), slice=[m.SubscriptElement(m.Index(m.Integer()))])


@dataclass(frozen=True)
class Lengths:
    """The local names of a function that hold a number of cached tokens, and whose tokens they are."""

    caches: dict[str, str | None]
    """Code of the cache by name; None for a parameter."""
    values: dict[str, cst.BaseExpression]
    """What each local that is assigned once holds."""

    def is_length(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is a number of cached tokens, by name or asked for on the spot."""
        return (isinstance(node, cst.Name) and node.value in self.caches) or _asks_length(node)

    def cache(self, node: cst.BaseExpression, module: Module) -> str | None:
        """Return the code of the cache whose length an expression is, None where it is not at hand."""
        if isinstance(node, cst.Name):
            return self.caches[node.value]
        return next((module.code(call.func.value) for call in walk(node) if _asks_length(call)), None)  # type: ignore[attr-defined]

    def depends(self, node: cst.CSTNode, inside: frozenset[str] = frozenset()) -> bool:
        """Whether code reads a number of cached tokens, or a local that holds a sum with one.

        What a local holds may name the local itself (`n = n + 1`): `inside` are those that are being asked about.
        """
        for inner in walk(node):
            if isinstance(inner, cst.Name):
                value = self.values.get(inner.value) if inner.value not in inside else None
                summed = isinstance(value, cst.BinaryOperation) and self.depends(value, inside | {inner.value})
                if inner.value in self.caches or summed:
                    return True
            elif _asks_length(inner):
                return True
        return False

    def more_than(self, end: cst.BaseExpression, start: cst.BaseExpression, module: Module) -> str | None:
        """Return the code of `n` if `end` is the sum of `start` and n, in any order, by name or not."""
        if isinstance(end, cst.Name):
            end = self.values.get(end.value, end)
        parts = list(_addends(end))
        place = next((place for place, part in enumerate(parts) if part.deep_equals(start)), None)
        if place is None or len(parts) < 2:
            return None
        rest = [*parts[:place], *parts[place + 1 :]]
        return None if any(map(self.depends, rest)) else " + ".join(map(module.code, rest))


def lengths(function: cst.FunctionDef, module: Module) -> Lengths:
    """Return the names in `function` that hold what `get_seq_length()` returned, here or in a caller of the file."""
    handed = module.remembered.get("cached_lengths")
    if not isinstance(handed, dict):
        handed = handed_on(module, lambda function, given: _held(function, given, module).is_length)
        module.remembered["cached_lengths"] = handed
    return _held(function, handed[id(function)], module)


def _held(function: cst.FunctionDef, given: Iterable[str], module: Module) -> Lengths:
    """Return the names that hold a number of cached tokens where these parameters do."""
    values = single_assignments(function)
    caches: dict[str, str | None] = {name: None for name in parameters(function) if name in given}
    for name, value in values.items():
        call = next((node for node in walk(value) if _asks_length(node)), None)
        if call is not None and isinstance(value, (cst.Call, cst.IfExp)):
            caches[name] = module.code(call.func.value)  # type: ignore[attr-defined]
    caches |= dict.fromkeys(name for name in _assigned_in_branches(function) if name not in caches)
    return Lengths(caches, values)


def _assigned_in_branches(function: cst.FunctionDef) -> Iterator[str]:
    """Yield the locals that are given a number in one place and what `get_seq_length()` returned in another.

    An element of a tensor is a number too: what stands for a length on the device takes any.
    """
    given: dict[str, list[cst.BaseExpression]] = {}
    for line in of_kind(function.body, cst.Assign):
        for name, value in given_names(line).items():
            given.setdefault(name, []).append(value)
    for name, values in given.items():
        asking = [value for value in values if any(_asks_length(node) for node in walk(value))]
        asking = [value for value in asking if isinstance(value, (cst.Call, cst.IfExp))]
        numbers = [value for value in values if isinstance(value, cst.Integer) or m.matches(value, _ELEMENT)]
        if asking and len(values) == len(asking) + len(numbers) > 1:
            yield name


def uses(function: cst.FunctionDef, known: Lengths, module: Module) -> Iterator[cst.CSTNode]:
    """Yield ranges, slices, sizes and tests that take the number of cached tokens to the host, in source order."""
    for node in of_kind(function.body, cst.Call, cst.Subscript, cst.If, cst.IfExp, cst.While):
        is_call = isinstance(node, cst.Call) and (
            ranged(node, known, module) is not None or sized_argument(node, known, module) is not None
        )
        is_slice = (
            isinstance(node, cst.Subscript)
            and sliced(node, known) is not None
            and not is_target(node, module)
            and not is_off_device(node, module)
        )
        is_test = isinstance(node, (cst.If, cst.IfExp, cst.While)) and tests(node, known)
        if is_call or is_slice or is_test:
            yield node


def ranged(
    call: cst.Call, known: Lengths, module: Module
) -> tuple[cst.BaseExpression, cst.BaseExpression, list[cst.Arg]] | None:
    """Return start, end and the other arguments of `torch.arange(length, …)`, given by place or keyword."""
    if effects_of(module).names.resolved(call.func) != "torch.arange":
        return None
    named = {argument.keyword.value: argument.value for argument in call.args if argument.keyword is not None}
    plain = [argument.value for argument in call.args if argument.keyword is None]
    start = plain[0] if plain else named.get("start")
    end = plain[1] if len(plain) > 1 else named.get("end")
    if start is None or end is None or not known.is_length(start):
        return None
    rest = [argument for argument in call.args if argument.value is not start and argument.value is not end]
    return start, end, rest


def sized_argument(
    call: cst.Call, known: Lengths, module: Module
) -> tuple[cst.BaseExpression, cst.BaseExpression, str] | None:
    """Return (argument, length, n) of `torch.ones(…, length + n)`, whose size is a number of keys."""
    if effects_of(module).names.resolved(call.func) not in ("torch.ones", "torch.zeros", "torch.full", "torch.empty"):
        return None
    sizes: list[cst.BaseExpression] = [argument.value for argument in call.args if _is_size(argument)]
    if len(sizes) == 1 and isinstance(sizes[0], (cst.Tuple, cst.List)):
        sizes = [element.value for element in sizes[0].elements]
    for size in sizes:
        whole = known.values.get(size.value, size) if isinstance(size, cst.Name) else size
        for part in _addends(whole):
            if known.is_length(part) and (more := known.more_than(size, part, module)) is not None:
                return size, part, more
    return None


def _is_size(argument: cst.Arg) -> bool:
    return argument.keyword is None or argument.keyword.value == "size"


def sliced(node: cst.Subscript, known: Lengths) -> tuple[int, cst.BaseExpression, cst.Slice] | None:
    """Return (dimension, length, slice) of `x[:, length:…]`."""
    for dimension, element in enumerate(node.slice):
        part = element.slice
        if isinstance(part, cst.Slice) and part.lower is not None and known.is_length(part.lower):
            return dimension, part.lower, part
    return None


def is_off_device(node: cst.Subscript, module: Module) -> bool:
    """Whether a slice stands where the number of cached tokens is known to be no tensor."""
    above = module.parent(node)
    return isinstance(above, cst.IfExp) and above.orelse is node and m.matches(above.test, _IS_TENSOR)


def tests(node: cst.If | cst.IfExp | cst.While, known: Lengths) -> bool:
    """Whether a test asks how many tokens are cached, and not only whether there is a cache."""
    return any(known.depends(part) for part in _asked(node.test))


def _asked(test: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the parts of a test that are no comparison with None."""
    if isinstance(test, cst.BooleanOperation):
        yield from _asked(test.left)
        yield from _asked(test.right)
    elif isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        yield from _asked(test.expression)
    elif not (isinstance(test, cst.Comparison) and _is_none(test)) and not m.matches(test, _IS_TENSOR):
        yield test


def _is_none(comparison: cst.Comparison) -> bool:
    return any(isinstance(target.operator, (cst.Is, cst.IsNot)) for target in comparison.comparisons)


def _asks_length(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "get_seq_length"
    )


def _addends(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        yield from _addends(node.left)
        yield from _addends(node.right)
    else:
        yield node
