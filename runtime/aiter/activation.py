"""aiter's `activation(gate) * up` in place of the bundled kernel.

N rows, I the intermediate size. aiter reads one tensor `[N, 2 I]`, the gate first, by raw addresses: it runs where
gate and up are the two halves of one packed product. It rounds once, after the product; torch and the bundled kernel
round the activation first, so results may be one rounding apart (aiter's is the more exact).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import aiter_calls
from .aiter_norms import DTYPES

FUNCTIONS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
_ROWS = 37


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor | None:
    """Return `activation(gate) * up` by aiter, `[N, I]` and contiguous; None where the bundled form is to run."""
    if not aiter_calls.chosen("gated_activation", gate):
        return None
    packed = _packed(gate, up) if activation in FUNCTIONS else "activation"
    if isinstance(packed, str):
        aiter_calls.refuse("gated_activation", packed)
        return None
    function = aiter_calls.function("gated_activation", FUNCTIONS[activation], ("out", "input"), ())
    if function is None:
        return None

    def call(both: Tensor) -> Tensor:
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        function(out, both)
        return out

    def proof() -> bool:
        (both,) = aiter_calls.samples(gate, (_ROWS, 2 * gate.shape[-1]))
        both *= 3
        exact = _exact(both.float(), activation).to(both.dtype)
        return aiter_calls.mostly_equal(call(both), exact, most_unequal=0.05)

    variant = (activation, gate.dtype, gate.device, gate.shape[-1])
    product = aiter_calls.run("gated_activation", gate, variant, lambda: call(packed), proof)
    return None if product is None else product.view(gate.shape)


def _exact(both: Tensor, activation: str) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _packed(gate: Tensor, up: Tensor) -> Tensor | str:
    """Return `[rows, 2 I]`, the tensor whose halves these are; or why there is none."""
    if gate.dtype not in DTYPES or up.dtype != gate.dtype:
        return "dtype"
    if gate.numel() == 0:
        return "empty"
    size = gate.shape[-1]
    if gate.shape != up.shape or gate.device != up.device or gate.stride() != up.stride():
        return "layout"
    follows = up.data_ptr() - gate.data_ptr() == size * gate.element_size()
    shared = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    if size % 8 or gate.data_ptr() % 16 or not follows or not shared or not _rows_of(gate, 2 * size):
        return "layout"
    return gate.as_strided((gate.numel() // size, 2 * size), (2 * size, 1))


def _rows_of(tensor: Tensor, width: int) -> bool:
    """Return whether the rows of a tensor lie `width` elements apart, one after the other."""
    expected = width
    if tensor.stride(-1) != 1:
        return False
    for size, stride in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
