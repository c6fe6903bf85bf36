"""Operators, functions of torch and methods that compute the same."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from ..evaluation import pure, trivial
from ..rewriting import Expressions, Rewriting, call, guarded, method
from ..tensors import METHODS

_FUNCTIONS = {
    cst.Add: "add",
    cst.Subtract: "sub",
    cst.Multiply: "mul",
    cst.Divide: "div",
    cst.MatrixMultiply: "matmul",
    cst.Power: "pow",
}
_BOTH = (METHODS - {"bfloat16", "double", "float", "half", "contiguous", "expand", "expand_as", "new_ones"}) - {
    "new_zeros", "repeat", "to", "type_as", "view", "view_as", "reshape", "permute", "transpose", "swapaxes", "cumsum",
}  # fmt: skip
"""Methods that are also functions of torch and take the same arguments after the tensor."""


class SwapOperands(Expressions[cst.BinaryOperation]):
    """`a + b` → `b + a`, `a * b` → `b * a`."""

    kinds = (cst.BinaryOperation,)

    def respelled(self, original: cst.BinaryOperation, updated: cst.BinaryOperation) -> cst.BaseExpression | None:
        if not isinstance(original.operator, (cst.Add, cst.Multiply)) or not self._commutes(original):
            return None
        swapped = updated.with_changes(left=guarded(updated.right), right=guarded(updated.left))
        return swapped if _keeps_grouping(updated) else None

    def _commutes(self, node: cst.BinaryOperation) -> bool:
        tensors = self.file.tensors
        sides = (node.left, node.right)
        number = any(isinstance(side, (cst.Integer, cst.Float)) or tensors.certain(side) for side in sides)
        if any(isinstance(side, (cst.List, cst.Tuple, cst.BaseString, cst.BaseComp)) for side in sides):
            return False
        if isinstance(node.operator, cst.Add) and not number:
            return False
        return any(isinstance(side, (cst.Name, cst.Integer, cst.Float)) for side in sides) or all(
            trivial(side) or pure(side, self.module, tensors) for side in sides
        )


def _keeps_grouping(node: cst.BinaryOperation) -> bool:
    """Whether comments or line breaks around the operator do not stand in the way."""
    return "#" not in cst.Module([]).code_for_node(node)


class _TensorOperation(Expressions[cst.BinaryOperation]):
    """An operator whose left operand is certainly a tensor."""

    kinds = (cst.BinaryOperation,)

    def respelled(self, original: cst.BinaryOperation, updated: cst.BinaryOperation) -> cst.BaseExpression | None:
        function = _FUNCTIONS.get(type(original.operator))
        if function is None or "torch" not in self.module.imports or not _keeps_grouping(updated):
            return None
        return self.spelled(function, updated) if self.file.tensors.certain(original.left) else None

    def spelled(self, function: str, updated: cst.BinaryOperation) -> cst.BaseExpression:
        raise NotImplementedError


class OperatorAsFunction(_TensorOperation):
    """`a + b` → `torch.add(a, b)`, and so for `-`, `*`, `/`, `@`, `**`."""

    def spelled(self, function: str, updated: cst.BinaryOperation) -> cst.BaseExpression:
        return call(f"torch.{function}", updated.left, updated.right)


class OperatorAsMethod(_TensorOperation):
    """`a + b` → `a.add(b)`, and so for `-`, `*`, `/`, `@`, `**`."""

    def spelled(self, function: str, updated: cst.BinaryOperation) -> cst.BaseExpression:
        return method(updated.left, function, updated.right)


class FunctionAsMethod(Expressions[cst.Call]):
    """`torch.rsqrt(x)` → `x.rsqrt()`, `torch.matmul(a, b)` → `a.matmul(b)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        room, _, name = self.module.qualified(original.func).rpartition(".")
        if room != "torch" or name not in _BOTH | {"chunk", "split", "topk", "flatten", "add"} or not original.args:
            return None
        first = original.args[0]
        if first.keyword is not None or first.star or not self.file.tensors.certain(first.value):
            return None
        return method(updated.args[0].value, name, *updated.args[1:])


class MethodAsFunction(Expressions[cst.Call]):
    """`x.rsqrt()` → `torch.rsqrt(x)`, `x.mean(-1)` → `torch.mean(x, -1)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        if not isinstance(original.func, cst.Attribute) or not isinstance(updated.func, cst.Attribute):
            return None
        name = original.func.attr.value
        if name not in _BOTH | {"chunk", "split", "topk"} or "torch" not in self.module.imports:
            return None
        if any(argument.star for argument in original.args) or not self.file.tensors.certain(original.func.value):
            return None
        if name in ("squeeze", "flatten", "mean", "sum") and len([a for a in original.args if not a.keyword]) > 2:
            return None
        return call(f"torch.{name}", updated.func.value, *updated.args)


class PowerAsOperator(Expressions[cst.Call]):
    """`x.pow(2)`, `torch.pow(x, 2)` → `x ** 2`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        found = _power(self, original, updated)
        if found is None:
            return None
        operation = cst.BinaryOperation(guarded(found[0]), cst.Power(), guarded(found[1]))
        return guarded(operation)


class PowerAsSquare(Expressions[cst.Call | cst.BinaryOperation]):
    """`x.pow(2)`, `torch.pow(x, 2)`, `x ** 2` → `torch.square(x)`."""

    kinds = (cst.Call, cst.BinaryOperation)

    def respelled(
        self, original: cst.Call | cst.BinaryOperation, updated: cst.Call | cst.BinaryOperation
    ) -> cst.BaseExpression | None:
        found = _power(self, original, updated)
        if found is None or not isinstance(found[1], cst.Integer) or found[1].value != "2":
            return None
        return call("torch.square", found[0])


def _power(
    rewriting: Rewriting, original: cst.BaseExpression, updated: cst.BaseExpression
) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return base and exponent of a power of a tensor, however it is spelled."""
    certain = rewriting.file.tensors.certain
    if isinstance(updated, cst.BinaryOperation):
        assert isinstance(original, cst.BinaryOperation)
        if isinstance(updated.operator, cst.Power) and certain(original.left):
            return updated.left, updated.right
        return None
    assert isinstance(original, cst.Call)
    assert isinstance(updated, cst.Call)
    if any(argument.keyword is not None or argument.star for argument in original.args):
        return None
    if rewriting.module.qualified(original.func) == "torch.pow" and len(original.args) == 2:
        return (updated.args[0].value, updated.args[1].value) if certain(original.args[0].value) else None
    if isinstance(original.func, cst.Attribute) and original.func.attr.value == "pow" and len(original.args) == 1:
        assert isinstance(updated.func, cst.Attribute)
        return (updated.func.value, updated.args[0].value) if certain(original.func.value) else None
    return None


class MatmulAsOperator(Expressions[cst.Call]):
    """`torch.matmul(a, b)`, `a.matmul(b)` → `a @ b`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        sides = [a.value for a in updated.args if a.keyword is None and not a.star]
        if len(sides) != len(updated.args):
            return None
        if isinstance(updated.func, cst.Attribute) and updated.func.attr.value == "matmul":
            if self.module.qualified(original.func) != "torch.matmul":
                sides.insert(0, updated.func.value)
            if len(sides) == 2:
                return guarded(cst.BinaryOperation(guarded(sides[0]), cst.MatrixMultiply(), guarded(sides[1])))
        return None


class FunctionalSpelling(Expressions[cst.Attribute]):
    """`F.silu(x)`, `nn.functional.silu(x)` → `torch.nn.functional.silu(x)`."""

    kinds = (cst.Attribute,)
    full: ClassVar[str] = "torch.nn.functional"

    def respelled(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression | None:
        above = self.module.parent(original)
        if "torch" not in self.module.imports or not (isinstance(above, cst.Attribute) and above.value is original):
            return self._aliased(original, updated)
        if self.module.qualified(original) == self.full and self.module.code(original) != self.full:
            return cst.parse_expression(self.full)
        return None

    def _aliased(self, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression | None:
        """`F.silu`, where `F` is a name of its own."""
        is_name = isinstance(original.value, cst.Name) and "torch" in self.module.imports
        if is_name and self.module.qualified(original.value) == self.full:
            return updated.with_changes(value=cst.parse_expression(self.full))
        return None


class SoftmaxAsTorch(Expressions[cst.Call]):
    """`F.softmax(x, dim=-1)` → `torch.softmax(x, dim=-1)`."""

    def respelled(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        room, _, name = self.module.qualified(original.func).rpartition(".")
        if room != "torch.nn.functional" or name not in ("softmax", "sigmoid", "tanh", "relu"):
            return None
        if "torch" not in self.module.imports or any(a.keyword is None for a in original.args[1:]):
            return None
        return updated.with_changes(func=cst.parse_expression(f"torch.{name}"))
