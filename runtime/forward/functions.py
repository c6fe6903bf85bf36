"""Functions of torch in a captured forward: chains of pointwise ones, and copies that what reads them can do without.

A forward of many tokens is bound by memory wherever it is no product: each pointwise function reads and writes
everything once more. What a capture runs is looked at once, so there runs of them are one kernel
(`lazy.pointwise_fusion`), whatever the modeling file calls them, with the norm that follows as its last stage
(`lazy.fusion_rows`); joins (`torch.cat`) and copies into another order are part of that. Attention takes queries, keys
and values where they lie. ReLU and GELU's tanh form are in the epilogue of the product before them
(`lazy.activated_product`), where that is faster.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..lazy.activated_product import activated_product, put_off_product
from ..lazy.fusion_rows import norm_of_chain
from ..lazy.lazy_mode import LazyMode
from ..lazy.pointwise_fusion import FUNCTIONS, hides_nothing, in_order, uncopied, where_it_runs
from ..linear.prologue import LayerNormPrologue, Norm
from ..norms.norm_form import Prologue

CASES = """
def forward(function, *given):
    with ForwardFunctions():
        return function(*given)

def turned(states, cos, sin):
    whole = states.view(8, 201, 3, 16, 64)[:, :, 0].transpose(1, 2)
    prefix, rest = whole.split((5, 196), dim=-2)
    rest = rest * cos + torch.cat((-rest[..., 32:], rest[..., :32]), dim=-1) * sin
    return torch.cat((prefix, rest), dim=-2)

def scaled(x, scale, residual, *norm):
    summed = x * scale + residual
    return F.layer_norm(summed, (1024,), *norm), summed

def rms(x, scale, residual, weight):
    with ForwardFunctions() as step:
        summed = x * scale + residual
        return step.rms_norm(summed, weight, EPS), summed

rows = tensor(8, 2048, 1024), tensor(1024), tensor(8, 2048, 1024)
case("rotation after a prefix", forward, turned, tensor(8, 201, 3072), tensor(196, 64), tensor(196, 64))
case("quick GELU", forward, lambda x: x * torch.sigmoid(x * 1.702), tensor(32, 257, 4096))
case("transposed", forward, lambda x: F.gelu(x).transpose(1, 2).contiguous(), tensor(8, 1599, 512))
case("scale, sum, LayerNorm", forward, scaled, *rows, tensor(1024), tensor(1024))
case("scale, sum, RMSNorm", rms, *rows, tensor(1024))
"""

_MOST = (1 << 31) - 1
"""Numbers that an index of 32 bits tells apart."""


def functions(wanted: bool = True, *, poisons: bool = False) -> AbstractContextManager[object]:
    """Return what a captured forward runs inside.

    Args:
        wanted: whether functions are put off; otherwise nothing is done.
        poisons: fill what is put off with NaN, so that it shows where it is read and not computed.
    """
    if wanted:
        return ForwardFunctions(poisons=poisons)
    return contextlib.nullcontext()


class ForwardFunctions(LazyMode):
    """Puts off functions of any size, and sums and norms that this package's operators ask for."""

    largest = _MOST

    def __init__(self, *, poisons: bool = False):
        super().__init__(poisons=poisons)
        self.chains = _FUNCTIONS

    def sum(self, first: Tensor, second: Tensor) -> Tensor | None:
        """Put off a sum that a norm reads."""
        with torch._C.DisableTorchFunction():  # what is asked here is no call of the model's
            return FUNCTIONS[torch.add](self, second, first)

    def layer_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off a LayerNorm of something put off."""
        return self._norm(input, LayerNormPrologue(*prologue))

    def rms_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off an RMSNorm of something put off."""
        return self._norm(input, Prologue(*prologue))

    def _norm(self, input: Tensor, norm: Norm) -> Tensor | None:
        with torch._C.DisableTorchFunction():
            return norm_of_chain(self, input, norm)


def _attention(
    step: LazyMode,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor | None:
    """Let attention read what was copied for it where that lay before, and no mask that is the same everywhere.

    transformers before 5.23 makes a mask that hides nothing in every capture; torch has no fast kernel for it.
    """
    q, k, v = (uncopied(step, one) for one in (query, key, value))
    mask = None if attn_mask is not None and hides_nothing(step, attn_mask) else attn_mask
    if mask is attn_mask and q is query and k is key and v is value:
        return None
    _settle(step, q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **named)


def _layer_norm(
    step: LazyMode,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """Let a norm be the last stage of a chain; what does not lie in order is brought into it first."""
    if tuple(normalized_shape) == tuple(input.shape[-1:]):
        found = norm_of_chain(step, input, LayerNormPrologue(weight, bias, eps))
        if found is not None:
            return found
    copied = in_order(step, input)
    if copied is None:
        return None
    _settle(step, weight, bias)
    return F.layer_norm(copied, normalized_shape, weight, bias, eps)


def _convolution(step: LazyMode, input: Tensor, *args: Any, **named: Any) -> Tensor | None:
    copied = in_order(step, input)
    if copied is None:
        return None
    _settle(step, *args, *named.values())
    return torch.conv1d(copied, *args, **named)


def _weight_norm(step: LazyMode, v: Tensor, g: Tensor, dim: int = 0) -> Tensor | None:
    """Compute a weight from its direction and its length as torch does, in kernels that fill the device.

    Torch's own for the last dimension runs in as many blocks as that has places: 0.58 ms for wav2vec2's 16 MiB on an
    H200, a sixth of its forward. Of 16 bits, where one rounding more in fp32 is none.
    """
    if dim < 0 or v.itemsize > 2 or where_it_runs((v.detach(), g), {}) is None:  # below 0: the length of the whole
        return None
    _settle(step, v, g)
    rest = [other for other in range(v.dim()) if other != dim]
    length = torch.linalg.vector_norm(v, dim=rest, keepdim=True, dtype=torch.float32)
    return torch.mul(v, g / length, out=torch.empty_like(v))


def _linear(step: LazyMode, input: Tensor, weight: Tensor, bias: Tensor | None = None, **named: Any) -> Tensor | None:
    """Put a product off until it is known whether an activation alone reads it."""
    if named or where_it_runs((input, weight, bias), {}) is None:
        return None
    return put_off_product(step, input, weight, bias)


def _activation(func: Callable[..., Any], step: LazyMode, *args: Any, **named: Any) -> Tensor | None:
    """Put an activation off with the product that it reads, or as a function like others."""
    alone = len(args) == 1 and named in _IN_EPILOGUE[func]
    taken = activated_product(step, *args, gelu=func is F.gelu) if alone else None
    return FUNCTIONS[func](step, *args, **named) if taken is None else taken


def _settle(step: LazyMode, *given: Any) -> None:
    for one in given:
        if isinstance(one, Tensor):
            step.settle(one)


_IN_EPILOGUE: dict[Callable[..., Any], list[dict[str, Any]]] = {
    F.gelu: [{"approximate": "tanh"}],
    F.relu: [{}, {"inplace": False}],
    torch.relu: [{}],
    Tensor.relu: [{}],
}
"""Activations that a product's epilogue has, by what they are given besides."""
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    **FUNCTIONS,
    F.linear: _linear,
    **{func: functools.partial(_activation, func) for func in _IN_EPILOGUE},
    F.scaled_dot_product_attention: _attention,
    F.layer_norm: _layer_norm,
    torch.conv1d: _convolution,
    torch._weight_norm: _weight_norm,
}
