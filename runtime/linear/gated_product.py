"""`down(activation(gate) * up)`, the second half of a gated MLP, that keeps no activation for its gradients.

N is any leading shape, I the intermediate size, O the output size, W `[O, I]`, b `[O]`, g the gradient of the result:

    y = product Wᵀ + b,   product = activation(gate) * up
    dproduct = g W,   dW = gᵀ product,   db = Σ_rows g

Torch keeps gate, up and product. The product is as large as each of the others and is computed from them in the time
that reading it takes: so the kernel that makes the gradients of gate and up writes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend
from .gated_activation import (
    activation_kind,
    gated_activation,
    gated_activation_backward,
    launch_gated_activation,
    not_learned,
    torch_form,
)


def gated_product(
    gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], projection: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `projection(gated_activation(gate, up, activation))`.

    Args:
        gate: `[N, I]`.
        up: `[N, I]`.
        activation: as `gated_activation` takes it.
        projection: `nn.Linear(I, O)`. Anything else, or one that a hook, an adapter or a sharding watches, is called.

    Returns:
        `[N, O]`. Where kernels make the gradients of the activation, gate and up are all that is kept.
    """
    kind = _kind(gate, up, activation, projection)
    if kind is None or not isinstance(projection, nn.Linear):
        return projection(gated_activation(gate, up, activation))
    autocast = backend.autocasts(gate.device.type)
    dtype = torch.get_autocast_dtype(gate.device.type) if autocast else projection.weight.dtype
    out: Tensor = _GatedProduct.apply(gate, up, projection.weight, projection.bias, kind, dtype)
    return out


def _kind(
    gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], projection: Callable[[Tensor], Tensor]
) -> str | None:
    """Return the activation's name, None where the parts are to be called one after the other."""
    if type(projection) is not nn.Linear or not isinstance(gate, Tensor) or not isinstance(up, Tensor):
        return None
    if not backend.wants_gradient(gate, up) or not_learned(gate, up) is not None or gate.dtype != up.dtype:
        return None
    if backend.observed(projection) or not backend.learns(gate, projection.weight, projection.bias):
        return None
    if not backend.autocasts(gate.device.type) and gate.dtype != projection.weight.dtype:
        return None
    return activation_kind(activation)


class _GatedProduct(torch.autograd.Function):
    """The product, and its gradients from gate, up and the weight."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, kind: str, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight, bias)
        ctx.form = (kind, dtype)
        return F.linear(launch_gated_activation(gate, up, kind), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, bias = ctx.saved_tensors
        kind, dtype = ctx.form
        if torch.is_grad_enabled():
            reference = lambda gate, up, weight, bias: F.linear(torch_form(kind)(gate) * up, weight, bias)
            return (*backend.again(reference, ctx.saved_tensors, ctx.needs_input_grad[:4], [gradient]), None, None)
        for_weight, for_bias = ctx.needs_input_grad[2:4]
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_product = (flat @ weight.to(dtype)).view(gate.shape)
        product = torch.empty_like(gate, memory_format=torch.contiguous_format) if for_weight else None
        of_gate, of_up = gated_activation_backward(of_product, gate, up, kind, product)
        of_weight = None
        if product is not None:
            of_weight = (flat.T @ product.view(-1, product.shape[-1])).to(weight.dtype)
        of_bias = flat.sum(0).to(bias.dtype) if for_bias and bias is not None else None
        return of_gate, of_up, of_weight, of_bias, None, None
