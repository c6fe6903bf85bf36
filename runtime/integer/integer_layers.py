"""Layers whose weights are integers of 4 or 8 bits, whichever way a checkpoint lays them out.

A layer is loaded and saved in its checkpoint's own tensors (`integer_formats`). Once loaded it holds them as kernels
read them (`integer_weights.Integers`), and nothing else: a state dict is laid out anew, bit for bit.

    one row            read at the speed of memory; norm, residual, gate inside
    2 to 32 rows       the same words, on the tensor cores
    more, or gradients the weight is dequantised for the call, and torch multiplies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend
from ..device import row_tiles
from ..launching.launch import HIP
from ..linear.block_linear import REASONS as BLOCK_REASONS
from ..linear.block_linear import ScaledLinear, reason_against_call
from ..linear.packing import as_one
from ..linear.prologue import prologue_of
from ..norms.norm_form import Prologue
from ..norms.sum_norm import normed
from .integer_formats import Format
from .integer_linear import launch_integer_row
from .integer_rows import MOST_ROWS, launch_integer_rows
from .integer_skinny import run_integer_skinny
from .integer_weights import Integers, dequantized, reason_against

REASONS = {
    **BLOCK_REASONS,
    "threads_elsewhere": "the compiler laid words out otherwise than the matrix units need them",
}

_PARTS = ("values", "scale", "zero", "order")


class IntegerLinear(ScaledLinear):
    """A layer `y = x Wᵀ + b` whose weight is integers.

    Args:
        of: the layer whose place it takes, without weights.
        form: how the checkpoint lays a weight out.
    """

    bias: nn.Parameter | None

    def __init__(self, of: nn.Linear, form: Format):
        super().__init__()
        self.in_features, self.out_features, self.form = of.in_features, of.out_features, form
        self.is_arranged = False
        self._is_hf_initialized = True
        for name, (shape, dtype) in form.tensors(of.out_features, of.in_features).items():
            empty = torch.empty(shape, dtype=dtype, device=of.weight.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", of.bias)

    def arrange(self) -> None:
        """Hold what was loaded as kernels read it."""
        published = {name: self._parameters.pop(name) for name in self._published()}
        self._hold(self.form.read({name: one.detach() for name, one in published.items() if one is not None}))

    def _published(self) -> tuple[str, ...]:
        return tuple(self.form.tensors(self.out_features, self.in_features))

    def _hold(self, weight: Integers) -> None:
        for name in _PARTS:
            self.register_buffer(f"_{name}", getattr(weight, name), persistent=False)
        self.is_arranged = True

    def is_intact(self) -> bool:
        """Return whether the weight has been loaded."""
        return self.is_arranged

    def parts(self) -> Integers:
        """Return the weight as kernels read it."""
        values, scale, zero, order = (self._buffers[f"_{name}"] for name in _PARTS)
        assert values is not None
        assert scale is not None
        return Integers(values, scale, zero, self.form.bits, self.in_features // scale.shape[1], order)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[O, I]`, dequantised, for the input's own columns."""
        weight = self.parts()
        found = dequantized(weight, dtype)
        return found if weight.order is None else torch.empty_like(found).index_copy_(1, weight.order.long(), found)

    @property
    def weight(self) -> Tensor:
        """The weight `[O, I]`, dequantised at every access."""
        if not self.is_arranged:
            raise AttributeError("weight")
        return self.dense(self.parts().scale.dtype)

    @staticmethod
    def product(
        input: Tensor,
        projections: Sequence[nn.Module],
        norm: nn.Module | None,
        residual: Tensor | None,
        kind: str | None,
    ) -> Tensor | None:
        """Return what `linear.block_linear` does, of layers of integers."""
        if not row_tiles.few_rows(input, MOST_ROWS):
            return None
        found = _joined(projections)
        if not isinstance(found, str):
            reason = reason_against_call(input, *found, residual, norm) or reason_against(found[0])
            if reason is None:
                return _by_kernel(input, *found, norm, residual, kind or "")
            found = reason
        backend.count_fallback("integer_linear", found, projections[0])
        return None

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of `[…, I]`, `[…, O]`."""
        if (found := self.product(input, (self,), None, None, None)) is not None:
            return found
        bias = self.bias
        return F.linear(input, self.dense(input.dtype), bias if bias is None else bias.to(input.dtype))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_arranged:
            for name, tensor in self.form.publish(self.parts()).items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = {name: state_dict.get(prefix + name) for name in self._published()}
        if self.is_arranged and all(tensor is not None for tensor in given.values()):
            device = self.parts().values.device
            self._hold(self.form.read({name: tensor.to(device) for name, tensor in given.items()}))
            state_dict = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in given}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """Return the sizes and the format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, form={self.form!r}"


def _joined(projections: Sequence[nn.Module]) -> tuple[Integers, Tensor | None] | str:
    """Return weight and bias of projections as one; or why they are not one, a key of `REASONS`."""
    if any(backend.observed(projection) for projection in projections):
        return "observed"
    layers: Any = projections
    if len(layers) == 1:
        return layers[0].parts(), layers[0].bias
    parts = [layer.parts() for layer in layers]
    first = parts[0]
    alike = all(
        (one.bits, one.columns, one.zero is None, layer.bias is None)
        == (first.bits, first.columns, first.zero is None, layers[0].bias is None)
        for one, layer in zip(parts, layers, strict=True)
    )
    orders = [one.order for one in parts]
    if not alike or any((order is None) != (orders[0] is None) for order in orders):
        return "different_weights"
    if orders[0] is not None and not _same_order(layers):
        return "different_weights"
    found: dict[str, Any] = {"order": first.order}
    for name in ("values", "scale", *(() if first.zero is None else ("zero",))):
        one = as_one([getattr(part, name) for part in parts])
        if isinstance(one, str):
            return one
        found[name] = one
    bias = None if layers[0].bias is None else as_one([layer.bias for layer in layers])
    if isinstance(bias, str):
        return bias
    return Integers(found["values"], found["scale"], found.get("zero"), first.bits, first.columns, first.order), bias


def _same_order(layers: Sequence[Any]) -> bool:
    """Return whether layers take their columns in one order; the device is asked once."""
    orders = tuple(layer._buffers["_order"] for layer in layers)
    known = layers[0].__dict__.get("_orders_alike")
    if known is None or any(one is not other for one, other in zip(known[0], orders, strict=True)):
        known = orders, all(torch.equal(orders[0], order) for order in orders[1:])
        layers[0].__dict__["_orders_alike"] = known
    return bool(known[1])


def _by_kernel(
    input: Tensor, weight: Integers, bias: Tensor | None, norm: nn.Module | None, residual: Tensor | None, kind: str
) -> Tensor | None:
    prologue = None if norm is None else prologue_of(norm)
    one_row = input.numel() == input.shape[-1]
    if not isinstance(prologue, Prologue):
        input, prologue = input if norm is None else normed(input, norm), None
    if not one_row and weight.order is not None:
        # the columns in the weight's order, which takes less than what the kernels of several rows would
        input = input if prologue is None or norm is None else normed(input, norm)
        input, prologue, weight = input.index_select(-1, weight.order), None, weight._replace(order=None)
    size = weight.shape[0] // 2 if kind else weight.shape[0]
    out = input.new_empty((*input.shape[:-1], size), dtype=None if residual is None else residual.dtype)
    if run_integer_skinny(input, weight, bias, prologue, residual, out, kind):
        return out
    if one_row:
        launch_integer_row(input, weight, bias, prologue, residual, out, kind)
        return out
    if kind:
        return None
    if prologue is not None and (HIP or input.dtype == torch.float16):  # as of weights with blocks
        assert norm is not None
        input, prologue = normed(input, norm), None
    launch_integer_rows(input, weight, bias, prologue, residual, out)
    return out
