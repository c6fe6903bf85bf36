"""A product of many rows with a residual: the sum lies where the residual lay, where nobody reads that again.

N rows, I in_features, O out_features:

    residual += x Wᵀ        in the product's own epilogue, which reads and writes what it adds to

That saves a pass over the residual. It is taken in prompts, where the reading has seen that nothing reads the old sum
(`core.reading.Reading.poisoning`), and where it is faster than the product and the sum beside it (or the sum with the
norm that reads it): cuBLAS has other kernels for it. The product is rounded once, with the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import backend
from ..core.fastest import fastest
from ..core.reading import Reading
from ..norms.add_norm import add_norm
from . import packing

FEWEST_ROWS = 512
"""Of a product, for a trial: shorter ones are launches."""

_pays: dict[tuple[Any, ...], bool] = {}


def prompt_sum(prompt: Reading, input: Tensor, projection: nn.Module, residual: Tensor) -> Tensor:
    """Return `residual + projection(input)`, which may be the residual itself.

    Args:
        prompt: that is being read.
        input: `[B, N, I]`.
        projection: `nn.Linear(I, O)`, or what a module has in its place.
        residual: `[B, N, O]`.
    """
    if (prompt.overwrites or prompt.poisons) and prompt.is_own(residual):
        weight = _plain_weight(input, projection, residual)
        if weight is not None and overwriting_pays(input, weight, residual, prompt.reader()) and prompt.overwrites:
            _rows(residual).addmm_(_rows(input), weight.t())
            return prompt.overwritten(residual)
    return prompt.added(projection(input), residual)


def overwriting_pays(input: Tensor, weight: Tensor, residual: Tensor, norm: nn.Module | None) -> bool:
    """Return whether a sum in place is faster than one beside the product, with the norm that reads it.

    It is tried out where it is not known, unless a graph is being captured.
    """
    rows = input.numel() // weight.shape[1]
    if not input.is_cuda or rows < FEWEST_ROWS:
        return False
    size = (input.device, input.dtype, rows, tuple(weight.shape), norm is None)
    if size not in _pays:
        if torch.cuda.is_current_stream_capturing() or not backend.nothing_watches(input):
            return False
        _pays[size] = _tried(input, weight, residual, norm)
    return _pays[size]


def _tried(input: Tensor, weight: Tensor, residual: Tensor, norm: nn.Module | None) -> bool:
    scratch = residual.clone()

    def beside() -> object:
        product = F.linear(input, weight)
        return residual + product if norm is None else add_norm(product, residual, norm)

    def over() -> object:
        _rows(scratch).addmm_(_rows(input), weight.t())
        return scratch if norm is None else norm(scratch)

    return fastest({"beside": beside, "over": over}, "beside") == "over"


def _plain_weight(input: Tensor, projection: nn.Module, residual: Tensor) -> Tensor | None:
    """Return the weight of a product without a bias that may be added to a residual; None for any other."""
    if not residual.is_contiguous() or not input.is_contiguous():
        return None
    parameters = packing.packed_parameters(input, (projection,))
    if isinstance(parameters, str) or parameters[1] is not None:
        return None
    return parameters[0] if input.dtype == residual.dtype == parameters[0].dtype else None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1])
