"""Products of a decode step that no rule has rewritten: other forms of layers, another library's, of other files.

A step is captured once, so that looking at every call costs nothing later. Norms and products of few rows are put off
(`pending_ops`) until something reads them: a product that reads a norm computes it, and an activation, a bias or a
residual that follows a product is its last stage. What may put off, and what that is, is `lazy_mode`'s; a step that
reads what nobody computed shows in `Validator.prove`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..device.row_tiles import KERNEL_DTYPES
from ..linear import joined_storage
from ..linear.conv1d_weight import takes_transposed
from ..linear.linear import is_one_row, takes_few_rows, takes_product
from ..linear.prologue import LayerNormPrologue, Norm, shift_of
from ..norms.norm_form import Prologue
from .lazy_mode import Deferred, Handlers, Instead, LazyMode, key_of, tensors_of
from .multi_gemv import MOST, alike, is_same, is_same_norm, launch_beside
from .pending_ops import POINTS, Normed, Pointwise, Product, activation_of

_POINTWISE: dict[Any, Callable[..., Any]] = {
    torch.Tensor.add: torch.add, torch.add: torch.add,
    torch.Tensor.sub: torch.sub, torch.sub: torch.sub,
    torch.Tensor.mul: torch.mul, torch.mul: torch.mul,
    torch.Tensor.div: torch.div, torch.div: torch.div,
    torch.Tensor.pow: torch.pow, torch.pow: torch.pow,
    torch.Tensor.neg: torch.neg, torch.neg: torch.neg,
    torch.Tensor.exp: torch.exp, torch.exp: torch.exp,
    torch.Tensor.erf: torch.erf, torch.erf: torch.erf,
    torch.Tensor.tanh: torch.tanh, torch.tanh: torch.tanh,
    torch.Tensor.sigmoid: torch.sigmoid, torch.sigmoid: torch.sigmoid,
}  # fmt: skip
"""Functions of numbers, by what is called: those with an argument `out`."""
_ACTIVATIONS = {
    F.relu, torch.relu, torch.Tensor.relu, F.gelu, F.silu, torch.square, torch.Tensor.square,
}  # fmt: skip
"""Functions of one tensor, put off where a product has them."""
_MATMULS = {torch.Tensor.matmul, torch.matmul}
_SUMS = {torch.Tensor.add, torch.add}


MOST_CENTRED = 8
"""Rows of a weight for each of its columns, at most, whose product computes a LayerNorm: each of its programs reads
the row twice, gain and shift. GPT-2 large's head, of 39, took 106 µs with it and 63 behind it (H100, Triton 3.6)."""


class StepProducts(LazyMode):
    """Takes products of few rows at the speed of memory, with what is before and after them, whoever calls them.

    Args:
        instead: by functions of torch, what to call first; it returns None where torch's is to run.
        handlers: by functions of torch that are called with tensors and values, what may put off more than products.
        poisons: fill what is put off with NaN, so that it shows where it is read and not computed.
        residuals: which norms of a step had a kernel of their own in runs before, as they are read by more than
            products; this run adds its own.
    """

    of_step = True

    def __init__(
        self,
        instead: Instead | None = None,
        handlers: Handlers | None = None,
        *,
        poisons: bool = False,
        residuals: set[int] | None = None,
    ) -> None:
        super().__init__(instead, handlers, poisons=poisons)
        self._residuals: set[int] = set() if residuals is None else residuals
        self._norms = 0
        self._once: dict[Hashable, tuple[list[Tensor], Tensor]] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compute what the model still holds."""
        super().__exit__(kind, error, trace)
        self._once.clear()

    def _holds(self) -> bool:
        return bool(self._deferred or self._once)

    def _settle(self, *arguments: Any) -> None:
        keys = {key_of(tensor) for tensor in tensors_of(arguments)}
        self._once = {at: kept for at, kept in self._once.items() if keys.isdisjoint(map(key_of, (*kept[0], kept[1])))}
        super()._settle(*arguments)

    def _taken(self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]) -> Any:
        """Return what stands for the result of a call that is put off, None for any other."""
        if func is F.linear:
            return self._product(*args, **given)
        if func in _MATMULS and len(args) == 2 and not given:
            return self._matmul(*args)
        if func is torch.addmm and len(args) == 3 and not given:
            return self._turned(*args)
        if func is F.layer_norm:
            return self._layer_norm(*args, **given)
        if not self._deferred or func is F.dropout:
            return super()._taken(func, args, given)
        if func is torch.Tensor.to and len(args) == 2 and not given and self.of(args[0]) is not None:
            return args[0] if args[1] is args[0].dtype else None
        if func in _POINTWISE or func in _ACTIVATIONS:
            taken = self._pointwise(func, args, given)
            return self._sum(*args) if taken is None and func in _SUMS and len(args) == 2 and not given else taken
        return None

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor | None:
        if len(normalized_shape) != 1 or tuple(input.shape[-1:]) != tuple(normalized_shape):
            return None
        return self._norm(input, LayerNormPrologue(weight, bias, eps))

    def rms_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off an RMSNorm of one row."""
        with torch._C.DisableTorchFunction():  # what is asked here is no call of the model's
            return self._norm(input, Prologue(*prologue))

    def layer_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off a LayerNorm of one row."""
        with torch._C.DisableTorchFunction():
            return self._norm(input, LayerNormPrologue(*prologue))

    def sum(self, first: Tensor, second: Tensor) -> Tensor | None:
        """Put off the sum of a product and of something of its shape."""
        with torch._C.DisableTorchFunction():
            return self._sum(first, second)

    def normed(self, tensor: Tensor) -> tuple[Tensor, Norm] | None:
        """Return what a norm that was put off is computed from."""
        with torch._C.DisableTorchFunction():
            found = self.of(tensor)
            bare = isinstance(found, Normed) and found.residual is None
            return (found.input, found.prologue) if bare else None  # type: ignore[union-attr]

    def product(self, input: Tensor, *product: Any) -> Tensor | None:
        """Put off a product that knows its norm, or has none of its own."""
        weight, bias, prologue = product
        with torch._C.DisableTorchFunction():
            if prologue is None:
                return self._product(input, weight, bias)
            if not input.is_contiguous() or not takes_product(input, weight, bias):
                return None
            self._settle_each(input, weight, bias)
            return self.put_off(Product(input, weight, bias, prologue), (*input.shape[:-1], weight.shape[0]), input)

    def _norm(self, input: Tensor, prologue: Norm) -> Tensor | None:
        given = [p for p in (prologue.weight, shift_of(prologue)) if p is not None]
        fits = all(p.shape == input.shape[-1:] and p.dtype == input.dtype and p.is_contiguous() for p in given)
        if not fits or not is_one_row(input) or not takes_few_rows(input) or not input.is_contiguous():
            return None
        self._settle_each(input, *given)
        self._norms += 1
        return self.put_off(Normed(input, prologue, number=self._norms), input.shape, input)

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if not input.is_contiguous() or not takes_product(input, weight, bias):
            return None
        product = Product(*self._before(input, weight, bias, (Prologue, LayerNormPrologue)))
        return self.put_off(product, (*input.shape[:-1], weight.shape[0]), input)

    def _matmul(self, input: Tensor, weight: Tensor) -> Tensor | None:
        """Put off a product with a weight that is written as `x @ W.T`."""
        if weight.dim() != 2 or weight.is_contiguous():
            return None
        if type(weight._base) is not nn.Parameter:
            return None  # what a step computes is not there before it, when kernels begin to load weights
        return self._product(input, weight.T)

    def _before(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, norms: tuple[type, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None, Norm | None]:
        """Return the first fields of a product: it computes the norm before it, if that is one of `norms`."""
        self._settle_each(weight, bias)
        before = self.of(input)
        if isinstance(before, Normed) and before.residual is None and isinstance(before.prologue, norms):
            centred = isinstance(before.prologue, LayerNormPrologue)
            many = centred and weight.shape[0] > MOST_CENTRED * input.shape[-1]
            if before.input.shape[-1] == input.shape[-1] and not many:
                return before.input, weight, bias, before.prologue
        self.settle(input)
        return input, weight, bias, None

    def _turned(self, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor | None:
        if input.is_contiguous():
            if (
                type(weight) is nn.Parameter
                and weight.dim() == 2
                and takes_few_rows(input)
                and joined_storage.turn(weight)
            ):
                return self._product(input, weight.t(), bias)
            if takes_transposed(input, weight, bias):
                product = Product(*self._before(input, weight, bias, (LayerNormPrologue,)), transposed=True)
                return self.put_off(product, (*input.shape[:-1], weight.shape[1]), input)
        return None

    def _pointwise(self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]) -> Tensor | None:
        """Put off a function of a product and of numbers."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        products = [_bare(self.of(a)) for a in tensors]
        plain = all(isinstance(a, (Tensor, int, float)) for a in args) and (not given or func in _ACTIVATIONS)
        if not plain or not tensors or any(a.shape != tensors[0].shape for a in tensors):
            return None
        of = products[0]
        if of is None or any(product is not of for product in products):
            return None
        at = [_values(self.of(a)) if isinstance(a, Tensor) else a for a in args]
        result = Pointwise(of, func(*at, **given), _POINTWISE.get(func, func), tuple(args), self.settle)
        if func in _ACTIVATIONS and activation_of(result.values) is None:
            return None
        return self.put_off(result, tensors[0].shape, tensors[0])

    def _sum(self, first: Any, second: Any) -> Tensor | None:
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
            return None
        if first.shape != second.shape or first.device != second.device:
            return None
        if not (first.is_contiguous() and second.is_contiguous()):
            return None
        for one, other in ((first, second), (second, first)):
            found = _whole(self.of(one))
            if found is None or not _writes(one.dtype, other.dtype):
                continue
            beside = self.of(other)
            nested = isinstance(found, Product) and isinstance(beside, Product) and beside.residual is None
            inner = beside if nested and one.dtype == other.dtype else None
            total = found.plus(other if inner is None else inner)  # type: ignore[arg-type]
            if total is not None:
                if inner is None:
                    self.settle(other)
                return self.put_off(total, other.shape, other)
        return None

    def _settle_each(self, *tensors: Tensor | None) -> None:
        """Compute what a kernel reads: a bias of several may be made in every step."""
        for tensor in tensors:
            if tensor is not None:
                self.settle(tensor)

    def _compute(self, key: int) -> None:
        """Compute a tensor; with it, in the same kernel, products of the same row, and their LayerNorm."""
        group = self._beside(key)
        normed = self._residual_norm(next(iter(group.values()))) if group else None
        if (normed is not None and self._launched(group, normed)) or (len(group) > 1 and self._launched(group, None)):
            return
        kept = self._deferred[key]
        if isinstance(kept, Normed) and isinstance(kept.prologue, LayerNormPrologue) and kept.place() is not None:
            self._residuals.add(kept.number)
        super()._compute(key)

    def _launched(self, group: dict[int, Product], normed: int | None) -> bool:
        """Compute products, and their norm, in one kernel; return False where there is none."""
        keys = [*group, *([] if normed is None else [normed])]
        places = [(self._deferred[at], self._deferred[at].place()) for at in keys]
        outs = [deferred.on(place) for deferred, place in places if place is not None]
        if not launch_beside([*group.values()], outs[: len(group)], None if normed is None else outs[-1]):
            return False
        for at in keys:
            del self._deferred[at]
        return True

    def _beside(self, key: int) -> dict[int, Product]:
        """Return a product of one row, and those that are alike, in the order of the model; nothing for others."""
        own = _single(self._deferred[key])
        if own is None:
            return {}
        functions = [kept for kept in self._deferred.values() if isinstance(kept, Pointwise)]
        inner = {key_of(tensor) for function in functions for tensor in tensors_of(function.operands)}
        found = {at: product for at, kept in self._deferred.items() if (product := _single(kept)) is not None}
        others = [at for at, product in found.items() if at not in (key, *inner) and alike(own, product)]
        return {at: product for at, product in found.items() if at in (key, *others[: MOST - 1])}

    def _residual_norm(self, product: Product) -> int | None:
        """Return the key of a product's own LayerNorm, where it is read once more behind it, as a residual is."""
        for at, kept in self._deferred.items():
            if isinstance(kept, Normed) and kept.number in self._residuals and kept.place() is not None:
                if is_same(kept.input, product.input) and is_same_norm(kept.prologue, product.prologue):
                    return at
        return None

    def sum_of(self, tensors: list[Tensor]) -> Tensor:
        """Return the sum of what every layer adds, computed once a step for the same tensors."""
        if len(tensors) == 1:
            return tensors[0]
        at = tuple(number for t in tensors for number in (key_of(t), t.storage_offset(), *t.shape, *t.stride()))
        return self.once(at, tensors, lambda: functools.reduce(torch.add, tensors))

    def once(self, key: Hashable, reads: Sequence[Tensor], compute: Callable[[], Tensor]) -> Tensor:
        """Return what was computed under a key, while no function of torch has been given a tensor that it reads."""
        if key not in self._once:
            self._once[key] = ([*reads], compute())
        return self._once[key][1]


def _writes(dtype: torch.dtype, of_sum: torch.dtype) -> bool:
    """Return whether something of `dtype` and of `of_sum` have a sum of `of_sum`, which a kernel writes."""
    return of_sum in KERNEL_DTYPES and torch.promote_types(dtype, of_sum) == of_sum


def _bare(deferred: Deferred | None) -> Product | None:
    """Return the product that a function of numbers may follow."""
    if isinstance(deferred, Pointwise):
        return deferred.of
    bare = isinstance(deferred, Product) and not deferred.activation and deferred.residual is None
    return deferred if bare else None  # type: ignore[return-value]


def _single(deferred: Deferred) -> Product | None:
    """Return a product of one row to which nothing is added yet, of a weight that lies as `nn.Linear` has it."""
    product = None if deferred.place() is None else _whole(deferred)
    if not isinstance(product, Product) or product.residual is not None or product.transposed:
        return None
    return product if is_one_row(product.input) else None


def _whole(deferred: Deferred | None) -> Product | Normed | None:
    """Return the product or norm to which something may be added."""
    if isinstance(deferred, Pointwise):
        return deferred.taken_in
    return deferred if isinstance(deferred, (Product, Normed)) else None


def _values(deferred: Deferred | None) -> Tensor:
    return deferred.values if isinstance(deferred, Pointwise) else POINTS
