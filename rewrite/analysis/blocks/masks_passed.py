"""Whether the masks that a model makes come to its layers as they were made.

A decode step reads no mask: it computes what the functions that make masks say. So nothing between them and the layers
may hide more, or less.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m

from rewrite.analysis.blocks.windows import mask_functions
from rewrite.analysis.tree.module import ClassInfo, Module, self_attribute, walk
from rewrite.analysis.tree.nodes import calls_in, given, mutated_names

_PADDING = "attention_mask"
_ONES = ("torch.ones", "torch.ones_like")
"""What hides nothing."""
_ASKED = m.Name("isinstance") | m.Name("len") | m.Attribute(value=m.Name("logger") | m.Name("warnings"))
_KINDS = ("shape", "size", "ndim", "dim", "dtype", "device", "get")
_CHECKPOINT = "_gradient_checkpointing_func"


def mask_changed(model: ClassInfo, module: Module) -> str:
    """Return the source of what a model that builds layers does with a mask before they get it, empty for nothing."""
    forward = model.methods.get("forward")
    functions = mask_functions(forward, module) if forward is not None else {}
    return _Passed(forward, {*functions}, module).changed() if forward is not None and functions else ""


class _Passed:
    """Where the masks of one function go."""

    def __init__(self, forward: cst.FunctionDef, functions: set[str], module: Module):
        self.forward, self.module = forward, module
        self.values: dict[str, list[cst.BaseExpression]] = {}
        self.nodes = list(walk(forward.body))
        self.order = {id(node): place for place, node in enumerate(self.nodes)}
        for node in self.nodes:
            if isinstance(node, cst.Assign):
                for target, value in given(node):
                    for name in _names(target):
                        self.values.setdefault(name, []).append(value)
            elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)) and isinstance(node.target, cst.Name):
                if node.value is not None:
                    self.values.setdefault(node.target.value, []).append(node.value)
        self.makers = self._held(functions)
        """What the functions are called, and the locals that hold one of them."""
        self.made = [call for call in calls_in(forward.body) if self._makes(call.func)]
        self.turns = {
            name.value
            for node in self.nodes
            if isinstance(node, (cst.For, cst.CompFor))
            for name in walk(node.target)
            if isinstance(name, cst.Name)
        }
        """Locals that loops bind: the layers, one after the other."""
        self.holders = self._holders()

    def changed(self) -> str:
        """Return the source of what does more with a mask than to pass it on."""
        for call in self.made:
            if (told := self._other_padding(call)) is not None:
                return self._said(told)
        for name in sorted(self.holders):
            for value in self.values.get(name, ()):
                if not self._is_plain(value):
                    return self._said(value)
            for node in self.nodes:
                if isinstance(node, cst.Name) and node.value == name and self._is_after(node):
                    if not self._is_passed(node):
                        return self._said(node)
        return self._changed_in_a_loop()

    def _changed_in_a_loop(self) -> str:
        """Return the source of what changes a mask that a loop takes from beside the layers."""
        for loop in (node for node in self.nodes if isinstance(node, cst.For)):
            if not any(isinstance(node, cst.Name) and node.value in self.holders for node in walk(loop.iter)):
                continue
            taken = {name.value for name in walk(loop.target) if isinstance(name, cst.Name)}
            for use in (node for node in walk(loop.body) if isinstance(node, cst.Name) and node.value in taken):
                if use.value in self.values or not self._is_passed(use):
                    return self._said(use)
        return ""

    def _said(self, node: cst.CSTNode) -> str:
        return self.module.code(self.module.statement(node)).strip().splitlines()[0]

    def _held(self, functions: set[str]) -> set[str]:
        makers = set(functions)
        for _ in range(3):
            for name, values in self.values.items():
                if any(self._is_function(value, makers) for value in values):
                    makers.add(name)
        return makers

    def _is_function(self, value: cst.BaseExpression, makers: set[str]) -> bool:
        if isinstance(value, cst.IfExp):
            return self._is_function(value.body, makers) and self._is_function(value.orelse, makers)
        if isinstance(value, cst.Dict):
            return any(self._is_function(element.value, makers) for element in value.elements)
        if isinstance(value, cst.Subscript):
            return self._is_function(value.value, makers)
        return isinstance(value, (cst.Name, cst.Attribute)) and self.module.code(value) in makers

    def _makes(self, function: cst.BaseExpression) -> bool:
        return self._is_function(function, self.makers)

    def _holders(self) -> set[str]:
        """Return the locals that hold masks: one, or several by name."""
        found: set[str] = set()
        for _ in range(4):
            for name, values in self.values.items():
                if name not in self.makers and any(self._holds(value, found) for value in values):
                    found.add(name)
        return found

    def _holds(self, value: cst.BaseExpression, found: set[str]) -> bool:
        return any(
            (isinstance(way, cst.Call) and self._makes(way.func)) or (isinstance(way, cst.Name) and way.value in found)
            for way in _ways(value)
        )

    def _is_plain(self, value: cst.BaseExpression) -> bool:
        """Whether each way that a value may come is a mask as made, none, or nothing hidden."""
        for way in _ways(value):
            if isinstance(way, cst.Call):
                plain = self._makes(way.func) or self.module.qualified(way.func) in _ONES
            else:
                plain = isinstance(way, cst.Name)
            if not plain:
                return False
        return True

    def _other_padding(self, call: cst.Call) -> cst.CSTNode | None:
        """Return what a mask is made of in the place of what the caller says is padding."""
        for argument in call.args:
            if argument.keyword is None or argument.keyword.value != _PADDING:
                continue
            for way in _ways(argument.value):
                if not isinstance(way, cst.Name):
                    return way
                for value in self.values.get(way.value, ()) if way.value not in self.holders else ():
                    if not self._is_plain(value):
                        return value
                if way.value not in self.holders and (changed := self._changed_in_place(way.value)) is not None:
                    return changed
        return None

    def _changed_in_place(self, name: str) -> cst.CSTNode | None:
        for node in self.nodes:
            if isinstance(node, (cst.SimpleStatementLine,)) and name in mutated_names(node):
                return node
        return None

    def _is_after(self, use: cst.Name) -> bool:
        """Whether a local is read behind the first mask that it is given, where it was something else before."""
        first = min((self.order[id(v)] for v in self.values[use.value] if self._holds(v, self.holders)), default=0)
        return self.order[id(use)] > first

    def _is_looped_over(self, use: cst.Name) -> bool:
        """Whether a loop runs over layers and masks side by side: `zip(self.layers, [mask] * count)`."""
        inner: cst.CSTNode = use
        while isinstance(above := self.module.parent(inner), (*_THROUGH, cst.Arg, cst.Call, cst.BinaryOperation)):
            if isinstance(above, cst.Call) and not m.matches(above.func, m.Name("zip") | m.Name("enumerate")):
                return False
            if isinstance(above, cst.BinaryOperation) and not isinstance(inner, cst.List):
                return False
            inner = above
        return isinstance(above, cst.For) and above.iter is inner

    def _is_passed(self, use: cst.Name) -> bool:
        """Whether a use of a local that holds masks binds it, passes it to a layer, or only asks about it."""
        if self._is_looped_over(use):
            return True
        top: cst.CSTNode = use
        while isinstance(above := self.module.parent(top), _THROUGH) and not (
            isinstance(above, cst.IfExp) and above.test is top
        ):
            top = above
        if isinstance(above, cst.AssignTarget):
            return top is use or m.matches(top, m.Subscript(slice=[m.SubscriptElement(m.Index())]))
        if isinstance(above, (cst.Assign, cst.AnnAssign, cst.NamedExpr, cst.Comparison, cst.ComparisonTarget)):
            return True
        if isinstance(above, (cst.If, cst.IfExp, cst.BooleanOperation, cst.UnaryOperation, cst.Return)):
            return True
        if isinstance(above, cst.Attribute):
            return above.value is not top or above.attr.value in _KINDS or self._only_reads(above)
        if isinstance(above, cst.Arg):
            return above.keyword is top or self._is_layer(self.module.parent(above))
        return isinstance(above, (cst.Call, cst.Del, cst.Assert, cst.FormattedStringExpression))

    def _only_reads(self, node: cst.Attribute) -> bool:
        """Whether what is made of a mask becomes part of a result, and no layer is given it."""
        above = [*self.module.ancestors(node)]
        returned = any(isinstance(inner, cst.Return) for inner in above)
        return returned and not any(self._is_layer(inner) for inner in above)

    def _is_layer(self, call: cst.CSTNode) -> bool:
        """Whether a call is of a layer, or of a function that makes masks or asks something."""
        if not isinstance(call, cst.Call):
            return False
        function = call.func
        if isinstance(function, cst.Name) and function.value in self.turns:
            return True
        if isinstance(function, cst.Subscript) and self_attribute(function.value) is not None:
            return True
        of_self = self_attribute(function)
        return of_self == _CHECKPOINT or self._makes(function) or m.matches(function, _ASKED)


def _names(target: cst.CSTNode) -> Iterator[str]:
    """Yield the locals that a target binds or puts an item into."""
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, cst.Subscript):
        yield from _names(target.value)
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _names(element.value)


_THROUGH = (cst.Subscript, cst.IfExp, cst.DictElement, cst.Dict, cst.Lambda, cst.Element, cst.Tuple, cst.List)
"""What a mask stands in without being changed."""


def _ways(value: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield what a value may be, or hold: both sides of a choice, the values of a mapping, an item's mapping."""
    if isinstance(value, cst.IfExp):
        yield from _ways(value.body)
        yield from _ways(value.orelse)
    elif isinstance(value, (cst.Dict, cst.List, cst.Tuple)):
        for element in value.elements:
            yield from _ways(element.value)
    elif isinstance(value, cst.DictComp):
        yield from _ways(value.value)
    elif isinstance(value, (cst.ListComp, cst.GeneratorExp)):
        yield from _ways(value.elt)
    elif isinstance(value, cst.Lambda):
        yield from _ways(value.body)
    elif isinstance(value, (cst.Subscript, cst.NamedExpr)):
        yield from _ways(value.value)
    elif isinstance(value, cst.BooleanOperation):
        yield from _ways(value.left)
        yield from _ways(value.right)
    elif m.matches(value, m.Call(func=m.Attribute(attr=m.Name("get")))):
        yield from _ways(value.func.value)  # type: ignore[attr-defined]
    else:
        yield value
