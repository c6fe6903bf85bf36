"""A linear layer with its activation in the epilogue of cuBLASLt's product, in a captured forward.

M rows (the product of the leading shape), I in_features, O out_features:

    y = f(x Wᵀ + b)      f: ReLU, or the tanh form of GELU

A linear layer is put off (`lazy_mode`). Where an activation reads all of it, and nothing else does, both are one call
of `torch._addmm_activation`; everywhere else the product is torch's own, computed when something reads it. Whether the
call is faster than the product and its activation is tried when a forward is rehearsed, once for each size.

The sums are cuBLASLt's. The epilogue computes the activation of them in fp32, where torch rounds the product before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..device.fastest import fastest
from ..launching.launch import HIP, collects, rehearses
from .lazy_mode import Deferred, LazyMode

_FASTER: dict[tuple[Any, ...], bool] = {}
"""Whether the epilogue is, by `_size`."""


@dataclass(eq=False)
class LinearProduct(Deferred):
    """A linear layer's product, and its numbers once they are computed."""

    input: Tensor
    weight: Tensor
    bias: Tensor
    numbers: Tensor | None = field(default=None, init=False)
    is_read: bool = field(default=False, init=False)
    """Whether an activation is put off that reads it."""

    @property
    def reads(self) -> Sequence[Tensor]:
        """Its operands."""
        return [self.input, self.weight, self.bias]

    def compute(self, out: Tensor) -> None:
        """Run torch's product, and know where its numbers are."""
        self.multiply(out)
        self.numbers = out

    def multiply(self, out: Tensor) -> None:
        """Write the product."""
        torch.addmm(self.bias, _rows(self.input), self.weight.t(), out=_rows(out))

    def activate(self, gelu: bool, out: Tensor) -> None:
        """Write the activation of the product, which is not kept."""
        torch._addmm_activation(self.bias, _rows(self.input), self.weight.t(), use_gelu=gelu, out=_rows(out))


@dataclass(eq=False)
class ActivatedProduct(Deferred):
    """The activation of a product."""

    product: LinearProduct
    gelu: bool
    step: LazyMode

    @property
    def held(self) -> list[Tensor]:
        """The product's memory, where somebody may still read or write it."""
        if self.product.numbers is not None:
            return [self.product.numbers]
        return [] if (storage := self.product.place()) is None else [self.product.on(storage)]

    @property
    def reads(self) -> Sequence[Tensor]:
        """The product, or what it is to be computed from."""
        return [*self.product.reads, *self.held]

    def compute(self, out: Tensor) -> None:
        """Run both as one, where nothing has read the product and nobody holds it."""
        for held in self.held:
            self.step.settle(held)
            _activate(_rows(held), self.gelu, _rows(out))
            return
        self.product.activate(self.gelu, out)


def put_off_product(step: LazyMode, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return what stands for `F.linear(input, weight, bias)`; None where torch is to compute it now.

    Outside of a rehearsal, which may try, only sizes are put off whose epilogue was faster.
    """
    if HIP or collects() or bias is None or not _takes(input, weight, bias):
        return None
    if (
        input.is_cuda
        and not rehearses()
        and not any(_FASTER.get(_size(input, weight, gelu)) for gelu in (True, False))
    ):
        return None
    for operand in (input, weight, bias):
        step.settle(operand)
    return step.put_off(LinearProduct(input, weight, bias), (*input.shape[:-1], weight.shape[0]), input)


def _takes(input: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether operands are those of cuBLASLt's epilogue."""
    return (
        all(one.is_contiguous() and one.dtype == input.dtype for one in (input, weight, bias))
        and input.dtype in (torch.float16, torch.bfloat16)
        and weight.dim() == 2
        and input.shape[-1] == weight.shape[1]
        and bias.shape == weight.shape[:1]
        and input.numel() > 0
    )


def activated_product(step: LazyMode, input: Tensor, *, gelu: bool) -> Tensor | None:
    """Return what stands for an activation of a product that is put off; None for any other, or where it loses.

    Args:
        step: which knows what is put off.
        input: that the activation is given.
        gelu: whether it is GELU's tanh form; else ReLU.
    """
    product = step.of(input)
    if not isinstance(product, LinearProduct) or product.is_read or not _is_faster(product, gelu):
        return None
    product.is_read = True
    return step.put_off(ActivatedProduct(product, gelu, step), input.shape, input)


def _is_faster(product: LinearProduct, gelu: bool) -> bool:
    """Return whether the epilogue is; it is tried where that is not known, unless a graph is being captured."""
    if not product.input.is_cuda:  # the interpreter, which is to show what it computes
        return True
    size = _size(product.input, product.weight, gelu)
    if size not in _FASTER:
        if torch.cuda.is_current_stream_capturing():
            return False
        _FASTER[size] = _tried(product, gelu)
    return _FASTER[size]


def _size(input: Tensor, weight: Tensor, gelu: bool) -> tuple[Any, ...]:
    return input.numel() // weight.shape[1], *weight.shape, gelu, input.dtype, input.device


def _tried(product: LinearProduct, gelu: bool) -> bool:
    numbers, out = (product.input.new_empty(product.shape) for _ in range(2))

    def apart() -> None:
        product.multiply(numbers)
        _activate(numbers, gelu, out)

    return fastest({"apart": apart, "epilogue": lambda: product.activate(gelu, out)}, "apart") == "epilogue"


def _activate(numbers: Tensor, gelu: bool, out: Tensor) -> None:
    if gelu:
        torch.ops.aten.gelu.out(numbers, approximate="tanh", out=out)
    else:
        torch.clamp_min(numbers, 0, out=out)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])


def describe_process() -> list[str]:
    """Return a line for `explain`: which activations are in the epilogue, of all that were tried in this process."""
    taken = ["{}x{}x{}".format(*size) for size, faster in _FASTER.items() if faster]
    known = f"{', '.join(taken) or 'none'}, of {len(_FASTER)} tried"
    return [f"activations in the epilogue of their product: {known}"] if _FASTER else []
