"""Whether a `view` of a projection's result only splits its last dimension, so that it works on a slice as well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import libcst as cst

from rewrite.analysis.effects import Scope, attribute
from rewrite.analysis.effects.identity import Identity
from rewrite.analysis.projections.linear_calls import LinearCall
from rewrite.analysis.terms.spelling import Term
from rewrite.analysis.tree.module import self_assignments, self_attribute

_MAX_FACTORS = 40


def splits_last(scope: Scope, view: cst.Call, projection: LinearCall | None) -> bool:
    """Return whether a `view` of a projection's result keeps every dimension but the last.

    Proven by the leading sizes, which are those of what is viewed or of what was projected, or by the trailing ones,
    whose product is the number of the projection's output features. `projection` is None for something whose shape is
    no longer that of the result.
    """
    sizes = _sizes(scope, view)
    base = view.func.value if isinstance(view.func, cst.Attribute) else view
    if sizes is None:
        return False
    if projection is None:
        return _leads_with(scope, sizes, base)
    here = scope.function in scope.module.ancestors(projection.node)  # elsewhere its argument's name means another
    sources = (base, projection.argument) if here else (base,)
    return any(_leads_with(scope, sizes, source) for source in sources) or _ends_with(
        scope, sizes, projection.attribute
    )


def pairs_last(scope: Scope, view: cst.Call) -> bool:
    """Return whether a `view` or `reshape` only makes pairs of the last dimension: `x.view(*x.shape[:-1], -1, 2)`."""
    sizes = _sizes(scope, view)
    base = view.func.value if isinstance(view.func, cst.Attribute) else view
    while isinstance(base, cst.Call) and isinstance(base.func, cst.Attribute) and base.func.attr.value == "float":
        base = base.func.value
    if sizes is None or len(sizes) < 3 or any(isinstance(size, cst.StarredElement) for size in sizes[-2:]):
        return False
    ends = [scope.module.code(size) for size in sizes[-2:]]
    return ends == ["-1", "2"] and _leads_with(scope, sizes, base)


def split_alike(scope: Scope, projections: Sequence[LinearCall]) -> bool:
    """Return whether the results of all projections are first split into heads of one size, each of them.

    If that size is even, so is the number of features of each.
    """
    identity, last = Identity(scope), set[Term]()
    for projection in projections:
        above = scope.module.parent(projection.node)
        if not isinstance(above, cst.Attribute) or above.attr.value not in ("view", "reshape"):
            return False
        view = scope.module.parent(above)
        if not isinstance(view, cst.Call) or view.func is not above:
            return False
        sizes = _sizes(scope, view)
        if not sizes or isinstance(sizes[-1], cst.StarredElement) or not splits_last(scope, view, projection):
            return False
        last.add(identity.term(sizes[-1]))
    return len(last) == 1 and not any(term.op == "opaque" for term in last)


def _sizes(scope: Scope, view: cst.Call) -> list[cst.BaseExpression | cst.StarredElement] | None:
    """Return the sizes that a `view` names, one expression each or a starred element."""
    if len(view.args) == 1 and not view.args[0].star:
        return _elements(scope, view.args[0].value)
    if any(argument.keyword is not None or argument.star == "**" for argument in view.args):
        return None
    found: list[cst.BaseExpression | cst.StarredElement] = []
    for argument in view.args:
        inner = _elements(scope, argument.value) if argument.star else [argument.value]
        found += inner if inner is not None else [cst.StarredElement(argument.value)]
    return found


def _elements(scope: Scope, node: cst.BaseExpression) -> list[cst.BaseExpression | cst.StarredElement] | None:
    """Return the elements of a tuple, through locals and `+`."""
    if isinstance(node, cst.Name):
        value = scope.single.get(node.value)
        return None if value is None else _elements(scope, value)
    if isinstance(node, (cst.Tuple, cst.List)):
        return [e if isinstance(e, cst.StarredElement) else e.value for e in node.elements]
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Add):
        right = _elements(scope, node.right)
        return None if right is None else [cst.StarredElement(node.left), *right]
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "Size":
        return _elements(scope, node.args[0].value) if len(node.args) == 1 else None
    return None


def _leads_with(
    scope: Scope, sizes: Sequence[cst.BaseExpression | cst.StarredElement], argument: cst.BaseExpression
) -> bool:
    if not isinstance(argument, cst.Name) or not sizes:
        return False
    first = sizes[0]
    if isinstance(first, cst.StarredElement):
        source = _all_but_last(scope, first.value)
        return source is not None and _same_leading(scope, source, argument)
    dims = [_dimension(scope, size) for size in sizes if not isinstance(size, cst.StarredElement)]
    if not dims or dims[0] is None:
        return False
    source, _, rank = dims[0]
    wanted = range(rank - 1)
    given = [d[1] if d is not None and d[0].value == source.value else -1 for d in dims[: rank - 1]]
    return rank > 1 and given == list(wanted) and _same_leading(scope, source, argument)


def _same_leading(scope: Scope, source: cst.Name, argument: cst.Name) -> bool:
    """Whether two names certainly have the same sizes but the last: the same tensor, or one name for both."""
    if source.value == argument.value:
        return True
    identity = Identity(scope)
    return identity.term(source) == identity.term(argument)


def _all_but_last(scope: Scope, node: cst.BaseExpression) -> cst.Name | None:
    """Return `x` of `x.shape[:-1]` and of `x.size()[:-1]`, through locals."""
    if isinstance(node, cst.Name) and node.value in scope.single:
        return _all_but_last(scope, scope.single[node.value])
    if not isinstance(node, cst.Subscript) or len(node.slice) != 1:
        return None
    part = node.slice[0].slice
    if not isinstance(part, cst.Slice) or part.lower is not None or part.step is not None or part.upper is None:
        return None
    return _shape_of(node.value) if scope.module.code(part.upper) == "-1" else None


def _shape_of(node: cst.BaseExpression) -> cst.Name | None:
    """Return `x` of `x.shape` and `x.size()`."""
    if isinstance(node, cst.Call) and not node.args and isinstance(node.func, cst.Attribute):
        node = node.func if node.func.attr.value == "size" else node
    if not isinstance(node, cst.Attribute) or node.attr.value not in ("shape", "size"):
        return None
    return node.value if isinstance(node.value, cst.Name) else None


def _dimension(scope: Scope, node: cst.BaseExpression) -> tuple[cst.Name, int, int] | None:
    """Return (x, place, rank) where `node` is a local from `a, b, c = x.shape`."""
    if not isinstance(node, cst.Name):
        return None
    for target, value in scope.unpacked:
        names = [element.value.value if isinstance(element.value, cst.Name) else "" for element in target.elements]
        if node.value in names and (source := _shape_of(value)) is not None:
            return source, names.index(node.value), len(names)
    return None


def _ends_with(scope: Scope, sizes: Sequence[cst.BaseExpression | cst.StarredElement], projection: str) -> bool:
    """Whether the product of the last sizes is the number of output features, leaving at least one size before."""
    features = _output_features(scope, projection)
    if features is None:
        return False
    for count in range(1, len(sizes)):
        last = sizes[-count:]
        if any(isinstance(size, cst.StarredElement) or scope.module.code(size) == "-1" for size in last):
            return False
        product = Counter[str]()
        for size in last:
            assert not isinstance(size, cst.StarredElement)
            product += _factors(scope, size, scope.single)
        if _cancelled(product) == features:
            return True
    return False


def _output_features(scope: Scope, projection: str) -> Counter[str] | None:
    owner = scope.owner
    if owner is None:
        return None
    values = attribute(owner, projection, scope.names).values
    found = set[tuple[tuple[str, int], ...]]()
    for value in values:
        if not isinstance(value, cst.Call) or len(value.args) < 2:
            return None
        named = {a.keyword.value: a.value for a in value.args if a.keyword is not None}
        second = value.args[1].value if value.args[1].keyword is None else None
        size = named.get("out_features", second)
        if size is None:
            return None
        found.add(tuple(sorted(_cancelled(_factors(scope, size, _made_in_init(scope))).items())))
    return Counter(dict(found.pop())) if len(found) == 1 else None


def _made_in_init(scope: Scope) -> dict[str, cst.BaseExpression]:
    init = scope.owner.methods.get("__init__") if scope.owner is not None else None
    return scope.effects.scope(init, scope.owner).single if init is not None else {}


def _factors(
    scope: Scope, node: cst.BaseExpression, values: dict[str, cst.BaseExpression], depth: int = 8
) -> Counter[str]:
    """Return the factors of a product of sizes, attributes of `self` and locals replaced by what they stand for."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Multiply):
        return _factors(scope, node.left, values, depth) + _factors(scope, node.right, values, depth)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.FloorDivide, cst.Divide)):
        below = _factors(scope, node.right, values, depth)
        total = _factors(scope, node.left, values, depth)
        total.update({f"/{name}": times for name, times in below.items()})
        return total
    if (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Name)
        and node.func.value == "int"
        and len(node.args) == 1
    ):
        return _factors(scope, node.args[0].value, values, depth)
    if depth and (meant := _meaning(scope, node, values)) is not None:
        return _factors(scope, meant, _made_in_init(scope) if self_attribute(node) else values, depth - 1)
    return Counter({scope.module.code(node): 1})


def _meaning(
    scope: Scope, node: cst.BaseExpression, values: dict[str, cst.BaseExpression]
) -> cst.BaseExpression | None:
    """Return what a local or an attribute of `self` was assigned, where that is one thing."""
    if isinstance(node, cst.Name):
        return values.get(node.value)
    name = self_attribute(node)
    if name is None or scope.owner is None:
        return None
    found = attribute(scope.owner, name, scope.names)
    init = scope.owner.methods.get("__init__")
    made = [value for key, value in self_assignments(init) if key == name] if init is not None else []
    if len(made) != 1 or len(found.values) != 1:
        return None
    return None if isinstance(made[0], cst.Call) and not scope.module.code(made[0]).startswith("int(") else made[0]


def _cancelled(factors: Counter[str]) -> Counter[str]:
    """Take out what is both multiplied and divided by: sizes that do not divide would fail anyway."""
    kept = Counter(factors)
    for name in [name for name in factors if name.startswith("/")]:
        both = min(kept[name], kept[name[1:]])
        kept[name] -= both
        kept[name[1:]] -= both
    numbers = {name: times for name, times in kept.items() if name.isdecimal()}
    product = math.prod(int(name) ** times for name, times in numbers.items())
    rest = Counter({name: times for name, times in kept.items() if times and name not in numbers})
    return rest if product == 1 else rest + Counter({str(product): 1})
