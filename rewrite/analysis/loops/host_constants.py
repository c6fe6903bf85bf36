"""Constants that are copied from the host to the device each time a line runs, which a stream capture refuses."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import attribute, effects_of
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import block_of, bound_names, given_names, parameters

_INTEGER = m.Integer() | m.UnaryOperation(operator=m.Minus(), expression=m.Integer())
_NUMBER = _INTEGER | m.Float() | m.UnaryOperation(operator=m.Minus(), expression=m.Float())
_READ = m.Name() | m.Attribute() | m.Subscript()
_ORDERED = m.ComparisonTarget(operator=m.GreaterThan() | m.LessThan() | m.GreaterThanEqual() | m.LessThanEqual())
_TENSOR = m.Attribute(value=m.Name("torch"), attr=m.Name("Tensor")) | m.Name("Tensor")
_OPTIONAL = m.BinaryOperation(left=_TENSOR, operator=m.BitOr(), right=m.Name("None"))
_TENSOR_METHODS = ("permute", "contiguous", "unsqueeze", "expand", "float")
_LIMIT = m.Attribute(
    value=m.Call(func=m.Attribute(attr=m.Name("finfo") | m.Name("iinfo"))), attr=m.Name("min") | m.Name("max")
)
_LISTED = m.List(elements=[m.Element(value=_INTEGER)])
LARGEST = {
    "torch.float16": 65504.0,
    "torch.half": 65504.0,
    "torch.bfloat16": (2 - 2**-7) * 2.0**127,
    "torch.float32": (2 - 2**-23) * 2.0**127,
    "torch.float": (2 - 2**-23) * 2.0**127,
    "torch.float64": math.inf,
    "torch.double": math.inf,
}
"""The largest number of each dtype of floating point."""
_WHOLE = {f"torch.{name}" for name in ("bool", "int", "int8", "int16", "int32", "int64", "long", "short", "uint8")}
_MOST = 2**63
"""Integers from here on are none that a fill takes, whatever its dtype."""


def constants(method: cst.FunctionDef, module: Module) -> Iterator[cst.Call | cst.Subscript]:
    """Yield `torch.tensor(x, device=…)` of what may be a number, and `x[…, [i], …]`, in source order."""
    names = effects_of(module).names
    for node in walk(method.body):
        if isinstance(node, cst.Call) and names.resolved(node.func) == "torch.tensor" and node.args:
            value = node.args[0].value
            named = {argument.keyword.value for argument in node.args if argument.keyword is not None}
            seen = m.matches(value, _NUMBER) or self_attribute(value) is not None or limit(node, module) is not None
            if "device" in named and seen:
                yield node
        elif isinstance(node, cst.Subscript) and listed(node) is not None and not is_target(node, module):
            yield node


def is_target(node: cst.Subscript, module: Module) -> bool:
    """Whether a subscript is written or deleted, and not read."""
    above = module.parent(node)
    while isinstance(above, (cst.Tuple, cst.List, cst.Element, cst.StarredElement)):
        node, above = above, module.parent(above)  # type: ignore[assignment]
    return isinstance(above, (cst.AssignTarget, cst.Del)) or (
        isinstance(above, (cst.AugAssign, cst.AnnAssign, cst.For, cst.CompFor)) and above.target is node
    )


def is_number(call: cst.Call, owner: ClassInfo, module: Module) -> bool:
    """Whether the value is a literal, a limit of a dtype, or an attribute that is a number.

    That is one that is assigned nothing but numbers and values read from elsewhere, such as a configuration, and whose
    class asks whether it is larger or smaller than a number, which a list cannot be asked.
    """
    value = call.args[0].value
    name = self_attribute(value)
    if name is None:
        return True
    given = attribute(owner, name, effects_of(module).names)
    if given.unknown or not all(m.matches(v, _NUMBER | _READ) for v in given.values):
        return False
    if all(m.matches(v, _NUMBER) for v in given.values):
        return True
    compared = (node for node in walk(owner.node) if m.matches(node, m.Comparison(comparisons=[_ORDERED])))
    sides = ((node.left, node.comparisons[0].comparator) for node in compared if isinstance(node, cst.Comparison))
    both = (pair for one, other in sides for pair in ((one, other), (other, one)))
    return any(one.deep_equals(value) and m.matches(other, _NUMBER) for one, other in both)


def is_tensor(node: cst.Subscript, method: cst.FunctionDef, owner: ClassInfo, module: Module) -> bool:
    """Whether what is indexed is a tensor: declared as one, made by what makes only them, or put into `torch.cat`."""
    scope = effects_of(module).scope(method, owner)
    base = node.value
    if _is_given_to_torch(node, module):
        return True
    if not isinstance(base, cst.Name) or base.value not in scope.locals:
        return scope.is_tensor(base)
    bound = scope.assigned(base.value)
    declared = base.value not in parameters(method) or _declared_tensor(method, base.value)
    if len(bound) != scope.times[base.value] or not (bound or base.value in parameters(method)):
        return False
    return declared and all(_makes_tensor(value) or scope.is_tensor(value) for value in bound)


def _is_given_to_torch(node: cst.CSTNode, module: Module) -> bool:
    """Whether an element of a list is given to `torch.cat` or `torch.stack`, which take nothing but tensors."""
    element = module.parent(node)
    listed_in = module.parent(element)
    call = module.parent(module.parent(listed_in))
    if not isinstance(listed_in, (cst.List, cst.Tuple)) or not isinstance(call, cst.Call):
        return False
    return effects_of(module).names.resolved(call.func) in ("torch.cat", "torch.stack")


def _makes_tensor(value: cst.BaseExpression) -> bool:
    """Whether a value is that of a method `view` or the like, which lists, dictionaries and strings do not have."""
    return m.matches(value, m.Call(func=m.Attribute(attr=m.OneOf(*map(m.Name, _TENSOR_METHODS)))))


def _declared_tensor(method: cst.FunctionDef, name: str) -> bool:
    """Whether a parameter is annotated as a tensor, or as one or None."""
    for param in (*method.params.posonly_params, *method.params.params, *method.params.kwonly_params):
        if param.name.value == name and param.annotation is not None:
            return m.matches(param.annotation.annotation, _TENSOR | _OPTIONAL)
    return False


def listed(node: cst.Subscript) -> tuple[cst.SubscriptElement, int] | None:
    """Return the one element of a subscript that is a list of one number, and that number."""
    found = [e for e in node.slice if isinstance(e.slice, cst.Index) and m.matches(e.slice.value, _LISTED)]
    if (
        len(found) != 1
        or len(node.slice) < 2
        or not all(isinstance(e.slice, cst.Slice) or e is found[0] or _dots(e) for e in node.slice)
    ):
        return None
    number = cst.ensure_type(cst.ensure_type(found[0].slice, cst.Index).value, cst.List).elements[0].value
    if isinstance(number, cst.UnaryOperation):
        return found[0], -int(cst.ensure_type(number.expression, cst.Integer).value)
    return found[0], int(cst.ensure_type(number, cst.Integer).value)


def _dots(element: cst.SubscriptElement) -> bool:
    return isinstance(element.slice, cst.Index) and isinstance(element.slice.value, cst.Ellipsis)


def limit(call: cst.Call, module: Module) -> cst.BaseExpression | None:
    """Return the limit of a dtype that a call's first argument is, by name or not; the name's last value in the
    block counts.
    """
    value = call.args[0].value
    if not isinstance(value, cst.Name):
        return value if m.matches(value, _LIMIT) else None
    statement, last = module.statement(call), None
    for line in block_of(call, module):
        if line is statement:
            break
        if value.value in bound_names(line):
            last = line
    assigned = last.body[0] if isinstance(last, cst.SimpleStatementLine) else None
    given = given_names(assigned).get(value.value) if assigned is not None else None
    return given if given is not None and m.matches(given, _LIMIT) else None


def _is_limit_of_its_dtype(call: cst.Call, module: Module) -> bool:
    """Whether the number is a limit of the dtype that the tensor has."""
    found = limit(call, module)
    if found is None:
        return False
    asked = cst.ensure_type(cst.ensure_type(found, cst.Attribute).value, cst.Call).args
    dtype = dtype_of(call)
    return dtype is not None and bool(asked) and dtype.deep_equals(asked[0].value)


def dtype_of(call: cst.Call) -> cst.BaseExpression | None:
    """Return what a call gives as `dtype`, None where it gives none."""
    return next((a.value for a in call.args if a.keyword is not None and a.keyword.value == "dtype"), None)


def is_held(call: cst.Call, owner: ClassInfo, module: Module) -> bool:
    """Whether the number is none that `torch.tensor` makes infinite in its dtype, which a fill refuses.

    A dtype that the text does not name may be the one that holds least. Of integers both refuse the same.
    """
    if _is_limit_of_its_dtype(call, module):
        return True
    names, dtype = effects_of(module).names, dtype_of(call)
    named = names.resolved(dtype) if dtype is not None else ""
    largest = LARGEST.get(named, math.inf if named in _WHOLE else min(LARGEST.values()))
    numbers = _values(call, owner, module)
    if dtype is None and all(m.matches(number, _INTEGER) for number in numbers):
        return True  # of 64 bits
    return all(m.matches(number, _NUMBER) and _within(number, largest) for number in numbers)


def _values(call: cst.Call, owner: ClassInfo, module: Module) -> list[cst.BaseExpression]:
    """Return what the number may be: what stands there, or what its attribute is assigned."""
    value = call.args[0].value
    name = self_attribute(value)
    return [value] if name is None else list(attribute(owner, name, effects_of(module).names).values)


def _is_iinfo(found: cst.BaseExpression | None) -> bool:
    return found is not None and m.matches(found, m.Attribute(value=m.Call(func=m.Attribute(attr=m.Name("iinfo")))))


def _within(number: cst.BaseExpression, largest: float) -> bool:
    value = ast.literal_eval(cst.Module([]).code_for_node(number))
    return abs(value) <= largest and (isinstance(value, float) or abs(value) < _MOST)


def is_rounded(call: cst.Call, owner: ClassInfo, module: Module) -> bool:
    """Whether a fill of fp64, which takes every number of Python but large integers, is rounded to the same tensor."""
    names, dtype = effects_of(module).names, dtype_of(call)
    keywords = {argument.keyword.value for argument in call.args if argument.keyword is not None}
    if dtype is None or names.resolved(dtype) not in LARGEST or keywords - {"dtype", "device"}:
        return False
    numbers = [value for value in _values(call, owner, module) if m.matches(value, _NUMBER)]
    return not _is_iinfo(limit(call, module)) and all(_within(number, math.inf) for number in numbers)
