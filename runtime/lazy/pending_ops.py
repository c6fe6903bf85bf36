"""What a decode step has asked for and nobody has computed yet: norms, products, activations of products.

    Normed     norm(x) + residual
    Product    activation(x' Wᵀ + b) * factor + residual        x' = norm(x), or x
    Pointwise  f(product), f made of torch's functions of one number

Each stands for a tensor that the model already holds, its `place`, and can write it (`settle`). A product takes in
what comes before and after it, so that all of it is one kernel. Which activation a chain of functions is, is told by
its values: it is computed beside, in fp64, at points all over where activations bend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..linear.conv1d_weight import launch_transposed
from ..linear.linear import launch_product
from ..linear.prologue import LayerNormPrologue, Norm, shift_of
from ..norms.layer_norm import launch_layer_norm
from ..norms.norm_form import Prologue
from ..norms.rms_norm import launch_rms_norm
from .lazy_mode import Deferred

POINTS = torch.linspace(-12.0, 12.0, 289, dtype=torch.float64, device="cpu")
CLOSE = 1e-6
"""Between two activations that files write with constants of seven digits; GELU and its tanh form differ by 5e-4."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@functools.cache
def _values(kind: str) -> Tensor:
    return _ACTIVATIONS[kind](POINTS)


def activation_of(values: Tensor) -> str | None:
    """Return the kernel's name of the activation that has `values` at `POINTS`."""
    close = (kind for kind in _ACTIVATIONS if torch.allclose(_values(kind), values, rtol=0.0, atol=CLOSE))
    return next(close, None)


def factor_of(values: Tensor) -> float | None:
    """Return the number that a function with `values` at `POINTS` multiplies by."""
    factor = float(values[-1] / POINTS[-1])
    return factor if torch.allclose(values, POINTS * factor, rtol=1e-12, atol=0.0) else None


@dataclass(eq=False)
class Normed(Deferred):
    """A norm of one row, and what is added to it."""

    input: Tensor
    prologue: Norm
    residual: Tensor | None = None
    """Of an RMSNorm alone."""
    number: int = -1
    """Which norm of the step it is."""

    @property
    def reads(self) -> Sequence[Tensor]:
        """Its input and weights."""
        parameters = (self.prologue.weight, shift_of(self.prologue))
        return [self.input, *(p for p in (*parameters, self.residual) if p is not None)]

    def compute(self, out: Tensor) -> None:
        """Run the norm's own kernel."""
        if isinstance(self.prologue, LayerNormPrologue):
            launch_layer_norm(self.input, self.prologue.weight, self.prologue.bias, self.prologue.eps, out)
        elif isinstance(self.prologue, Prologue):
            launch_rms_norm(self.input, *self.prologue, out, self.residual)

    def plus(self, other: Tensor) -> Normed | None:
        """Return the sum with something of the same shape; None where it would be two kernels anyway."""
        takes = self.residual is None and isinstance(self.prologue, Prologue)
        return replace(self, residual=other) if takes else None


@dataclass(eq=False)
class Product(Deferred):
    """A product of few rows, and what is before and after it."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    prologue: Norm | None = None
    activation: str = ""
    factor: float = 1.0
    residual: Tensor | Product | None = None
    transposed: bool = False
    """Whether the weight lies `[I, O]`."""

    @property
    def reads(self) -> Sequence[Tensor]:
        """All operands."""
        norm = () if self.prologue is None else (self.prologue.weight, shift_of(self.prologue))
        inner = self.residual.reads if isinstance(self.residual, Product) else (self.residual,)
        return [t for t in (self.input, self.weight, self.bias, *norm, *inner) if t is not None]

    def compute(self, out: Tensor) -> None:
        """Run the product's kernel, that of a residual which is a product before it."""
        residual = self.residual
        if isinstance(residual, Product):
            inner, residual = residual, torch.empty_like(out)
            inner.compute(residual)
        given = (residual, out, self.activation, self.factor)
        if self.transposed:
            assert not isinstance(self.prologue, Prologue)
            launch_transposed(self.input, self.weight, self.bias, self.prologue, *given)
            return
        launch_product(self.input, self.weight, self.bias, self.prologue, *given)

    def plus(self, other: Tensor | Product) -> Product | None:
        """Return the sum with something of the same shape; None where it would be two kernels anyway."""
        if self.residual is None:
            return replace(self, residual=other)
        if isinstance(self.residual, Product) and (inner := self.residual.plus(other)) is not None:
            return replace(self, residual=inner)
        return None


@dataclass(eq=False)
class Pointwise(Deferred):
    """A function of a product, number by number."""

    of: Product
    values: Tensor
    """At `POINTS`."""
    function: Callable[..., Any]
    """With an argument `out`."""
    operands: tuple[Any, ...]
    settle: Callable[[Tensor], None]
    """Makes sure that an operand is computed."""

    @property
    def reads(self) -> Sequence[Tensor]:
        """What the product reads, and the operands."""
        return [*self.of.reads, *(operand for operand in self.operands if isinstance(operand, Tensor))]

    @property
    def function_alone(self) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """The function and its operands, where no product has it as its last stage."""
        return None if self.taken_in is not None else (self.function, self.operands)

    @property
    def taken_in(self) -> Product | None:
        """The product with this as its activation or factor, where the kernels have it."""
        if (kind := activation_of(self.values)) is not None:
            return replace(self.of, activation=kind)
        factor = factor_of(self.values)
        return None if factor is None else replace(self.of, factor=factor)

    def compute(self, out: Tensor) -> None:
        """Run the product with its activation, or the function itself after the product."""
        if (product := self.taken_in) is not None:
            product.compute(out)
            return
        for operand in self.operands:
            if isinstance(operand, Tensor):
                self.settle(operand)
        self.function(*self.operands, out=out.view(self.shape))
