"""In which order Python evaluates an expression, and what that may do besides giving a value."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from rewrite.analysis.tree.module import Module, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in

from .tensors import METHODS, Tensors

TRIVIAL = (cst.Name, cst.Integer, cst.Float, cst.SimpleString, cst.Ellipsis)
_CONDITIONAL = (cst.Lambda, cst.BaseComp, cst.IfExp, cst.BooleanOperation, cst.Await, cst.Yield, cst.NamedExpr)
_CONDITIONAL += (cst.FormattedString, cst.ConcatenatedString)
_RANDOM = frozenset({"dropout", "rand", "randn", "randint", "multinomial", "bernoulli", "normal", "rand_like"})
_PLAIN_LAYERS = frozenset({"torch.nn.Linear", "torch.nn.LayerNorm", "torch.nn.RMSNorm", "torch.nn.Embedding"})
_BUILTINS = frozenset(
    {"len", "int", "float", "bool", "isinstance", "getattr", "hasattr", "min", "max", "range", "tuple"}
)


def trivial(node: cst.BaseExpression) -> bool:
    """Whether an expression is a name, a constant or an attribute of one: reading it does nothing."""
    return isinstance(node, TRIVIAL) or (isinstance(node, cst.Attribute) and trivial(node.value))


def pure(node: cst.CSTNode, module: Module, tensors: Tensors) -> bool:
    """Whether nothing that an expression calls writes, draws random numbers or may be seen from elsewhere."""
    odd = (cst.Await, cst.Yield, cst.NamedExpr, cst.Lambda)
    return not any(isinstance(inner, odd) for inner in walk(node)) and all(
        _pure_call(call, module, tensors) for call in calls_in(node)
    )


def _pure_call(call: cst.Call, module: Module, tensors: Tensors) -> bool:
    if any(argument.keyword is not None and argument.keyword.value in ("out", "inplace") for argument in call.args):
        return False
    qualified = module.qualified(call.func)
    room, _, name = qualified.rpartition(".")
    if room in ("torch", "torch.nn.functional"):
        return name not in _RANDOM and not name.endswith("_")
    if not room and name in _BUILTINS:
        return True
    attribute, owner = self_attribute(call.func), tensors.owner(call)
    if attribute is not None:
        return owner is not None and tensors.built_of(owner, attribute) <= _PLAIN_LAYERS != set()
    return isinstance(call.func, cst.Attribute) and call.func.attr.value in METHODS | {"size", "split", "chunk"}


def evaluated(node: cst.CSTNode) -> Iterator[cst.BaseExpression | None]:
    """Yield the expressions below `node` in the order in which they are evaluated, itself last.

    What comes after something that is evaluated on a condition is not yielded: `None` ends the order there.
    """
    for inner in _evaluated(node):
        yield inner
        if inner is None:
            return


def _evaluated(node: cst.CSTNode) -> Iterator[cst.BaseExpression | None]:
    if isinstance(node, _CONDITIONAL) or (isinstance(node, cst.Comparison) and len(node.comparisons) > 1):
        yield None
        return
    if isinstance(node, (cst.SimpleString, cst.Name)):
        yield node
        return
    for child in node.children:
        if isinstance(child, cst.Arg):
            yield from _evaluated(child.value)
        elif isinstance(child, cst.Name) and isinstance(node, cst.Attribute) and child is node.attr:
            continue
        elif isinstance(child, (cst.BaseExpression, cst.BaseElement, cst.SubscriptElement, cst.BaseSlice)):
            yield from _evaluated(child)
        elif isinstance(child, cst.ComparisonTarget):
            yield from _evaluated(child.comparator)
        elif isinstance(child, cst.DictElement):
            yield from _evaluated(child)
    if isinstance(node, cst.BaseExpression):
        yield node
