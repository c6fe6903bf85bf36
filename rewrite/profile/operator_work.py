"""How many bytes an operator must move and how many operations it takes, from the shapes that it was given.

Bytes are those of every input and output once; what is expanded counts once. An operation is a multiplication or an
addition. What cannot be told from shapes has no figure: it is then shown without a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from rewrite.measure import categories

from .trace import Operator

SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1, "c10::complex<float>": 8,
}  # fmt: skip
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "norm", "var", "std")
_CAUSAL = {  # the place of `is_causal` among the arguments
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
}


@dataclass(frozen=True)
class Amount:
    """What an operator takes: bytes moved and operations."""

    bytes: float
    operations: float


def amount_of(operator: Operator) -> Amount | None:
    """Return the work of an operator, or None where its shapes do not say."""
    name = operator.name.rpartition("::")[2]
    tensors = _Tensors(operator)
    try:
        if name in ("mm", "addmm", "addmm_"):
            first = 0 if name == "mm" else 1
            return _product(tensors, first, first + 1, 1)
        if name in ("bmm", "baddbmm", "baddbmm_"):
            first = 0 if name == "bmm" else 1
            return _product(tensors, first, first + 1, tensors.shape(first)[0])
        if name in ("mv", "addmv"):
            first = 0 if name == "mv" else 1
            rows, columns = tensors.shape(first)
            moved = tensors.bytes(first) + tensors.bytes(first + 1) + rows * tensors.size(first)
            return Amount(moved, 2.0 * rows * columns)
        if name in ("linear", "mkldnn_linear", "_mkldnn_linear"):
            inputs, weight = tensors.shape(0), tensors.shape(1)
            out = prod(inputs[:-1]) * weight[0]
            moved = tensors.bytes(0) + tensors.bytes(1) + out * tensors.size(0)
            return Amount(moved, 2.0 * out * weight[-1])
        if name in _CAUSAL:
            return _attention(tensors, operator, _CAUSAL[name])
        if name in ("embedding", "index_select"):
            return _rows(tensors, name)
        if name in ("cat", "stack", "_cat"):
            parts = [prod(shape) for shape in operator.shapes[0]]
            return Amount(2.0 * sum(parts) * _size_of(operator.dtypes[0]), 0.0)
        if name in ("copy_", "fill_", "zero_"):
            read = tensors.bytes(1) if name == "copy_" else 0.0
            return Amount(prod(tensors.shape(0)) * tensors.size(0) + read, 0.0)
        if categories.operator_category(operator.name) == categories.ELEMENTWISE or name in ("argmax", "gather"):
            return _elementwise(tensors, name)
    except (IndexError, KeyError, ValueError, TypeError):  # no shapes were recorded, or others than these
        return None
    return None


class _Tensors:
    """The tensors among an operator's arguments."""

    def __init__(self, operator: Operator):
        self._operator = operator

    def shape(self, index: int) -> Sequence[int]:
        shape = self._operator.shapes[index]
        if not shape or isinstance(shape[0], (list, tuple)):
            raise ValueError("no tensor")
        return shape

    def size(self, index: int) -> int:
        return _size_of(self._operator.dtypes[index])

    def bytes(self, index: int) -> float:
        """Of what lies in memory: a dimension with stride 0 counts once."""
        shape = self.shape(index)
        strides = self._operator.strides[index] if index < len(self._operator.strides) else ()
        if len(strides) == len(shape):
            shape = [length for length, stride in zip(shape, strides, strict=True) if stride]
        return float(prod(shape) * self.size(index))

    def indices(self) -> list[int]:
        shapes, dtypes = self._operator.shapes, self._operator.dtypes
        plain = [i for i, shape in enumerate(shapes) if shape and not isinstance(shape[0], (list, tuple))]
        return [i for i in plain if i < len(dtypes) and dtypes[i] in SIZES]


def _size_of(dtype: Any) -> int:
    if isinstance(dtype, (list, tuple)):
        dtype = dtype[0]
    return SIZES[str(dtype)]


def _product(tensors: _Tensors, left: int, right: int, batch: int) -> Amount:
    rows, inner = tensors.shape(left)[-2:]
    columns = tensors.shape(right)[-1]
    moved = tensors.bytes(left) + tensors.bytes(right) + batch * rows * columns * tensors.size(left)
    return Amount(moved, 2.0 * batch * rows * inner * columns)


def _attention(tensors: _Tensors, operator: Operator, causal: int) -> Amount:
    batch, heads, queries, width = tensors.shape(0)
    keys, values = tensors.shape(1)[2], tensors.shape(2)[3]
    given = operator.values[causal] if len(operator.values) > causal else ""
    seen = (keys + 1) / 2 if str(given) == "True" and queries == keys else float(keys)
    moved = sum(tensors.bytes(i) for i in range(3)) + batch * heads * queries * values * tensors.size(0)
    return Amount(moved, 2.0 * batch * heads * queries * seen * (width + values))


def _rows(tensors: _Tensors, name: str) -> Amount:
    """Rows of a table: each is read and written, whatever the table holds."""
    table = tensors.shape(0)
    count = prod(tensors.shape(1 if name == "embedding" else 2))
    return Amount(2.0 * count * prod(table[1:]) * tensors.size(0), 0.0)


def _elementwise(tensors: _Tensors, name: str) -> Amount:
    given = tensors.indices()
    largest = max(given, key=lambda i: prod(tensors.shape(i)))
    count = prod(tensors.shape(largest))
    out = 0 if name.strip("_") in _REDUCTIONS else count * tensors.size(given[0])
    return Amount(sum(tensors.bytes(i) for i in given) + out, float(count))
