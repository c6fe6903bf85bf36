"""Several products of one input in a decode step: one kernel that reads their weights where they lie."""

from __future__ import annotations

from torch import Tensor, nn

from .block_linear import are_blocks, block_linear
from .linear import _fits, before, few_rows, takes_few_rows
from .packing import _parameter, packed_linear, packed_parameters


def packed_step(input: Tensor, *projections: nn.Module, norm: nn.Module | None = None) -> tuple[Tensor, ...]:
    """Return `tuple(projection(norm(input)) for projection in projections)`.

    Args:
        input: `[N, I]`.
        projections: two or more `nn.Linear(I, O_i)`; biases may differ.
        norm: of the input; None for none.

    Returns:
        One `[N, O_i]` for each projection; views of one `[N, ΣO_i]` where the product was packed.
    """
    if are_blocks(projections):
        scaled = block_linear(input, projections, norm)
        if scaled is not None:
            return scaled.split_with_sizes([projection.out_features for projection in projections], -1)  # type: ignore[misc]
    elif takes_few_rows(input):
        input, prologue = before(input, norm)
        norm = norm if prologue is not None else None
        parameters = packed_parameters(input, projections)
        if isinstance(parameters, tuple) and _fits(input, parameters, None):
            product = few_rows(input, *parameters, prologue, None)
            if product is not None:
                return _split(product, projections)
    return packed_linear(input if norm is None else norm(input), *projections)


def _split(product: Tensor, projections: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
    return product.split_with_sizes([_parameter(projection, "weight").shape[0] for projection in projections], -1)
