"""Which functions look like a rotation by positions: by what they multiply, whatever its names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst

from rewrite.analysis.tree.module import ClassInfo, Module, parts, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, parameters

_PRODUCTS = ("mul", "multiply")
_SUMS = ("add", "sub", "subtract", "addcmul")
_REARRANGING = frozenset({"cat", "concat", "concatenate", "stack", "roll", "flip", "neg", "view_as_complex"})
_OF_OTHERS = frozenset(
    {"exp", "log", "softmax", "sigmoid", "topk", "argsort", "cumsum", "rand", "grid_sample", "cdist", "generate"}
)
"""What no rotation calls: scans, samplers, losses, and functions that make the tables."""
_SIZES = ("shape", "size", "dim", "ndim", "dtype", "device")
_From = frozenset[str]


def looks_turning(function: cst.FunctionDef, module: Module, owner: ClassInfo | None = None) -> bool:
    """Whether a function multiplies one tensor with two tables, adds, and puts parts of a tensor in other places.

    The tables may be parts of one argument. Also one that multiplies complex numbers, and one that takes a `cos` and a
    `sin` and multiplies at all. One that calls modules is not: what it calls may be.
    """
    if owner is not None and _calls_modules(function, module, owner):
        return False
    returned = [node.value for node in walk(function.body) if isinstance(node, cst.Return)]
    if not any(returned) or any(_is_turned(value) for value in returned):
        return False
    numbers = _numbers(function)
    params = [name for name in parameters(function) if name != "self" and name not in numbers]
    called = set(_called(function, module, owner))
    may_multiply = multiplies(function) or bool(called & {*module.functions})
    if len(params) >= 3 and may_multiply and all(any(p in name for name in params) for p in ("cos", "sin")):
        return True
    products = list(_by_parameters(function, params))
    if called & {*_REARRANGING, "empty_like"} and _adds(function.body) and any(_by_waves(p, products) for p in params):
        return True
    if "view_as_complex" in called:
        return len(params) >= 2 and any(one and other for one, other in products)
    if len(params) < 2 or not called & _REARRANGING or called & _OF_OTHERS or not _adds(function.body):
        return False
    return any(_has_two_tables(tensor, products) for tensor in params)


def multiplies(function: cst.FunctionDef) -> bool:
    """Whether a function multiplies itself, and does not leave that to others."""
    return any(True for _ in _products(function.body))


def _is_turned(value: cst.BaseExpression | None) -> bool:
    """Whether what is returned is a call of the runtime's rotation, or two."""
    each = [element.value for element in value.elements] if isinstance(value, cst.Tuple) else [value]
    return all(isinstance(one, cst.Call) and _name(one) in ("rotary", "rotary_single") for one in each)


def _calls_modules(function: cst.FunctionDef, module: Module, owner: ClassInfo) -> bool:
    """Whether a method calls what its class holds, and does not define."""
    names = {name for call in calls_in(function.body) if (name := self_attribute(call.func)) is not None}
    return any(module.method(owner, name) is None for name in names)


def _numbers(function: cst.FunctionDef) -> set[str]:
    """Return the parameters that are numbers where nothing is given for them."""
    given = (*function.params.posonly_params, *function.params.params, *function.params.kwonly_params)
    return {param.name.value for param in given if isinstance(param.default, (cst.Integer, cst.Float))}


def _has_two_tables(tensor: str, products: list[tuple[_From, _From]]) -> bool:
    """Whether something made from a parameter is multiplied with two tables, made from others."""
    both = [(a, b) for one, other in products for a, b in ((one, other), (other, one))]
    tables = {b for a, b in both if tensor in map(_whole, a) and tensor not in map(_whole, b)} - {frozenset()}
    return any(one - other and other - one for one in tables for other in tables)


def _by_waves(tensor: str, products: list[tuple[_From, _From]]) -> bool:
    """Whether something made from a parameter is multiplied with two parts of one thing: cosine and sine are parts."""
    both = [(a, b) for one, other in products for a, b in ((one, other), (other, one)) if tensor in map(_whole, a)]
    tables = [b for _, b in both if tensor not in map(_whole, b) and any("[" in name for name in b)]
    pairs = ((one, other) for one in tables for other in tables if one.isdisjoint(other))
    return any(set(map(_whole, one)) & set(map(_whole, other)) for one, other in pairs)


def _whole(name: str) -> str:
    """Return the parameter that something is a part of."""
    return name.partition("[")[0]


def _by_parameters(function: cst.FunctionDef, params: list[str]) -> Iterator[tuple[_From, _From]]:
    """Yield, for each product, the parameters that its sides are made from."""
    made: dict[str, _From] = {name: frozenset({name}) for name in params}
    for line in walk(function.body):
        if isinstance(line, cst.BaseSmallStatement):
            for one, other in _products(line):
                yield _origin(one, made), _origin(other, made)
            if isinstance(line, cst.Assign):
                _assign(line, made)


def _assign(line: cst.Assign, made: dict[str, _From]) -> None:
    for target in line.targets:
        held, value = target.target, line.value
        if isinstance(held, cst.Tuple) and isinstance(value, cst.Tuple) and len(held.elements) == len(value.elements):
            origins = [_origin(element.value, made) for element in value.elements]
            pairs = zip((element.value for element in held.elements), origins, strict=True)
        else:
            names = [element.value for element in held.elements] if isinstance(held, cst.Tuple) else [held]
            whole = _origin(value, made)
            in_parts = isinstance(held, cst.Tuple) and isinstance(value, cst.Name)
            origins = [_part(whole, str(place)) if in_parts else whole for place in range(len(names))]
            pairs = zip(names, origins, strict=True)
        made.update({name.value: origin for name, origin in pairs if isinstance(name, cst.Name)})


def _part(whole: _From, place: str) -> _From:
    """Return what a part of something is made from: another thing than its other parts."""
    return frozenset(f"{name}[{place}]" for name in whole)


def _origin(node: cst.CSTNode, made: Mapping[str, _From]) -> _From:
    """Return the parameters that an expression is made from, and the parts of them that are one item of the last
    dimension; whose sizes are asked is none.
    """
    if isinstance(node, cst.Name):
        return made.get(node.value, frozenset())
    if isinstance(node, cst.Attribute):
        if (own := self_attribute(node)) is not None:
            return frozenset({f"self.{own}"})
        if node.attr.value in ("real", "imag"):
            return _part(_origin(node.value, made), node.attr.value)
        return frozenset() if node.attr.value in _SIZES else _origin(node.value, made)
    if isinstance(node, cst.Call) and _name(node) in ("cos", "sin"):
        return _part(frozenset[str]().union(*(_origin(part, made) for part in parts(node))), _name(node))
    if isinstance(node, cst.Subscript) and isinstance(node.slice[-1].slice, cst.Index):
        item = node.slice[-1].slice.value
        if isinstance(item, cst.Integer) and len(node.slice) > 1:
            return _part(_origin(node.value, made), item.value)
    return frozenset[str]().union(*(_origin(part, made) for part in parts(node)))


def _products(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    for inner in walk(node):
        if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.Multiply):
            yield inner.left, inner.right
        elif isinstance(inner, cst.Call) and _name(inner) in _PRODUCTS:
            given = [argument.value for argument in inner.args]
            if len(given) == 1 and isinstance(inner.func, cst.Attribute):
                given.insert(0, inner.func.value)
            if len(given) == 2:
                yield given[0], given[1]


def _adds(node: cst.CSTNode) -> bool:
    signs = (cst.Add, cst.Subtract)
    return any(
        (isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, signs))
        or (isinstance(inner, cst.Call) and _name(inner) in _SUMS)
        for inner in walk(node)
    )


def _called(function: cst.FunctionDef, module: Module, owner: ClassInfo | None) -> Iterator[str]:
    """Yield the names of what a function calls, and of what the functions of the file that it calls call."""
    for call in calls_in(function.body):
        yield _name(call)
        method = self_attribute(call.func)
        helper = module.functions.get(call.func.value) if isinstance(call.func, cst.Name) else None
        if method is not None and owner is not None:
            helper = module.method(owner, method)
        for inner in calls_in(helper.body) if helper is not None else ():
            yield _name(inner)


def _name(call: cst.Call) -> str:
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""
