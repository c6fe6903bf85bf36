"""What functions of torch are to a chain (`lazy.pointwise_fusion`): which node a call makes, and who else computes it.

A form takes what makes nodes and the arguments of a call, and returns None for a call that it does not take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .fusion_text import Node, Read
from .lazy_mode import LazyMode


class Maker:
    """Makes the nodes of a function's result.

    Args:
        step: which knows what is put off.
        result: of the function, on no device.
        order: its dimensions from the outermost in memory.
    """

    def __init__(self, step: LazyMode, result: Tensor, order: Sequence[int] | None = None):
        self._step, self.dtype = step, result.dtype
        self._broadcast, self._order = result.shape, range(result.dim()) if order is None else order
        self.shape = tuple(result.shape[place] for place in self._order)
        self._own: set[Node] = set()
        self.takes_in = False
        """Whether an operand was itself put off."""

    def __call__(
        self, kind: str, *operands: Any, at: torch.dtype | None = None, table: Tensor | None = None,
        joined: tuple[int, tuple[int, ...]] | None = None,
    ) -> Node:  # fmt: skip
        """Return the node of a function of tensors, numbers and other nodes; of `table` it reads what they say."""
        of = [self._operand(one) for one in operands]
        if table is not None:
            of.insert(0, Read(self._node_of(table), table.stride(), table.shape))
        self._own.add(node := Node(kind, self.dtype, self.shape, of, at, joined=joined))
        return node

    def _operand(self, operand: Any) -> Read | float:
        if isinstance(operand, Node):
            strides = torch.empty(operand.shape, device="meta").stride()
            return Read(operand, strides if operand in self._own else self._strides(operand.shape, strides))
        if not isinstance(operand, Tensor):
            return operand
        return Read(self._node_of(operand), self._strides(operand.shape, operand.stride()))

    def _node_of(self, operand: Tensor) -> Node:
        if (node := self._taken_in(operand)) is not None:
            self.takes_in = True
            return node
        self._step.settle(operand)
        return Node("leaf", operand.dtype, operand.shape, tensor=operand)

    def _strides(self, shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
        """Return the strides with which an operand is read for each number of the result, in its order."""
        own = [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
        every = [*[0] * (len(self._broadcast) - len(own)), *own]
        return tuple(every[place] for place in self._order)

    def _taken_in(self, operand: Tensor) -> Node | None:
        """Return the node of what is put off, if an operand is all of it, in any order or broadcast."""
        found = self._step.at(operand)
        if found is None or operand.dtype != found.dtype or operand.storage_offset() != 0:
            return None
        sizes = [size for size, stride in zip(operand.shape, operand.stride(), strict=True) if stride]
        if math.prod(sizes) != found.shape.numel():
            return None
        if found.link is not None:
            own: Node = found.link
            return own
        function, operands = found.function_alone or (None, ())
        if function not in FORMS:
            return None
        result = torch.empty(found.shape, dtype=found.dtype, device="meta")
        return FORMS[function](Maker(self._step, result), *operands)


Form = Callable[..., Node | None]


def _unary(kind: str) -> Form:
    return lambda make, input: None if make.dtype == torch.bool else make(kind, input)


def _arithmetic(kind: str) -> Form:
    """Return the form of a function of two numbers; of truths it would be another one."""
    return lambda make, input, other: None if make.dtype == torch.bool else make(kind, input, other)


def _comparison(kind: str) -> Form:
    return lambda make, input, other: make(kind, input, other, at=torch.result_type(input, other))


def _question(kind: str) -> Form:
    return lambda make, input: make(kind, input, at=input.dtype) if input.dtype.is_floating_point else None


def _logical(kind: str) -> Form:
    return lambda make, input, other: make(kind, input, other, at=torch.bool)


def _bits(kind: str) -> Form:
    return lambda make, input, other: make(kind, input, other)


def _bitwise_not(make: Maker, input: Tensor) -> Node:
    return make("not", input)


def _logical_not(make: Maker, input: Tensor) -> Node:
    return make("not", input, at=torch.bool)


def _reversed_sub(make: Maker, input: Tensor, other: Any) -> Node | None:
    return None if make.dtype == torch.bool else make("sub", other, input)


def _reversed_div(make: Maker, input: Tensor, other: Any) -> Node:
    return make("mul", make("div", 1.0, input), other)


def _pow(make: Maker, input: Any, exponent: Any) -> Node | None:
    if not isinstance(input, Tensor) or type(exponent) not in (int, float):
        return None
    if exponent == 2:
        return make("mul", input, input)
    if exponent == 3 and make.dtype == torch.float32:
        return make("mul", make("mul", input, input), input)
    if not input.dtype.is_floating_point or abs(exponent) not in (0.5, 1) or exponent == 1:
        return None
    return make("div", 1.0, input) if exponent == -1 else make("sqrt" if exponent > 0 else "rsqrt", input)


def _square(make: Maker, input: Tensor) -> Node | None:
    return None if make.dtype == torch.bool else make("mul", input, input)


def _of_two(kind: str) -> Form:
    """Return the form of what is something else of one tensor."""
    return lambda make, input, other: make(kind, input, other) if isinstance(other, Tensor) else None


def _clamp(make: Maker, input: Any, min: Any = None, max: Any = None) -> Node | None:
    node = input if min is None else make("maximum", input, min)
    return node if max is None else make("minimum", node, max)


def _where(make: Maker, condition: Tensor, input: Any, other: Any) -> Node:
    return make("where", condition, input, other)


def _method_where(make: Maker, input: Tensor, condition: Tensor, other: Any) -> Node:
    return make("where", condition, input, other)


def _masked_fill(make: Maker, input: Tensor, mask: Tensor, value: Any) -> Node | None:
    if isinstance(value, float) and math.isfinite(value) and make.dtype.is_floating_point:
        if abs(value) > torch.finfo(make.dtype).max:  # of which torch says that it has no place there
            return None
    return make("where", mask, value, input)


def _gelu(make: Maker, input: Tensor, *, approximate: str = "none") -> Node | None:
    kind = {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return None if kind is None else make(kind, input)


def _silu(make: Maker, input: Tensor, inplace: bool = False) -> Node | None:
    return None if inplace else make("silu", input)


def _relu(make: Maker, input: Tensor, inplace: bool = False) -> Node | None:
    return None if inplace else make("maximum", input, 0)


def same(make: Maker, input: Tensor, *_: Any, **__: Any) -> Node:
    """Casts and copies: what they are given besides says what the result is."""
    return make("same", input)


def _cat(make: Maker, tensors: Sequence[Tensor], dim: int = 0) -> Node | None:
    if any(tensor.dim() != len(make.shape) for tensor in tensors) or any(not tensor.numel() for tensor in tensors):
        return None  # a bare tensor of no number is left out by torch, whatever its shape is
    dim %= len(make.shape)
    return make("cat", *tensors, joined=(dim, tuple(tensor.shape[dim] for tensor in tensors)))


def _repeat(make: Maker, input: Tensor, *sizes: Any) -> Node | None:
    wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    repeats = zip(input.shape, wanted[len(wanted) - input.dim() :], strict=True)
    return make("same", input) if all(size == 1 or count == 1 for size, count in repeats) else None


def _looked_up(make: Maker, table: Tensor, index: Any) -> Node | None:
    """Take single numbers of a tensor, found by an index for each of its dimensions."""
    whole = isinstance(index, tuple) and len(index) == table.dim()
    if not whole or any(not isinstance(one, Tensor) or one.dtype not in (torch.int32, torch.int64) for one in index):
        return None
    return make("gather", *index, at=torch.int64, table=table)


def _embedding(make: Maker, input: Tensor, weight: Tensor, *, max_norm: float | None = None, **_: Any) -> Node | None:
    if max_norm is not None:  # which writes the table
        return None
    columns = Node("arange", torch.int64, weight.shape[1:], (0, 1))
    return make("gather", input.unsqueeze(-1), columns, at=torch.int64, table=weight)


def _constant(number: float) -> Form:
    return lambda make, *_, **__: make("full", number)


def _full(make: Maker, _: Any, fill_value: Any, **__: Any) -> Node | None:
    return make("full", fill_value) if isinstance(fill_value, (int, float)) else None


def _arange(make: Maker, *ends: Any, **_: Any) -> Node | None:
    if make.dtype != torch.int64 or any(type(end) is not int for end in ends):
        return None
    start, _end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    return make("arange", start, step)


_NAMED: dict[str, Form] = {
    **{name: _arithmetic(name) for name in ("add", "sub", "mul", "div")},
    "multiply": _arithmetic("mul"), "subtract": _arithmetic("sub"), "true_divide": _arithmetic("div"),
    "__rsub__": _reversed_sub, "__rdiv__": _reversed_div, "pow": _pow, "__pow__": _pow, "square": _square,
    **{name: _unary(name) for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf")},
    **{name: _comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}, "__eq__": _comparison("eq"),
    "isinf": _question("isinf"), "isnan": _question("isnan"),
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor")}, "logical_not": _logical_not,
    **{f"bitwise_{name}": _bits(name) for name in ("and", "or", "xor")}, "bitwise_not": _bitwise_not,
    "__and__": _bits("and"), "__or__": _bits("or"), "__xor__": _bits("xor"), "__invert__": _bitwise_not,
    "maximum": _arithmetic("maximum"), "minimum": _arithmetic("minimum"), "clamp": _clamp,
    "max": _of_two("maximum"), "min": _of_two("minimum"),
    "masked_fill": _masked_fill, "relu": _relu, "clone": same, "repeat": _repeat,
    "zeros_like": _constant(0), "ones_like": _constant(1), "full_like": _full, "full": _full, "arange": _arange,
    "new_zeros": _constant(0), "new_ones": _constant(1), "zeros": _constant(0), "ones": _constant(1),
}  # fmt: skip
"""By the names that torch and its tensors have."""
_CASTS = ("to", "type_as", "type", "float", "half", "bfloat16", "double", "int", "long", "bool", "contiguous")
NEVER = {"out", "requires_grad", "pin_memory", "copy", "non_blocking"}
"""What a call is not given that is put off."""
FORMS: dict[Any, Form] = {
    **{getattr(torch, name): form for name, form in _NAMED.items() if hasattr(torch, name)},
    **{getattr(Tensor, name): form for name, form in _NAMED.items() if hasattr(Tensor, name)},
    **{getattr(Tensor, name): same for name in _CASTS},
    torch.cat: _cat, torch.concat: _cat, torch.concatenate: _cat,
    torch.where: _where, Tensor.where: _method_where, Tensor.__getitem__: _looked_up, F.embedding: _embedding,
    F.gelu: _gelu, F.silu: _silu, F.relu: _relu,
}  # fmt: skip
CASTED = {getattr(Tensor, name) for name in _CASTS}
"""What may give the very tensor."""
WRITTEN: dict[Any, Any] = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in ("add", "sub", "mul", "div", "clamp", "masked_fill")
} | {Tensor.__iand__: Tensor.__and__, Tensor.__ior__: Tensor.__or__}
"""Functions that write their first argument, and those that compute what they write."""


def _copied(source: Tensor, *_: Any, out: Tensor, **__: Any) -> None:
    out.copy_(source)


def _rows(input: Tensor, weight: Tensor, *_: Any, out: Tensor, **__: Any) -> None:
    torch.index_select(weight, 0, input.reshape(-1), out=out.view(-1, weight.shape[1]))


def _zeros(*_: Any, out: Tensor, **__: Any) -> None:
    out.zero_()


def _ones(*_: Any, out: Tensor, **__: Any) -> None:
    out.fill_(1)


def _filled(_: Any, fill_value: float, *, out: Tensor, **__: Any) -> None:
    out.fill_(fill_value)


_PLAIN = (
    "add sub mul div multiply pow square neg abs exp log sqrt rsqrt sigmoid tanh erf eq ne lt le gt ge clamp maximum "
    "minimum logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not"
)
OUT: dict[Any, Callable[..., object]] = {
    **{getattr(owner, name): getattr(torch, name) for owner in (torch, Tensor) for name in _PLAIN.split()},
    Tensor.__and__: torch.bitwise_and, Tensor.__or__: torch.bitwise_or, Tensor.__invert__: torch.bitwise_not,
    Tensor.__eq__: torch.eq, torch.where: torch.where, torch.arange: torch.arange,
    torch.zeros: _zeros, torch.zeros_like: _zeros, Tensor.new_zeros: _zeros, torch.ones: _ones,
    torch.ones_like: _ones, Tensor.new_ones: _ones, torch.full: _filled, torch.full_like: _filled,
    F.embedding: _rows, Tensor.__pow__: torch.pow, F.gelu: torch._C._nn.gelu, F.silu: torch._C._nn.silu,
    torch.clone: _copied, Tensor.clone: _copied, **{getattr(Tensor, name): _copied for name in _CASTS},
}  # fmt: skip
"""What writes into `out` what a function gives, with a kernel of torch's own."""
