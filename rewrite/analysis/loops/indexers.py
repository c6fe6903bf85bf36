"""Indexers, which keep keys of their own beside a layer's and choose among them what attention reads.

Against a buffer of fixed size an indexer is given every slot at every step. So it has to mask those that hold no token
before it chooses, the number of its candidates must not come from the device, and nothing of its state may lie where
only a growing cache has a place for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.effects import effects_of
from rewrite.analysis.tree.module import ClassInfo, Module, of_kind
from rewrite.analysis.tree.nodes import given_names, parameters

_COUNTS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "item", "tolist")
"""What gives a size, or a number, that only the device knows."""
_ASKS = (
    "any", "all", "bool", "eq", "ne", "lt", "le", "gt", "ge", "isin", "isfinite", "logical_and", "logical_or",
    "logical_not",
)  # fmt: skip
"""What gives a tensor of truths."""
_MASKS = ("masked_fill", "masked_fill_", "where")
_Given = Mapping[str, list[cst.BaseExpression]]


def hindrance(module: Module) -> tuple[str, str] | None:
    """Return why no buffer of fixed size can stand for an indexer's keys, and what of it: a reason of `static_cache`.

    None where one can, and where the file has no indexer.
    """
    for owner, _, method in module.methods():
        if any(True for _ in _updates(method)):
            found = _sized(owner, module) or _of_layer(module) or _unmasked(method, module)
            if found is not None:
                return found
    return None


def _updates(method: cst.FunctionDef) -> Iterator[cst.Call]:
    return (call for call in of_kind(method.body, cst.Call) if _name(call) == "update_indexer")


def _of_layer(module: Module) -> tuple[str, str] | None:
    """Find an attribute that the model itself writes on a layer of the cache."""
    for _, _, method in module.methods():
        given = _given(method)
        for target in of_kind(method.body, cst.AssignTarget):
            written = target.target
            if isinstance(written, cst.Attribute) and _is_cached_layer(written.value, given):
                return "other_state", written.attr.value
    return None


def _is_cached_layer(node: cst.BaseExpression, given: _Given) -> bool:
    """Whether an expression is an element of `….layers` of something that is not the model itself."""
    if isinstance(node, cst.Name):
        return any(_is_cached_layer(value, given) for value in given.get(node.value, ()))
    layers = m.Subscript(value=m.Attribute(value=~m.Name("self"), attr=m.Name("layers")))
    return m.matches(node, layers)


def _sized(owner: ClassInfo, module: Module) -> tuple[str, str] | None:
    """Find a size that only the device knows, in any method of an indexer."""
    for method in owner.methods.values():
        given = _given(method)
        for node in of_kind(method.body, cst.Call, cst.Subscript):
            if isinstance(node, cst.Call) and _name(node) in _COUNTS:
                return "device_size", " ".join(module.code(node).split())
            if isinstance(node, cst.Subscript) and any(_is_mask(index, given) for index in _indices(node)):
                return "device_size", " ".join(module.code(node).split())
    return None


def _indices(node: cst.Subscript) -> Iterator[cst.BaseExpression]:
    for element in node.slice:
        if isinstance(element.slice, cst.Index):
            yield element.slice.value


def _is_mask(node: cst.BaseExpression, given: _Given, below: tuple[str, ...] = ()) -> bool:
    """Whether an expression is a tensor of truths: indexing with one keeps as many as it says."""
    if isinstance(node, cst.Name):
        values = () if node.value in below else given.get(node.value, ())
        return any(_is_mask(value, given, (*below, node.value)) for value in values)
    if isinstance(node, cst.UnaryOperation):
        return isinstance(node.operator, cst.BitInvert)
    if isinstance(node, cst.BinaryOperation):
        both = (node.left, node.right)
        return isinstance(node.operator, (cst.BitAnd, cst.BitOr)) and any(_is_mask(n, given, below) for n in both)
    return isinstance(node, cst.Comparison) or (isinstance(node, cst.Call) and _name(node) in _ASKS)


def _unmasked(method: cst.FunctionDef, module: Module) -> tuple[str, str] | None:
    """Find a choice among scores that no mask was put over, or that there is no choice to see."""
    given = _given(method)
    names = effects_of(module).names
    chosen = [call for call in of_kind(method.body, cst.Call) if _name(call) == "topk"]
    for call in chosen:
        of_torch = names.resolved(call.func) == "torch.topk"
        scores = call.args[0].value if of_torch and call.args else call.func.value  # type: ignore[attr-defined]
        if not _is_masked(scores, given, parameters(method)):
            return "device_size", " ".join(module.code(call).split())
    return None if chosen else ("device_size", module.code(next(_updates(method))))


def _is_masked(node: cst.BaseExpression, given: _Given, handed: list[str], below: tuple[str, ...] = ()) -> bool:
    """Whether a mask was put over scores, by name or on the spot: filled in, or added."""
    if isinstance(node, cst.Name):
        values = () if node.value in below else given.get(node.value, ())
        return any(_is_masked(value, given, handed, (*below, node.value)) for value in values)
    if isinstance(node, cst.Call):
        inner = node.func.value if isinstance(node.func, cst.Attribute) else None
        return _name(node) in _MASKS or (inner is not None and _is_masked(inner, given, handed, below))
    if isinstance(node, cst.BinaryOperation):
        both = (node.left, node.right)
        added = isinstance(node.operator, cst.Add) and any(_is_handed(side, handed) for side in both)
        return added or any(_is_masked(side, given, handed, below) for side in both)
    return False


def _is_handed(node: cst.BaseExpression, handed: list[str]) -> bool:
    while isinstance(node, cst.Subscript):
        node = node.value
    return isinstance(node, cst.Name) and node.value in handed


def _name(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def _given(method: cst.FunctionDef) -> _Given:
    """Return every value that each local of a method is assigned."""
    found: dict[str, list[cst.BaseExpression]] = {}
    for line in of_kind(method.body, cst.Assign):
        for name, value in given_names(line).items():
            found.setdefault(name, []).append(value)
    for node in of_kind(method.body, cst.NamedExpr):
        if isinstance(node.target, cst.Name):
            found.setdefault(node.target.value, []).append(node.value)
    return found
