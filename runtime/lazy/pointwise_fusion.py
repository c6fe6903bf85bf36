"""Chains of pointwise functions in what is captured: put off, and computed in one kernel each (`lazy.fusion_text`).

    s = (x.float() * y).tanh()      z = where(m, s.half(), 0)      two results, one kernel, where both are read

What torch's functions give (`fusion_forms`), in a step of small tensors alone, is put off (`lazy_mode`) as an
expression of the tensors that they read. A function of something put off takes in its expression, if it reads all of
it: in its order, permuted, or broadcast. Whatever else reads it gets it computed first, and with it those results on
the way that are still held, unless they are large; so does whatever may write what it is computed from. A function in
place gives what is put off another expression; what had taken in the one before keeps that.

A function alone is torch's own, at the time when it is read, unless kernels may begin before the one ahead has ended:
ours lets the next begin, which matters where it is small. Where what it reads lies in another order, ours is used too.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import backend, output_layout
from ..launching.launch import overlaps, pretends
from .fusion_forms import CASTED, FORMS, NEVER, OUT, WRITTEN, Form, Maker, same
from .fusion_text import LARGE, TYPES, Node, Read, is_turned, launch_chain
from .lazy_mode import Deferred, LazyMode, is_slice, tensors_of

if TYPE_CHECKING:
    from .step_products import StepProducts

CASES = """
def chained(function, *given):
    step = LazyMode()
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
    step: LazyMode
    single: Callable[[Tensor], object] | None = None
    """Where it is one function of torch: writes what that gives."""

    @property
    def link(self) -> Node:
        """What another chain takes in."""
        return self.node

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


def _on_the_way(step: LazyMode, node: Node) -> list[tuple[Node, Tensor]]:
    """Return what the same kernel writes besides: results of the same size that a node takes in, and that are held."""
    size = math.prod(node.shape)
    if size > LARGE:  # to compute it again, if anything reads it, costs no more than to write it now
        return []
    found = step.take_out(
        lambda other: isinstance(other, Chain) and other.node in node.nodes and other.shape.numel() == size
    )
    return [(other.node, place) for other, place in found if isinstance(other, Chain)]


def where_it_runs(args: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    """Return a tensor of the device on which a call's kernel would run, None where it is not to be put off."""
    values = (*args, *named.values())
    tensors = [*tensors_of(values)]
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
def _signature(form: Form) -> inspect.Signature:
    return inspect.signature(form)


def _node(make: Maker, form: Form, args: Sequence[Any], named: Mapping[str, Any]) -> Node | None:
    """Return the node of a call, None for one that its form does not take."""
    try:
        _signature(form).bind(make, *args, **named)
    except TypeError:  # arguments that it knows nothing of
        return None
    node = form(make, *args, **named)
    fits = node is not None and node.functions <= MOST_FUNCTIONS and len(node.leaves) <= MOST_TENSORS
    return node if fits else None


def _put_off(func: Callable[..., Any], form: Form, step: LazyMode, *args: Any, **named: Any) -> Tensor | None:
    """Return what stands for a function's result, None where torch is to compute it."""
    like = None if not NEVER.isdisjoint(named) else where_it_runs(args, named)
    result = None if like is None else _result(func, args, named, step.largest)
    if like is None or result is None:
        return None
    if output_layout.is_free() and not result.is_contiguous():
        result = torch.empty(result.shape, dtype=result.dtype, device="meta")
    order, strides = [*range(result.dim())], result.stride()
    if not result.is_contiguous():
        order.sort(key=lambda place: -strides[place])
    if not result.permute(order).is_contiguous():
        return None
    if func in CASTED:
        if any(isinstance(one, bool) for one in args):
            return None
        if result.dtype == args[0].dtype and (func is not Tensor.contiguous or args[0].is_contiguous()):
            return args[0]
    make = Maker(step, result, order)
    node = _node(make, form, args, named)
    if node is None:
        return None
    single = None if make.takes_in or func not in OUT else _single(OUT[func], args, named, result)
    place = step.put_off(Chain(node, step, single), node.shape, like, result.dtype)
    return place if result.is_contiguous() else place.permute([order.index(number) for number in range(len(order))])


def in_order(step: LazyMode, tensor: Tensor) -> Tensor | None:
    """Return a copy that lies in order, by a kernel that reads in the order of memory; None where there is none."""
    if tensor.is_contiguous():
        return None
    copied = _put_off(Tensor.contiguous, same, step, tensor)
    if copied is not None:
        step.settle(copied)
    return copied


def hides_nothing(step: LazyMode, mask: Tensor) -> bool:
    """Return whether a mask is put off, and true or zero everywhere."""
    found = step.at(mask)
    return (
        isinstance(found, Chain) and found.node.kind == "full" and bool(found.node.of[0]) == (mask.dtype == torch.bool)
    )


def computed_once(step: StepProducts, tensor: Tensor) -> Tensor:
    """Return a tensor with the numbers of one that is only read: what all layers make is computed for the first.

    As T5's layers join the mask with the bias of positions that the first of them has made.
    """
    found = step.of(tensor)
    if not isinstance(found, Chain):
        return tensor

    def compute() -> Tensor:
        step.settle(tensor)
        return tensor

    return step.once(found.node.key, found.reads, compute).view(tensor.shape)


def uncopied(step: LazyMode, tensor: Tensor) -> Tensor:
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
    func: Callable[..., Any], form: Form, step: LazyMode, target: Tensor, *args: Any, **named: Any
) -> Tensor | None:
    """Take a function that writes its first argument, where that is put off; `func` is the one that only computes."""
    found = step.at(target)
    if not isinstance(found, Chain) or not NEVER.isdisjoint(named) or where_it_runs((target, *args), named) is None:
        return None
    whole = target.is_contiguous() and target.storage_offset() == 0 and target.dtype == found.dtype
    result = _result(func, (target, *args), named, step.largest)
    if not whole or target.numel() != found.shape.numel() or step.is_read(target) or result is None:
        return None
    if result.shape != target.shape or not torch.can_cast(result.dtype, target.dtype):
        return None
    node = _node(Maker(step, result), form, (target, *args), named)
    if node is None:
        return None
    if node.dtype != target.dtype:
        node = Node("same", target.dtype, node.shape, [Read(node, torch.empty(node.shape, device="meta").stride())])
    step.replace(target, Chain(node, step))
    return target


def _set(step: LazyMode, target: Tensor, index: Any, value: Any) -> Tensor | None:
    """Do nothing where a part of a tensor is set to itself, as behind `x[1:] += y`."""
    if not isinstance(value, Tensor) or not is_slice(index):
        return None
    part = target[index]
    at = (part.untyped_storage()._cdata, part.storage_offset(), part.shape, part.stride(), part.dtype)
    itself = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
    return value if at == itself else None


FUNCTIONS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    **{func: functools.partial(_put_off, func, form) for func, form in FORMS.items()},
    **{func: functools.partial(_write, computes, FORMS[computes]) for func, computes in WRITTEN.items()},
    Tensor.__setitem__: _set,
}
"""What may be put off, by functions of torch: given the step and the arguments, None for what they do not take."""
