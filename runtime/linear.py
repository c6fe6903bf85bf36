"""Products of a few rows with large weights, with what stands before and after them in the same kernel.

N rows (the product of the leading shape), I in_features, O out_features:

    linear         y = x' Wᵀ + b (+ residual)                    x' = norm(x), or x
    gated_linear   y = activation(x' W_gᵀ + b_g) * (x' W_uᵀ + b_u)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from .gated_activation import gated_activation
from .packing import packed_linear


def linear(
    input: Tensor, projection: nn.Module, *, norm: nn.Module | None = None, residual: Tensor | None = None
) -> Tensor:
    """Return `projection(norm(input)) + residual`.

    Args:
        input: `[N, I]`.
        projection: `nn.Linear(I, O)`.
        norm: of the input; None for none.
        residual: `[N, O]`, added to the product; None for none.

    Returns:
        `[N, O]`.
    """
    output: Tensor = projection(input if norm is None else norm(input))
    return output if residual is None else residual + output


def gated_linear(
    input: Tensor,
    projections: Sequence[nn.Module],
    activation: Callable[[Tensor], Tensor],
    *,
    norm: nn.Module | None = None,
) -> Tensor:
    """Return `activation(gate(norm(input))) * up(norm(input))`.

    Args:
        input: `[N, I]`.
        projections: `(gate, up)`, each `nn.Linear(I, O)`, or one `nn.Linear(I, 2 O)` whose first half is the gate.
        activation: a module or function.
        norm: of the input; None for none.

    Returns:
        `[N, O]`.
    """
    if norm is not None:
        input = norm(input)
    if len(projections) == 1:
        gate, up = projections[0](input).chunk(2, dim=-1)
    else:
        gate, up = packed_linear(input, *projections)
    return gated_activation(gate, up, activation)
