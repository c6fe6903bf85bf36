"""Who reads a tensor: the matrix products and attentions in which it stands for keys or values, the sizes asked of it,
and others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from rewrite.analysis.effects import Scope
from rewrite.analysis.tree.module import walk, without_runtime
from rewrite.analysis.tree.nodes import block_of, names_bound_by

_SWAPS = ("transpose", "swapaxes", "swapdims")
_CASTS = ("to", "float", "half", "bfloat16", "double", "type", "type_as")
_ABOUT = ("dtype", "device")
"""What is asked of a tensor that heads have no part in."""
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_SHARING = "grouped_attention"
_Order = tuple[int, ...]
"""Of the dimensions of what is read, which one of the four of the tensor it is."""
_AS_IT_IS: _Order = (0, 1, 2, 3)


@dataclass
class Reads:
    """Everything that reads a tensor, through the locals that hold it or a transposition of it."""

    products: list[cst.Call | cst.BinaryOperation] = field(default_factory=list)
    """Those whose right side it is, and the attentions whose keys or values it is; heads are the second dimension."""
    sides: dict[int, str] = field(default_factory=dict)
    """What it is to each of these attentions, by identity: `key` or `value`."""
    sizes: list[cst.BaseExpression] = field(default_factory=list)
    names: list[cst.Name] = field(default_factory=list)
    """Every place where a local that holds it is read."""
    first: list[cst.Name] = field(default_factory=list)
    """Of these, where the first such local is read."""
    locals: list[str] = field(default_factory=list)
    again: str = ""
    """A local that holds it and is bound anew elsewhere than in a line behind, in the same block."""
    copied: bool = False
    """Whether a local that holds it is a copy of itself on a condition."""
    other: cst.CSTNode | None = None
    """The first reader that is none of these."""


def reads_of(node: cst.BaseExpression, scope: Scope, heads: int = 1) -> Reads:
    """Return who reads the value of an expression of four dimensions, whose heads are the second or the third."""
    found = Reads()
    _Following(scope, found, heads).follow(node, _AS_IT_IS)
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
    held = targets.elements[place].value
    return held if isinstance(held, cst.Name) else None


@dataclass(frozen=True)
class _Following:
    scope: Scope
    found: Reads
    heads: int

    def follow(self, node: cst.BaseExpression, order: _Order) -> None:
        """Say who reads an expression whose dimensions are the tensor's in another order."""
        found = self.found
        if (moved := _moved(node, self.scope)) is not None:
            above, places = moved
            self.follow(above, tuple(order[place] for place in places))
        elif order[:2] == (0, self.heads) and (reader := self._reader(node, order)) is not None:
            found.products.append(reader)
        elif (sized := _size(node, self.scope)) is not None and not self._counts_heads(sized[1], order):
            found.sizes.append(sized[0])
        elif (target := held_by(node, self.scope)) is not None:
            self.hold(target, order)
        elif found.other is None:
            found.other = self.scope.module.parent(node)

    def hold(self, target: cst.Name, order: _Order) -> None:
        """Follow a local that holds it."""
        found = self.found
        if len(found.locals) > _MOST_LOCALS:
            found.other = found.other or target
            return
        is_first = not found.locals
        found.locals.append(target.value)
        copies = _copies_of_itself(target, self.scope)
        found.copied = found.copied or bool(copies)
        uses, bound = _uses_of(target, self.scope, copies)
        found.again = found.again or (target.value if bound else "")
        for use in uses:
            found.names.append(use)
            if is_first:
                found.first.append(use)
            self.follow(use, order)

    def _counts_heads(self, place: int | None, order: _Order) -> bool:
        return place is not None and order[place % 4] == self.heads

    def _reader(self, node: cst.BaseExpression, order: _Order) -> cst.Call | cst.BinaryOperation | None:
        if order[3] == 3 and (attention := attention_of(node, self.scope)) is not None:
            call, side = attention
            if id(call) in self.found.sides:  # keys that are values, too: one edit of it is enough
                return None
            self.found.sides[id(call)] = side
            return call
        return _product(node, self.scope)


_MOST_LOCALS = 16


def _copies_of_itself(target: cst.Name, scope: Scope) -> set[int]:
    """Return the statements `x = x.contiguous()` behind one that binds x, on a condition that stands in its block."""
    line = scope.module.statement(target)
    block = list(block_of(line, scope.module))
    place = next((place for place, statement in enumerate(block) if statement is line), len(block))
    ways = [s.body.body for s in block[place + 1 :] if isinstance(s, cst.If) and s.orelse is None]
    lines = [inner for way in ways for inner in way if isinstance(inner, cst.SimpleStatementLine)]
    return {id(inner) for inner in lines if _copies(inner, target.value, scope)}


def _copies(line: cst.SimpleStatementLine, name: str, scope: Scope) -> bool:
    small = line.body[0]
    if len(line.body) != 1 or not isinstance(small, cst.Assign) or not isinstance(small.value, cst.Call):
        return False
    held = small.value.func.value if isinstance(small.value.func, cst.Attribute) else None
    if not isinstance(held, cst.Name) or held.value != name or scope.module.code(small.targets[0].target) != name:
        return False
    return len(small.targets) == 1 and _moved(held, scope) == (small.value, _AS_IT_IS)


def _uses_of(target: cst.Name, scope: Scope, copies: set[int]) -> tuple[list[cst.Name], bool]:
    """Return every place that reads a local as `target` binds it, and whether it may be bound anew before one of them.

    A line behind, in the same block, that binds it ends this: what it reads it still reads.
    """
    line = scope.module.statement(target)
    block = list(block_of(line, scope.module))
    place = next((place for place, statement in enumerate(block) if statement is line), None)
    if place is None:
        return list(uses_after(target, scope)), True
    apart = {id(node) for inner in walk(scope.function.body) if id(inner) in copies for node in walk(inner)}
    for end, statement in enumerate(block[place + 1 :], place + 1):
        bound = [n for n in walk(statement) if target.value in names_bound_by(n) and id(n) not in apart]
        if bound:
            if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
                return list(uses_after(target, scope)), True
            inside = {id(node) for other in block[place + 1 : end + 1] for node in walk(other)}
            targets = {id(node) for one in bound for node in walk(getattr(one, "target", one))}
            uses = [use for use in uses_after(target, scope) if id(use) in inside - targets - apart]
            return uses, not isinstance(statement.body[0], (cst.Assign, cst.AnnAssign))
    uses = [use for use in uses_after(target, scope) if id(use) not in apart]
    order = {id(node): number for number, node in enumerate(walk(scope.function.body))}
    own = {id(node) for node in walk(line)} | apart
    later = [
        node
        for node in walk(scope.function.body)
        if target.value in names_bound_by(node) and order[id(node)] > order[id(line)] and id(node) not in own
    ]
    return uses, bool(later)


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


def _moved(node: cst.BaseExpression, scope: Scope) -> tuple[cst.BaseExpression, _Order] | None:
    """Return the expression that moves the four dimensions of `node`, or copies it as it is, and where each was."""
    above = scope.module.parent(node)
    if isinstance(above, cst.Attribute) and above.value is node:
        if above.attr.value == "mT":
            return above, (0, 1, 3, 2)
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
    if (name == "contiguous" and not given) or (name in _CASTS and isinstance(above, cst.Attribute)):
        return call, _AS_IT_IS
    axes = [axis % 4 for value in _values(given) if (axis := _integer(value)) is not None]
    if len(axes) != len(_values(given)):
        return None
    if name in _SWAPS and len(axes) == 2:
        places = list(_AS_IT_IS)
        places[axes[0]], places[axes[1]] = places[axes[1]], places[axes[0]]
        return call, tuple(places)
    return (call, tuple(axes)) if name == "permute" and sorted(axes) == [*_AS_IT_IS] else None


def _values(given: Sequence[cst.Arg]) -> list[cst.BaseExpression]:
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


def attention_of(node: cst.BaseExpression, scope: Scope) -> tuple[cst.Call, str] | None:
    """Return the attention whose keys or values `node` is, torch's or one that shares heads already, and which."""
    above = scope.module.parent(node)
    call = scope.module.parent(above) if isinstance(above, cst.Arg) else None
    if not isinstance(call, cst.Call) or any(argument.star for argument in call.args):
        return None
    if scope.names.resolved(call.func) != _ATTENTION and not is_sharing(call, scope):
        return None
    names = [argument.keyword.value for argument in call.args if argument.keyword is not None]
    plain = [argument for argument in call.args if argument.keyword is None]
    place = next((place for place, argument in enumerate(plain) if argument is above), None)
    if isinstance(above, cst.Arg) and above.keyword is not None:
        side = above.keyword.value
    else:
        side = ("query", "key", "value")[place] if place is not None and place < 3 else ""
    if side not in ("key", "value") or "enable_gqa" in names or f"{side}_groups" in names:
        return None
    return call, side


def is_sharing(call: cst.Call, scope: Scope) -> bool:
    """Whether a call is one of `grouped_attention`."""
    return without_runtime(scope.module.qualified(call.func)) == _SHARING and _SHARING not in scope.locals


def _size(node: cst.BaseExpression, scope: Scope) -> tuple[cst.BaseExpression, int | None] | None:
    """Return `node.shape[i]` or `node.size(i)`, and i; `node.dtype` and the like are of no dimension."""
    above = scope.module.parent(node)
    if not isinstance(above, cst.Attribute) or above.value is not node:
        return None
    if above.attr.value in _ABOUT:
        return above, None
    size = scope.module.parent(above)
    if above.attr.value == "size" and isinstance(size, cst.Call) and size.func is above and len(size.args) == 1:
        place = _integer(size.args[0].value)
        return (size, place) if place is not None else None
    if above.attr.value != "shape" or not isinstance(size, cst.Subscript) or len(size.slice) != 1:
        return None
    item = size.slice[0].slice
    place = _integer(item.value) if isinstance(item, cst.Index) else None
    return (size, place) if place is not None else None
