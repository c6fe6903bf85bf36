"""Products of few rows with large weights, with what stands before and after them in the same kernel.

I in_features, O out_features, N rows (the product of the leading shape):

    linear         y = activation(x' Wᵀ + b) (* factor) (+ residual)   x' = norm(x), or x
    gated_linear   y = activation(x' W_gᵀ + b_g) * (x' W_uᵀ + b_u)

For one row the time is that of reading the weight, and every launch beside it costs more than the work it does. So one
kernel holds the RMSNorm (each program sums the squares of the whole row, which is in the L2 cache) or the LayerNorm
(each program reads the row once more), the product, the activation and the residual, in fp32 throughout. Inside a
graph it starts before the kernel before it has ended, loads its first weights, and only then waits for its input. 2 to
16 rows have kernels of their own (`skinny`); for more, and where `tiles` says that torch's own product is faster, the
parts run one after the other. A weight in 8 bits is read by the same kernels, with a scale for each of its rows
(`fp8.fp8_gemv`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..core import backend, lazy_hooks, prefill_context
from ..core.sharded_models import is_local
from ..device.row_tiles import KERNEL_DTYPES
from ..device.row_tiles import few_rows as few_rows_of
from ..launching.tiles import Tile, tile
from ..norms.sum_norm import added, normed
from ..tensor_parallel.forwards import summed
from . import packing
from .block_linear import are_blocks, block_linear, is_block_linear
from .gated_activation import activation_kind, gated_activation
from .gemv import Weight, launch_gated, launch_linear
from .prologue import Norm, prologue_of, several_rows_norm
from .skinny import MOST_ROWS, launch_skinny_linear, skinny_kind, takes_norm

CASES = """
def product(rows, cols, out, norm=False, residual=False):
    out = many(out)
    before, after = prologue(cols) if norm else None, tensor(rows, 1, out) if residual else None
    return few_rows(tensor(rows, 1, cols), tensor(out, cols), None, before, after)

def gated(model):
    size = model.hidden_size
    return _gated(tensor(1, 1, size), tensor(2 * model.intermediate_size, size), None, "silu", prologue(size))

for rows in (1, 8):
    name = "" if rows == 1 else f", {rows} rows"
    for model in LLAMAS:
        size = model.hidden_size
        case(f"{model.name}, down{name}", product, rows, model.intermediate_size, size, residual=True)
        case(f"{model.name}, head{name}", product, rows, size, model.vocabulary, norm=True)
kv = LLAMA_8B.hidden_size + 2 * LLAMA_8B.kv_heads * LLAMA_8B.head_dim
for rows in (8, 32):
    case(f"Llama 8B, qkv, {rows} rows", product, rows, LLAMA_8B.hidden_size, kv, norm=True)
for model in LLAMAS:
    case(model.name, gated, model)

def plain(model, activation):
    size, inner = model.hidden_size, model.intermediate_size
    given = tensor(1, 1, size), tensor(inner, size), parameter(inner)
    return launch_product(*given, layer_norm(size), None, tensor(1, 1, inner), activation)

for model in LLAMAS:
    case(f"{model.name}, norm, GELU", plain, model, "gelu")
case("1B, LayerNorm, GELU tanh", plain, LLAMA_1B, "gelu_tanh")
"""


def linear(
    input: Tensor,
    projection: nn.Module,
    *,
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    multiply: Callable[[Tensor, nn.Module], Tensor] | None = None,
) -> Tensor:
    """Return `projection(norm(input)) + residual`.

    Args:
        input: `[N, I]`.
        projection: `nn.Linear(I, O)`.
        norm: of the input; None for none.
        residual: `[N, O]`, added to the product; None for none.
        multiply: computes the product of many rows, as `routed_linear` does; None for a call of the projection.

    Returns:
        `[N, O]`.
    """
    prompt = prefill_context.current()
    if prompt is not None and residual is not None:
        input, residual = prompt.narrowed(input, residual)
    if is_block_linear(projection):
        scaled = block_linear(input, (projection,), norm, residual)
        if scaled is not None:
            return scaled
    elif takes_few_rows(input):
        if (parts := summed(projection)) is not None and not (parts.splits and norm is not None):
            with parts.lifted():
                part = linear(parts.ranks.part(input) if parts.splits else input, projection, norm=norm)
            return parts.finished(part, residual)
        input, prologue = before(input, norm)
        parameters = packing.packed_parameters(input, (projection,))
        if isinstance(parameters, tuple) and _fits(input, parameters, residual):
            product = lazy_hooks.product(input, *parameters, prologue) if residual is None else None
            if product is None:
                product = few_rows(input, *parameters, prologue, residual)
            if product is not None:
                return product
        elif isinstance(parameters, str) and not is_local(projection):
            backend.count_fallback("linear", parameters, projection)
        norm = norm if prologue is not None else None
    input = input if norm is None else normed(input, norm)
    output: Tensor = projection(input) if multiply is None else multiply(input, projection)
    return output if residual is None else added(output, residual, projection)


def takes_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `F.linear(input, weight, bias)` has a kernel for few rows, and torch's own is not to run."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_contiguous() and weight.dim() == 2
    if not plain or not takes_few_rows(input) or not _fits(input, (weight, bias), None):
        return False
    rows, cols = weight.shape
    kind = "linear" if is_one_row(input) else skinny_kind(input.numel() // cols)
    return tile_for(kind, rows, cols, weight) is not None


def gated_linear(
    input: Tensor,
    projections: Sequence[nn.Module],
    activation: Callable[[Tensor], Tensor],
    *,
    norm: nn.Module | None = None,
    multiply: Callable[..., Sequence[Tensor]] = packing.packed_linear,
) -> Tensor:
    """Return `activation(gate(norm(input))) * up(norm(input))`.

    Args:
        input: `[N, I]`.
        projections: `(gate, up)`, each `nn.Linear(I, O)`, or one `nn.Linear(I, 2 O)` whose first half is the gate.
        activation: a module or function.
        norm: of the input; None for none.
        multiply: computes the two products of many rows.

    Returns:
        `[N, O]`.
    """
    kind = activation_kind(activation)
    if are_blocks(projections):
        scaled = block_linear(input, projections, norm, kind=kind) if kind is not None else None
        if scaled is not None:
            return scaled
        scaled = block_linear(input, projections, norm)
        if scaled is not None:
            gate, up = scaled.chunk(2, dim=-1)
            return gated_activation(gate, up, activation)
    elif kind is not None and takes_few_rows(input):
        input, prologue = before(input, norm)
        parameters = packing.packed_parameters(input, projections)
        if isinstance(parameters, tuple) and _fits(input, parameters, None):
            product = (_gated if is_one_row(input) else _gated_rows)(input, *parameters, kind, prologue)
            if product is not None:
                return product
        elif isinstance(parameters, str):
            backend.count_fallback("gated_linear", parameters, projections[0])
        norm = norm if prologue is not None else None
    if norm is not None:
        input = normed(input, norm)
    if len(projections) == 1:
        gate, up = projections[0](input).chunk(2, dim=-1)
    elif backend.are_watched((*projections, activation)):
        backend.count_fallback("packed_linear", "observed", projections[0])
        return activation(projections[0](input)) * projections[1](input)
    else:
        gate, up = multiply(input, *projections)
    return gated_activation(gate, up, activation)


def takes_few_rows(input: Tensor) -> bool:
    """Return whether `input` is rows that a kernel of a decode step reads: nobody traces it or wants gradients."""
    return few_rows_of(input, MOST_ROWS)


def is_one_row(input: Tensor) -> bool:
    """Return whether `input` is a single row, for which the kernels are those of this file."""
    return input.numel() == input.shape[-1]


def before(input: Tensor, norm: nn.Module | None) -> tuple[Tensor, Norm | None]:
    """Return the input of a kernel and the norm it computes itself; a norm that it cannot compute is called here.

    Of a LayerNorm, which no method tells of, a step knows when it has been called: it is put off. One without a weight
    is left to its own kernel where there are several rows: in a product's it took 1.2 µs more on an H100 (NanoChat, 2
    and 8 rows, Triton 3.6), where those with weights save up to 8% of a step (Llama 1B; HunYuan 1.8B 2%).
    """
    if norm is None:
        return input, None
    prologue = prologue_of(norm)
    if not is_one_row(input) and prologue is not None and (prologue.weight is None or not takes_norm(input)):
        prologue = None
    if prologue is not None:
        return input, prologue
    normed = norm(input)
    found = lazy_hooks.normed(normed) if is_one_row(normed) else None
    return (normed, None) if found is None else found


def _fits(input: Tensor, parameters: tuple[Tensor, Tensor | None], residual: Tensor | None) -> bool:
    weight, bias = parameters
    same = all(t is None or (t.dtype in KERNEL_DTYPES and t.device == input.device) for t in (weight, bias, residual))
    rows = input.numel() // input.shape[-1]
    added = residual is None or (
        residual.numel() == rows * weight.shape[0]
        and torch.promote_types(input.dtype, residual.dtype) == residual.dtype  # which is what the kernels write
        and not backend.wants_gradient(residual)
    )
    return same and added and weight.dtype == input.dtype and weight.shape[1] == input.shape[-1]


def few_rows(
    input: Tensor, weight: Tensor, bias: Tensor | None, prologue: Norm | None, residual: Tensor | None
) -> Tensor | None:
    """Return the product by a kernel; None where torch's own operators are to run instead."""
    out = input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=None if residual is None else residual.dtype)
    return out if launch_product(input, weight, bias, prologue, residual, out) else None


def launch_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    prologue: Norm | None,
    residual: Tensor | None,
    out: Tensor,
    activation: str = "",
    factor: float = 1.0,
) -> bool:
    """Write the product by a kernel; return False where torch's own operators are to run instead."""
    rows, cols = weight.shape
    one_row = is_one_row(input)
    kind = "linear" if one_row else skinny_kind(input.numel() // cols)
    shape = tile_for(kind, rows, cols, weight)
    if shape is None:
        return False
    if one_row:
        launch_linear(input, Weight(weight), bias, prologue, residual, out, shape, activation, factor)
    else:
        norm = several_rows_norm(prologue)
        launch_skinny_linear(input, weight, bias, norm, residual, out, shape, activation, factor)
    return True


def _gated(input: Tensor, weight: Tensor, bias: Tensor | None, kind: str, prologue: Norm | None) -> Tensor | None:
    """Return the gated product by a kernel; None where torch's own operators are to run instead."""
    rows, cols = weight.shape[0] // 2, weight.shape[1]
    shape = tile_for("gated", rows, cols, weight)
    if shape is None:
        return None
    out = input.new_empty((*input.shape[:-1], rows))
    launch_gated(input, Weight(weight), bias, kind, prologue, out, shape)
    return out


def _gated_rows(input: Tensor, weight: Tensor, bias: Tensor | None, kind: str, prologue: Norm | None) -> Tensor | None:
    """Return what `_gated` does for several rows, whose norm is an RMSNorm."""
    rows, cols = weight.shape
    count = input.numel() // cols
    shape = tile_for(skinny_kind(count), rows, cols, weight)
    if shape is None:
        return None
    out = input.new_empty((*input.shape[:-1], rows // 2))
    launch_skinny_linear(input, weight, bias, several_rows_norm(prologue), None, out, shape, kind, gated=True)
    return out


def tile_for(kind: str, rows: int, cols: int, weight: Tensor) -> Tile | None:
    """Return the tile for a weight: `tiles.tile` on its device; None for torch's own operators."""
    return tile(kind, rows, cols, weight.element_size(), weight.get_device() if weight.is_cuda else None)
