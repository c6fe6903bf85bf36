"""Who reads a tensor: the matrix products on whose right side it stands, the sizes that are asked of it, and others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from rewrite.analysis.effects import Scope
from rewrite.analysis.syntax.module import walk

_SWAPS = ("transpose", "swapaxes", "swapdims")


@dataclass
class Reads:
    """Everything that reads a tensor, through the locals that hold it or a transposition of it."""

    products: list[cst.Call | cst.BinaryOperation] = field(default_factory=list)
    """Those whose right side it is."""
    sizes: list[cst.BaseExpression] = field(default_factory=list)
    names: list[cst.Name] = field(default_factory=list)
    """Every place where a local that holds it is read."""
    locals: list[str] = field(default_factory=list)
    other: cst.CSTNode | None = None
    """The first reader that is none of these."""


def reads_of(node: cst.BaseExpression, scope: Scope) -> Reads:
    """Return who reads the value of an expression."""
    found = Reads()
    _follow(node, scope, found, transposed=False)
    return found


def held_by(node: cst.BaseExpression, scope: Scope) -> cst.Name | None:
    """Return the local that an expression is assigned to, alone or beside others in a tuple of the same length."""
    above = scope.module.parent(node)
    if isinstance(above, cst.Assign) and above.value is node and len(above.targets) == 1:
        target = above.targets[0].target
        return target if isinstance(target, cst.Name) else None
    if isinstance(above, cst.AnnAssign) and isinstance(above.target, cst.Name):
        return above.target
    if not isinstance(above, cst.Element):
        return None
    whole = scope.module.parent(above)
    line = scope.module.parent(whole)
    if not isinstance(whole, (cst.Tuple, cst.List)) or not isinstance(line, cst.Assign) or len(line.targets) != 1:
        return None
    targets = line.targets[0].target
    if not isinstance(targets, (cst.Tuple, cst.List)) or len(targets.elements) != len(whole.elements):
        return None
    if any(isinstance(e, cst.StarredElement) for e in (*targets.elements, *whole.elements)):
        return None
    place = next(place for place, element in enumerate(whole.elements) if element is above)
    target = targets.elements[place].value
    return target if isinstance(target, cst.Name) else None


def _follow(node: cst.BaseExpression, scope: Scope, found: Reads, *, transposed: bool) -> None:
    module = scope.module
    above = module.parent(node)
    if (swapped := _swapped(node, scope)) is not None:
        _follow(swapped, scope, found, transposed=True)
    elif (product := _product(node, scope)) is not None:
        found.products.append(product)
    elif not transposed and (size := _kept_size(node, scope)) is not None:
        found.sizes.append(size)
    elif (target := held_by(node, scope)) is not None and target.value not in found.locals:
        found.locals.append(target.value)
        for use in uses_after(target, scope):
            found.names.append(use)
            _follow(use, scope, found, transposed=transposed)
    elif found.other is None:
        found.other = above


def uses_after(target: cst.Name, scope: Scope) -> Iterator[cst.Name]:
    """Yield every place that reads a local, from the statement that binds `target` on."""
    started = False
    line = scope.module.statement(target)
    own = {id(node) for node in walk(line)}
    for node in walk(scope.function.body):
        started = started or node is line
        if started and isinstance(node, cst.Name) and node.value == target.value and id(node) not in own:
            above = scope.module.parent(node)
            named = isinstance(above, cst.Attribute) and above.attr is node
            keyword = isinstance(above, cst.Arg) and above.keyword is node
            if not named and not keyword:
                yield node


def _swapped(node: cst.BaseExpression, scope: Scope) -> cst.BaseExpression | None:
    """Return the expression that swaps the last two of four dimensions of `node`."""
    above = scope.module.parent(node)
    if isinstance(above, cst.Attribute) and above.value is node:
        if above.attr.value == "mT":
            return above
        call = scope.module.parent(above)
        given = call.args if isinstance(call, cst.Call) and call.func is above else None
        name = above.attr.value
    elif isinstance(above, cst.Arg):
        call = scope.module.parent(above)
        resolved = scope.names.resolved(call.func) if isinstance(call, cst.Call) else ""
        given = call.args[1:] if isinstance(call, cst.Call) and call.args[0] is above else None
        name = resolved.removeprefix("torch.") if resolved.startswith("torch.") else ""
    else:
        return None
    if given is None or not isinstance(call, cst.Call) or any(argument.star for argument in given):
        return None
    axes = [_integer(value) for value in _values(given)]
    if name in _SWAPS and None not in axes and {axis % 4 for axis in axes if axis is not None} == {2, 3}:
        return call
    if name == "permute" and None not in axes and [axis % 4 for axis in axes if axis is not None] == [0, 1, 3, 2]:
        return call
    return None


def _values(given: tuple[cst.Arg, ...] | list[cst.Arg]) -> list[cst.BaseExpression]:
    if len(given) == 1 and isinstance(given[0].value, (cst.Tuple, cst.List)):
        return [element.value for element in given[0].value.elements]
    return [argument.value for argument in given]


def _integer(node: cst.BaseExpression) -> int | None:
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        inner = _integer(node.expression)
        return None if inner is None else -inner
    return node.evaluated_value if isinstance(node, cst.Integer) else None


def _product(node: cst.BaseExpression, scope: Scope) -> cst.Call | cst.BinaryOperation | None:
    """Return the matrix product whose right side `node` is."""
    above = scope.module.parent(node)
    if isinstance(above, cst.BinaryOperation):
        return above if isinstance(above.operator, cst.MatrixMultiply) and above.right is node else None
    call = scope.module.parent(above) if isinstance(above, cst.Arg) else None
    both = operands(call, scope) if isinstance(call, cst.Call) else None
    return call if isinstance(call, cst.Call) and both is not None and both[1] is node else None


def operands(
    node: cst.Call | cst.BinaryOperation, scope: Scope
) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return both sides of a matrix product: `a @ b`, `torch.matmul(a, b)`, `a.matmul(b)`; None for another call."""
    if isinstance(node, cst.BinaryOperation):
        return node.left, node.right
    if any(argument.star for argument in node.args):
        return None
    given = {argument.keyword.value: argument.value for argument in node.args if argument.keyword is not None}
    plain = [argument.value for argument in node.args if argument.keyword is None]
    if scope.names.resolved(node.func) == "torch.matmul":
        names = ["input", "other"][len(plain) :]
    elif isinstance(node.func, cst.Attribute) and node.func.attr.value == "matmul" and _is_value(node.func, scope):
        plain.insert(0, node.func.value)
        names = ["other"][len(plain) - 1 :]
    else:
        return None
    if set(given) != set(names) or len(plain) + len(names) != 2:
        return None
    both = [*plain, *(given[name] for name in names)]
    return both[0], both[1]


def _is_value(func: cst.Attribute, scope: Scope) -> bool:
    """Whether a method is one of something computed here, not of a module of the file's imports."""
    root: cst.BaseExpression = func
    while isinstance(root, cst.Attribute):
        root = root.value
    return not isinstance(root, cst.Name) or root.value in scope.locals


def _kept_size(node: cst.BaseExpression, scope: Scope) -> cst.BaseExpression | None:
    """Return `node.shape[i]` or `node.size(i)` of a dimension that repeated heads leave alone."""
    above = scope.module.parent(node)
    if not isinstance(above, cst.Attribute) or above.value is not node:
        return None
    size = scope.module.parent(above)
    if above.attr.value == "size" and isinstance(size, cst.Call) and size.func is above and len(size.args) == 1:
        place = _integer(size.args[0].value)
        return size if place is not None and place % 4 != 1 else None
    if above.attr.value != "shape" or not isinstance(size, cst.Subscript) or len(size.slice) != 1:
        return None
    item = size.slice[0].slice
    place = _integer(item.value) if isinstance(item, cst.Index) else None
    return size if place is not None and place % 4 != 1 else None
