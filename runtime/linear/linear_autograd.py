"""Projections of one input while they are trained: one gradient of the input, and no second copy of a norm for it.

N is any leading shape, I in_features, O_i out_features of projection i, g_i the gradient of its result:

    y_i = x W_iᵀ + b_i
    dx = Σ_i g_i W_i,   dW_i = g_iᵀ x,   db_i = Σ_rows g_i

Torch adds the parts of dx in passes of their own; here each product adds to the one before. And where x is a norm of a
sum that is kept for the norm's own gradient, x is computed again, with the same bits, in the time that reading it
takes: 32 MiB for each such norm of 8,192 tokens of 2,048 in 16 bits. Each weight and bias has its own gradient, as
without. Under autocast torch keeps a copy of x in 16 bits for every projection, and one of every weight; here none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend
from ..core.recompute import Made, origin

_PLAIN = (Tensor, nn.Parameter)


def learned_projections(input: Tensor, projections: Sequence[nn.Module]) -> tuple[Tensor, ...] | None:
    """Return `tuple(projection(input) for projection in projections)`, which makes its own gradients.

    Args:
        input: `[N, I]`.
        projections: `nn.Linear(I, O_i)`.

    Returns:
        None where the projections have to be called: an adapter, a hook, a special tensor, a compiler, a CPU.
    """
    if not all(type(projection) is nn.Linear and not backend.observed(projection) for projection in projections):
        return None
    own = [projection._parameters for projection in projections]
    if not all("weight" in parameters and "bias" in parameters for parameters in own):  # a buffer, an attribute
        return None
    weights, biases = ([parameters[name] for parameters in own] for name in ("weight", "bias"))
    if not backend.learns(input, *weights, *biases) or not input.numel():
        return None
    present = [tensor for tensor in (*weights, *biases) if tensor is not None]
    if any(tensor.dtype != present[0].dtype or tensor.device != input.device for tensor in present):
        return None
    dtype = _product_dtype(input, present[0])
    if dtype is None:
        return None
    of_weights = any(weight is not None and weight.requires_grad for weight in weights)
    kept = _Kept(origin(input) if of_weights else None, dtype, of_weights)
    outputs: tuple[Tensor, ...] = _Projections.apply(input, kept, len(weights), *weights, *biases)
    return outputs


def _product_dtype(input: Tensor, weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which `F.linear` multiplies these; None where it would not."""
    if backend.autocasts(input.device.type):
        wide = torch.float64 in (input.dtype, weight.dtype)
        return None if wide else torch.get_autocast_dtype(input.device.type)
    return input.dtype if input.dtype == weight.dtype else None


class _Kept:
    """What the gradients are made of, besides weights."""

    def __init__(self, made: Made | None, dtype: torch.dtype, of_weights: bool):
        self.made, self.dtype, self.of_weights = made, dtype, of_weights

    def tensors(self, input: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what is to be saved."""
        if self.made is None:
            return (input if self.of_weights else None), None
        saved = self.made.source, self.made.weight
        self.made = self.made._replace(source=input.new_empty(0), weight=None)  # autograd keeps them, and nobody else
        return saved

    def input(self, source: Tensor | None, weight: Tensor | None, differentiable: bool) -> Tensor | None:
        """Return the input again, of what was saved."""
        if self.made is None or source is None:
            return source
        return (self.made.reference if differentiable else self.made.again)(source, weight)


class _Projections(torch.autograd.Function):
    """The products, and their gradients from the input or what it is a norm of."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, kept: _Kept, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(*kept.tensors(input), *parameters)
        ctx.kept, ctx.count, ctx.dtype, ctx.shape = kept, count, input.dtype, input.shape
        ctx.set_materialize_grads(False)
        x = input.to(kept.dtype)
        with torch.autocast(input.device.type, enabled=False):
            return tuple(_product(x, w, b, kept.dtype) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        source, norm_weight, *parameters = ctx.saved_tensors
        kept: _Kept = ctx.kept
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        if torch.is_grad_enabled():
            return _again(ctx, source, norm_weight, parameters, gradients)
        needed = ctx.needs_input_grad
        for_weights, for_biases = needed[3 : 3 + ctx.count], needed[3 + ctx.count :]
        flat = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
        of_input = _of_input(flat, weights, kept.dtype) if needed[0] else None
        x = kept.input(source, norm_weight, False) if any(for_weights) else None
        x = None if x is None else x.to(kept.dtype).reshape(-1, ctx.shape[-1])
        of_weights = [
            (g.T @ x).to(w.dtype) if need and g is not None and x is not None else None
            for g, w, need in zip(flat, weights, for_weights, strict=True)
        ]
        of_biases = [
            g.sum(0).to(b.dtype) if need and g is not None else None
            for g, b, need in zip(flat, biases, for_biases, strict=True)
        ]
        of_input = None if of_input is None else of_input.view(ctx.shape).to(ctx.dtype)
        return of_input, None, None, *of_weights, *of_biases


def _product(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert weight is not None
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _of_input(gradients: Sequence[Tensor | None], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    total: Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is not None:
            weight = weight.to(dtype)
            total = gradient @ weight if total is None else total.addmm_(gradient, weight)
    return total


def _again(
    ctx: Any,
    source: Tensor | None,
    norm_weight: Tensor | None,
    parameters: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated themselves."""
    kept, needed = ctx.kept, ctx.needs_input_grad
    x = kept.input(source, norm_weight, True)
    used = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if x is None:  # no weight learns, and the input's gradient is the same everywhere
        x = torch.zeros(ctx.shape, dtype=ctx.dtype, device=parameters[0].device)  # type: ignore[union-attr]

    def reference(x: Tensor, *parameters: Tensor | None) -> Any:
        products = [_product(x, parameters[place], parameters[ctx.count + place], kept.dtype) for place in used]
        return products[0] if len(products) == 1 else tuple(products)

    wanted = (needed[0], *needed[3:])
    of_input, *others = backend.again(reference, (x, *parameters), wanted, [gradients[place] for place in used])  # type: ignore[misc]
    return of_input, None, None, *others
