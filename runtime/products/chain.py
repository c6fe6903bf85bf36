"""Chains of pointwise functions of a decode step: put off, and computed in one kernel each (`products.chain_text`).

    s = (x.float() * y).tanh()      z = where(m, s.half(), 0)      two results, one kernel, where both are read

What torch's functions give of small tensors is put off (`step_products`) as an expression of the tensors that they
read. A function of something put off takes in its expression, if it reads all of it: in its order, permuted, or
broadcast. Whatever else reads it gets it computed first, and with it those results on the way that are still held; so
does whatever may write what it is computed from. A function in place gives what is put off another expression; what
had taken in the one before keeps that.

A function alone is torch's own, at the time when it is read, unless kernels may begin before the one ahead has ended:
ours lets the next begin, which matters where it is small. Where what it reads lies in another order, ours is used too.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend, layout
from ..core.launch import overlaps, pretends
from .chain_text import LARGE, TYPES, Node, Read, is_turned, launch_chain
from .put_off import Deferred, PutsOff, is_slice

CASES = """
def chained(function, *given):
    step = PutsOff()
    step.chains = FUNCTIONS
    with step:
        return function(*given)

def correction(activated, predictions, coefs):
    scaled = (activated - predictions[0]).repeat(4, 1, 1, 1) * (coefs + 1.0).permute(2, 0, 1).unsqueeze(-1)
    scaled += predictions
    return scaled

def bucket(position, slots):
    far = -torch.minimum(torch.arange(slots, device=position.device) - position, torch.zeros_like(position))
    large = 16 + (torch.log(far.float() / 16) / 2.0794415 * 16).to(torch.long)
    return torch.where(far < 16, far, torch.minimum(large, torch.full_like(far, 31)))

def modalities(routed):
    return torch.tanh(routed.float()).type_as(routed)

def every(x, y):
    for function in (torch.exp, torch.log, torch.tanh, torch.erf, torch.rsqrt, torch.sigmoid, torch.sqrt, torch.abs):
        x = function(x) / y - 0.3
    for function in (nn.functional.silu, nn.functional.gelu, nn.GELU("tanh"), nn.functional.relu):
        x = function(x.clamp(min=-3)).double() * y
    x = torch.sigmoid(torch.sqrt(x / y.double()) * y.bool()) ** -1 + (y.float() ** -1 / 3.0) - (1.0 - y) / 7
    return torch.where(x.isnan() | ~(x > y), x.to(y.dtype), float("inf"))

def mask(position, padding):
    slots = torch.arange(padding.shape[1], device=padding.device)
    return (slots <= position) & padding.bool()[torch.zeros_like(slots), slots]

case("every function", chained, every, tensor(1, 64), tensor(64))
case("a mask", chained, mask, int64(1), int64(1, 512))
case("Gemma 3n, correction", chained, correction, tensor(1, 1, 2048), tensor(4, 1, 1, 2048), tensor(1, 1, 4))
case("Gemma 3n, modalities", chained, modalities, tensor(1, 1, 4))
case("T5, bucket", chained, bucket, int64(1), 1024)
case("GELU, product", chained, lambda x, y: nn.functional.gelu(x) * y, tensor(4, 2, 256), tensor(4, 2, 256))
"""

MOST_FUNCTIONS = 48
"""Of one kernel."""
MOST_TENSORS = 24
_INDEX_LIMIT = 1 << 31


@dataclass(eq=False)
class Chain(Deferred):
    """What functions of numbers give, one after the other."""

    node: Node
    step: PutsOff
    single: Callable[[Tensor], object] | None = None
    """Where it is one function of torch: writes what that gives."""

    @property
    def reads(self) -> Sequence[Tensor]:
        """The tensors at the beginning of the chain."""
        return self.node.leaves

    def compute(self, out: Tensor) -> None:
        """Run the kernel, or the function itself where there is no other."""
        if self.single is not None and not (is_turned(self.node) if out.numel() > LARGE else overlaps(out)):
            self.single(out)
            return
        launch_chain([(self.node, out), *_on_the_way(self.step, self.node)])


def _on_the_way(step: PutsOff, node: Node) -> list[tuple[Node, Tensor]]:
    """Return what the same kernel writes besides: results of the same size that a node takes in, and that are held."""
    size = math.prod(node.shape)
    if size > LARGE:  # to compute it again, if anything reads it, costs no more than to write it now
        return []
    found = step.take_out(
        lambda other: isinstance(other, Chain) and other.node in node.nodes and other.shape.numel() == size
    )
    return [(other.node, place) for other, place in found if isinstance(other, Chain)]


class _Maker:
    """Makes the nodes of a function's result.

    Args:
        step: which knows what is put off.
        result: of the function, on no device.
        order: its dimensions from the outermost in memory.
    """

    def __init__(self, step: PutsOff, result: Tensor, order: Sequence[int] | None = None):
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
        if isinstance(found, Chain):
            return found.node
        function, operands = found.function_alone or (None, ())
        if function not in _FORMS:
            return None
        result = torch.empty(found.shape, dtype=found.dtype, device="meta")
        return _FORMS[function](_Maker(self._step, result), *operands)


_Form = Callable[..., Node | None]
"""Takes what makes nodes and a call's arguments; None for a call that it does not take."""


def _unary(kind: str) -> _Form:
    return lambda make, input: None if make.dtype == torch.bool else make(kind, input)


def _arithmetic(kind: str) -> _Form:
    """Return the form of a function of two numbers; of truths it would be another one."""
    return lambda make, input, other: None if make.dtype == torch.bool else make(kind, input, other)


def _comparison(kind: str) -> _Form:
    return lambda make, input, other: make(kind, input, other, at=torch.result_type(input, other))


def _question(kind: str) -> _Form:
    return lambda make, input: make(kind, input, at=input.dtype) if input.dtype.is_floating_point else None


def _logical(kind: str) -> _Form:
    return lambda make, input, other: make(kind, input, other, at=torch.bool)


def _bits(kind: str) -> _Form:
    return lambda make, input, other: make(kind, input, other)


def _bitwise_not(make: _Maker, input: Tensor) -> Node:
    return make("not", input)


def _logical_not(make: _Maker, input: Tensor) -> Node:
    return make("not", input, at=torch.bool)


def _reversed_sub(make: _Maker, input: Tensor, other: Any) -> Node | None:
    return None if make.dtype == torch.bool else make("sub", other, input)


def _reversed_div(make: _Maker, input: Tensor, other: Any) -> Node:
    return make("mul", make("div", 1.0, input), other)


def _pow(make: _Maker, input: Any, exponent: Any) -> Node | None:
    if not isinstance(input, Tensor) or type(exponent) not in (int, float):
        return None
    if exponent == 2:
        return make("mul", input, input)
    if exponent == 3 and make.dtype == torch.float32:
        return make("mul", make("mul", input, input), input)
    if not input.dtype.is_floating_point or abs(exponent) not in (0.5, 1) or exponent == 1:
        return None
    return make("div", 1.0, input) if exponent == -1 else make("sqrt" if exponent > 0 else "rsqrt", input)


def _square(make: _Maker, input: Tensor) -> Node | None:
    return None if make.dtype == torch.bool else make("mul", input, input)


def _of_two(kind: str) -> _Form:
    """Return the form of what is something else of one tensor."""
    return lambda make, input, other: make(kind, input, other) if isinstance(other, Tensor) else None


def _clamp(make: _Maker, input: Any, min: Any = None, max: Any = None) -> Node | None:
    node = input if min is None else make("maximum", input, min)
    return node if max is None else make("minimum", node, max)


def _where(make: _Maker, condition: Tensor, input: Any, other: Any) -> Node:
    return make("where", condition, input, other)


def _method_where(make: _Maker, input: Tensor, condition: Tensor, other: Any) -> Node:
    return make("where", condition, input, other)


def _masked_fill(make: _Maker, input: Tensor, mask: Tensor, value: Any) -> Node | None:
    if isinstance(value, float) and math.isfinite(value) and make.dtype.is_floating_point:
        if abs(value) > torch.finfo(make.dtype).max:  # of which torch says that it has no place there
            return None
    return make("where", mask, value, input)


def _gelu(make: _Maker, input: Tensor, *, approximate: str = "none") -> Node | None:
    kind = {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return None if kind is None else make(kind, input)


def _silu(make: _Maker, input: Tensor, inplace: bool = False) -> Node | None:
    return None if inplace else make("silu", input)


def _relu(make: _Maker, input: Tensor, inplace: bool = False) -> Node | None:
    return None if inplace else make("maximum", input, 0)


def _same(make: _Maker, input: Tensor, *_: Any, **__: Any) -> Node:
    """Casts and copies: what they are given besides says what the result is."""
    return make("same", input)


def _cat(make: _Maker, tensors: Sequence[Tensor], dim: int = 0) -> Node | None:
    if any(tensor.dim() != len(make.shape) for tensor in tensors) or any(not tensor.numel() for tensor in tensors):
        return None  # a bare tensor of no number is left out by torch, whatever its shape is
    dim %= len(make.shape)
    return make("cat", *tensors, joined=(dim, tuple(tensor.shape[dim] for tensor in tensors)))


def _repeat(make: _Maker, input: Tensor, *sizes: Any) -> Node | None:
    wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    repeats = zip(input.shape, wanted[len(wanted) - input.dim() :], strict=True)
    return make("same", input) if all(size == 1 or count == 1 for size, count in repeats) else None


def _looked_up(make: _Maker, table: Tensor, index: Any) -> Node | None:
    """Take single numbers of a tensor, found by an index for each of its dimensions."""
    whole = isinstance(index, tuple) and len(index) == table.dim()
    if not whole or any(not isinstance(one, Tensor) or one.dtype not in (torch.int32, torch.int64) for one in index):
        return None
    return make("gather", *index, at=torch.int64, table=table)


def _embedding(make: _Maker, input: Tensor, weight: Tensor, *, max_norm: float | None = None, **_: Any) -> Node | None:
    if max_norm is not None:  # which writes the table
        return None
    columns = Node("arange", torch.int64, weight.shape[1:], (0, 1))
    return make("gather", input.unsqueeze(-1), columns, at=torch.int64, table=weight)


def _constant(number: float) -> _Form:
    return lambda make, *_, **__: make("full", number)


def _full(make: _Maker, _: Any, fill_value: Any, **__: Any) -> Node | None:
    return make("full", fill_value) if isinstance(fill_value, (int, float)) else None


def _arange(make: _Maker, *ends: Any, **_: Any) -> Node | None:
    if make.dtype != torch.int64 or any(type(end) is not int for end in ends):
        return None
    start, _end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    return make("arange", start, step)


_NAMED: dict[str, _Form] = {
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
    "masked_fill": _masked_fill, "relu": _relu, "clone": _same, "repeat": _repeat,
    "zeros_like": _constant(0), "ones_like": _constant(1), "full_like": _full, "full": _full, "arange": _arange,
    "new_zeros": _constant(0), "new_ones": _constant(1), "zeros": _constant(0), "ones": _constant(1),
}  # fmt: skip
"""By the names that torch and its tensors have."""
_CASTS = ("to", "type_as", "type", "float", "half", "bfloat16", "double", "int", "long", "bool", "contiguous")
_NEVER = {"out", "requires_grad", "pin_memory", "copy", "non_blocking"}
"""What a call is not given that is put off."""
_FORMS: dict[Any, _Form] = {
    **{getattr(torch, name): form for name, form in _NAMED.items() if hasattr(torch, name)},
    **{getattr(Tensor, name): form for name, form in _NAMED.items() if hasattr(Tensor, name)},
    **{getattr(Tensor, name): _same for name in _CASTS},
    torch.cat: _cat, torch.concat: _cat, torch.concatenate: _cat,
    torch.where: _where, Tensor.where: _method_where, Tensor.__getitem__: _looked_up, F.embedding: _embedding,
    F.gelu: _gelu, F.silu: _silu, F.relu: _relu,
}  # fmt: skip
_CASTED = {getattr(Tensor, name) for name in _CASTS}
"""What may give the very tensor."""
_WRITTEN: dict[Any, Any] = {
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
_OUT: dict[Any, Callable[..., object]] = {
    **{getattr(owner, name): getattr(torch, name) for owner in (torch, Tensor) for name in _PLAIN.split()},
    Tensor.__and__: torch.bitwise_and, Tensor.__or__: torch.bitwise_or, Tensor.__invert__: torch.bitwise_not,
    Tensor.__eq__: torch.eq, torch.where: torch.where, torch.arange: torch.arange,
    torch.zeros: _zeros, torch.zeros_like: _zeros, Tensor.new_zeros: _zeros, torch.ones: _ones,
    torch.ones_like: _ones, Tensor.new_ones: _ones, torch.full: _filled, torch.full_like: _filled,
    F.embedding: _rows, Tensor.__pow__: torch.pow, F.gelu: torch._C._nn.gelu, F.silu: torch._C._nn.silu,
    torch.clone: _copied, Tensor.clone: _copied, **{getattr(Tensor, name): _copied for name in _CASTS},
}  # fmt: skip
"""What writes into `out` what a function gives, with a kernel of torch's own."""


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, (list, tuple)):
            yield from _tensors(one)
        elif isinstance(one, Tensor):
            yield one


def _where_it_runs(args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """Return a tensor of the device on which a call's kernel would run, None where it is not to be put off."""
    values = (*args, *named.values())
    tensors = [*_tensors(values)]
    devices = [torch.empty(0, device=one) for one in values if isinstance(one, torch.device)]
    like = next((tensor for tensor in tensors or devices if type(tensor) is Tensor), None)
    if like is None or not (like.is_cuda or pretends() or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    if not backend.nothing_watches(like) or not backend.uses_triton(like):
        return None
    same = all(tensor.device == like.device for tensor in (*tensors, *devices))
    return like if same and all(map(_is_plain, tensors)) and not backend.wants_gradient(like, *tensors) else None


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a kernel may read a tensor as it lies in memory, by an index of 32 bits."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_neg():
        return False
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.dtype in TYPES and 0 <= extent < _INDEX_LIMIT


def _result(func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any], largest: int) -> Tensor | None:
    """Return what a function of torch gives, without its numbers; None where that is nothing to put off."""
    try:
        result = func(*map(_numberless, args), **{name: _numberless(value) for name, value in named.items()})
    except (RuntimeError, TypeError, ValueError, IndexError):  # torch's own call says what is wrong
        return None
    small = isinstance(result, Tensor) and result.is_meta and 0 < result.numel() <= largest
    return result if small and result.dtype in TYPES else None


def _numberless(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return type(value)(map(_numberless, value)) if type(value) in (list, tuple) else value


@functools.cache
def _signature(form: _Form) -> inspect.Signature:
    return inspect.signature(form)


def _node(make: _Maker, form: _Form, args: Sequence[Any], named: Mapping[str, Any]) -> Node | None:
    """Return the node of a call, None for one that its form does not take."""
    try:
        _signature(form).bind(make, *args, **named)
    except TypeError:  # arguments that it knows nothing of
        return None
    node = form(make, *args, **named)
    fits = node is not None and node.functions <= MOST_FUNCTIONS and len(node.leaves) <= MOST_TENSORS
    return node if fits else None


def _put_off(func: Callable[..., Any], form: _Form, step: PutsOff, *args: Any, **named: Any) -> Tensor | None:
    """Return what stands for a function's result, None where torch is to compute it."""
    like = None if not _NEVER.isdisjoint(named) else _where_it_runs(args, named)
    result = None if like is None else _result(func, args, named, step.largest)
    if like is None or result is None:
        return None
    if layout.is_free() and not result.is_contiguous():
        result = torch.empty(result.shape, dtype=result.dtype, device="meta")
    order, strides = [*range(result.dim())], result.stride()
    if not result.is_contiguous():
        order.sort(key=lambda place: -strides[place])
    if not result.permute(order).is_contiguous():
        return None
    if func in _CASTED:
        if any(isinstance(one, bool) for one in args):
            return None
        if result.dtype == args[0].dtype and (func is not Tensor.contiguous or args[0].is_contiguous()):
            return args[0]
    make = _Maker(step, result, order)
    node = _node(make, form, args, named)
    if node is None:
        return None
    single = None if make.takes_in or func not in _OUT else _single(_OUT[func], args, named, result)
    place = step.put_off(Chain(node, step, single), node.shape, like, result.dtype)
    return place if result.is_contiguous() else place.permute([order.index(number) for number in range(len(order))])


def in_order(step: PutsOff, tensor: Tensor) -> Tensor | None:
    """Return a copy that lies in order, by a kernel that reads in the order of memory; None where there is none."""
    if tensor.is_contiguous():
        return None
    copied = _put_off(Tensor.contiguous, _same, step, tensor)
    if copied is not None:
        step.settle(copied)
    return copied


def hides_nothing(step: PutsOff, mask: Tensor) -> bool:
    """Return whether a mask is put off, and true or zero everywhere."""
    found = step.at(mask)
    return (
        isinstance(found, Chain) and found.node.kind == "full" and bool(found.node.of[0]) == (mask.dtype == torch.bool)
    )


def uncopied(step: PutsOff, tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor that is to be a copy of others, where they lie; else the tensor itself.

    Kernels of attention read rows of heads wherever they begin, at multiples of 16 bytes.
    """
    found = step.of(tensor)
    if not isinstance(found, Chain) or found.node.kind != "same" or found.node.shape != tuple(tensor.shape):
        return tensor
    read = found.node.of[0]
    if not isinstance(read, Read) or read.node.dtype != tensor.dtype or read.strides[-1:] != (1,):
        return tensor
    own = zip(tensor.shape, read.strides, tensor.stride(), strict=True)
    strides = [place if size == 1 else stride for size, stride, place in own]
    source = read.node.tensor
    start = 0 if source is None else source.storage_offset()
    if any(number * tensor.element_size() % 16 for number in (start, *strides[:-1])) or not all(strides):
        return tensor
    if source is None:
        source = step.put_off(Chain(read.node, step), read.node.shape, tensor)
        step.settle(source)
    return source.as_strided(tensor.shape, strides, start)


def _single(
    function: Callable[..., object], args: Sequence[Any], named: Mapping[str, Any], result: Tensor
) -> Callable[[Tensor], object] | None:
    """Return what writes the result of a function of torch, None where that has no such form."""
    try:
        function(*map(_numberless, args), **{name: _numberless(value) for name, value in named.items()}, out=result)
    except (RuntimeError, TypeError):
        return None
    return lambda out: function(*args, **named, out=out.as_strided(result.shape, result.stride()))


def _write(
    func: Callable[..., Any], form: _Form, step: PutsOff, target: Tensor, *args: Any, **named: Any
) -> Tensor | None:
    """Take a function that writes its first argument, where that is put off; `func` is the one that only computes."""
    found = step.at(target)
    if not isinstance(found, Chain) or not _NEVER.isdisjoint(named) or _where_it_runs((target, *args), named) is None:
        return None
    whole = target.is_contiguous() and target.storage_offset() == 0 and target.dtype == found.dtype
    result = _result(func, (target, *args), named, step.largest)
    if not whole or target.numel() != found.shape.numel() or step.is_read(target) or result is None:
        return None
    if result.shape != target.shape or not torch.can_cast(result.dtype, target.dtype):
        return None
    node = _node(_Maker(step, result), form, (target, *args), named)
    if node is None:
        return None
    if node.dtype != target.dtype:
        node = Node("same", target.dtype, node.shape, [Read(node, torch.empty(node.shape, device="meta").stride())])
    step.replace(target, Chain(node, step))
    return target


def _set(step: PutsOff, target: Tensor, index: Any, value: Any) -> Tensor | None:
    """Do nothing where a part of a tensor is set to itself, as behind `x[1:] += y`."""
    if not isinstance(value, Tensor) or not is_slice(index):
        return None
    part = target[index]
    at = (part.untyped_storage()._cdata, part.storage_offset(), part.shape, part.stride(), part.dtype)
    itself = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
    return value if at == itself else None


FUNCTIONS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    **{func: functools.partial(_put_off, func, form) for func, form in _FORMS.items()},
    **{func: functools.partial(_write, computes, _FORMS[computes]) for func, computes in _WRITTEN.items()},
    Tensor.__setitem__: _set,
}
"""What may be put off, by functions of torch: given the step and the arguments, None for what they do not take."""
