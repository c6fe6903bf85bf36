"""Products with weights whose blocks have a scale each (`blocks`), as fine-grained FP8 checkpoints have them.

I in_features, O out_features, N rows:

    y = norm(x) Wᵀ + b (+ residual)                  activation(x' W_gᵀ + b_g) * (x' W_uᵀ + b_u)

transformers puts `FP8Linear` in the place of a checkpoint's quantised layers; its products are kernels from the Hub,
which also round the input to 8 bits, block by block. Loading a rewritten model makes them `BlockLinear`: the same
parameters under the same names, so that what is saved has the checkpoint's bytes, with these products. The input keeps
its 16 bits, so the result is that of the dequantised model, where the original rounds once more.

    one row                read at the speed of memory, a group of 16 bytes at a time; norm, residual, gate inside
    2 to 16 rows           the same bytes, on the tensor cores
    more, or gradients     the weight is dequantised for the call, and torch multiplies
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..aiter import blockscale as aiter_blockscale
from ..core import backend
from ..device import row_tiles
from ..launching.launch import HIP, WAVE, Kernel, overlaps, processors
from ..launching.tiles import Tile
from ..loading.original_checkpoint import Adopter
from ..norms.norm_form import Prologue
from .block_groups import in_words
from .block_rows import MOST_ROWS, launch_block_rows
from .blocks import GROUP, Blocks, dequantized, reason_against
from .packing import REASONS as PACKING_REASONS
from .packing import as_one
from .prologue import is_trained, norm_arguments, prologue_of

CASES = """
def weight(rows, cols):
    scale = tensor(-(-rows // 128), -(-cols // 128), dtype=torch.float32)
    return Blocks(tensor(rows, cols, dtype=torch.float8_e4m3fn), scale, 128, 128)

def product(rows, cols, norm, kind=""):
    rows = rows if kind else many(rows)  # halves of whole blocks
    out = tensor(1, 1, rows // 2 if kind else rows)
    given, added = (prologue(cols), None) if norm else (None, None if kind else out)
    return _launch_row(tensor(1, 1, cols), weight(rows, cols), None, given, added, out, kind)

size, inner = LLAMA_8B.hidden_size, LLAMA_8B.intermediate_size
case("8B, qkv", product, 6144, size, norm=True)
case("8B, gate and up", product, 2 * inner, size, norm=True, kind="silu")
case("8B, down", product, size, inner, norm=False)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from .block_groups import block_scales, eight_sums, octets, row_groups, sixteen
    from .gated_activation import _activate

    @triton.jit
    def _block_linear_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        norm_ptr,
        values_ptr,
        scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        eps,
        offset,
        I: tl.constexpr,  # noqa: E741
        O: tl.constexpr,  # noqa: E741
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        EXPONENTS: tl.constexpr,
        SIZE: tl.constexpr,
        DECODE: tl.constexpr,
        PTX: tl.constexpr,
        NORM: tl.constexpr,
        NORM_WEIGHT: tl.constexpr,
        BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr,
        ACTIVATION: tl.constexpr,
        OVERLAP: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_GROUPS: tl.constexpr,
    ):
        """One row; with an ACTIVATION the gated product, for which a program takes the same rows of both halves."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
        column = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = (column < O)[:, None]
        row_ptr = values_ptr + column.to(tl.int64)[:, None] * (I // 16 * SIZE)
        # Rows of one block have the same scales.
        one = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, 1 if ROWS % BLOCK_ROWS == 0 else BLOCK_ROWS)
        alive = (one < O)[:, None]
        scale_row = scale_ptr + (one // ROWS)[:, None] * ((I + COLUMNS - 1) // COLUMNS)
        second_row = scale_row + (O + ROWS - 1) // ROWS * ((I + COLUMNS - 1) // COLUMNS)
        second_ptr = row_ptr + O * (I // 16 * SIZE)
        loaded = row_groups(row_ptr, live, 0, I // 16, SIZE, BLOCK_GROUPS)
        if ACTIVATION != "":
            second = row_groups(second_ptr, live, 0, I // 16, SIZE, BLOCK_GROUPS)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        total = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.float32)
        total_up = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.float32)
        square = tl.zeros((1, BLOCK_GROUPS), tl.float32)
        for start in tl.range(0, I // 16, BLOCK_GROUPS, num_stages=1):
            following = row_groups(row_ptr, live, start + BLOCK_GROUPS, I // 16, SIZE, BLOCK_GROUPS)
            if ACTIVATION != "":
                second_following = row_groups(second_ptr, live, start + BLOCK_GROUPS, I // 16, SIZE, BLOCK_GROUPS)
            col = octets(start, False, BLOCK_GROUPS)[None, :]
            x = sixteen(x_ptr + col, col < I, BLOCK_GROUPS)
            if NORM:
                square += tl.sum(tl.reshape(x * x, (1, BLOCK_GROUPS, 16)), 2)
                if NORM_WEIGHT:
                    x *= sixteen(norm_ptr + col, col < I, BLOCK_GROUPS) + offset
            scale = block_scales(scale_row, alive, start, I // 16, COLUMNS // 16, EXPONENTS, BLOCK_GROUPS)
            total += eight_sums(loaded, x, BLOCK_GROUPS, DECODE, PTX) * scale
            loaded = following
            if ACTIVATION != "":
                scale = block_scales(second_row, alive, start, I // 16, COLUMNS // 16, EXPONENTS, BLOCK_GROUPS)
                total_up += eight_sums(second, x, BLOCK_GROUPS, DECODE, PTX) * scale
                second = second_following
        live = column < O
        factor = 1.0
        if NORM:
            factor = tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / I + eps)
        y = tl.sum(total, 1) * factor
        if BIAS:
            y += tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            up = tl.sum(total_up, 1) * factor
            if BIAS:
                up += tl.load(bias_ptr + O + column, mask=live, other=0.0).to(tl.float32)
            y = _activate(y, ACTIVATION) * up
        if RESIDUAL:
            y += tl.load(residual_ptr + column, mask=column < O, other=0.0).to(tl.float32)
        tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=column < O)

    block_linear_kernel = Kernel(_block_linear_kernel)

REASONS = {
    **PACKING_REASONS,
    "blocks": "weight and scales do not lie as the kernels read them, or the scales are none that they know",
    "another_device": "weight, bias or residual lie on another device than the input",
    "dtype": "bias or residual have a dtype that the kernels do not write",
    "shape": "input or residual have another shape than the weight's kernels take",
}

Parameters = tuple[Blocks, Tensor | None]


class ScaledLinear(nn.Module):
    """A layer whose weight is no tensor that could be multiplied as it lies, and which has products of its own."""

    def is_intact(self) -> bool:
        """Return whether the weight is still what the products read."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[O, I]`, dequantised."""
        raise NotImplementedError

    @staticmethod
    def product(
        input: Tensor,
        projections: Sequence[nn.Module],
        norm: nn.Module | None,
        residual: Tensor | None,
        kind: str | None,
    ) -> Tensor | None:
        """Return what `block_linear` does, of layers of this kind."""
        raise NotImplementedError


class BlockLinear(Adopter, ScaledLinear):
    """A layer whose weight has a scale for each block; the first base of what takes `FP8Linear`'s place."""

    @staticmethod
    def adopt(model: nn.Module) -> None:
        """Give the quantised layers of a loaded model the products of this file, where they read such weights."""
        for module in model.modules():
            if _is_block_scaled(module) and reason_against(blocks_of(module)) is None:
                kind = type(module)
                if kind not in _classes:
                    _classes[kind] = type(kind.__name__, (BlockLinear, kind), {"__module__": __name__})
                module.__class__ = _classes[kind]

    def is_intact(self) -> bool:
        """Return whether the weight has 8 bits: a model that was cast has others."""
        weight = self._parameters["weight"]
        return weight is not None and weight.dtype == torch.float8_e4m3fn

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[O, I]`, dequantised."""
        return dequantized(blocks_of(self), dtype)

    @staticmethod
    def product(
        input: Tensor,
        projections: Sequence[nn.Module],
        norm: nn.Module | None,
        residual: Tensor | None,
        kind: str | None,
    ) -> Tensor | None:
        """Return what `block_linear` does; the gated product of one row only."""
        if not takes_rows(input) or (kind is not None and input.numel() != input.shape[-1]):
            return None
        parameters = block_parameters(projections)
        reason = parameters if isinstance(parameters, str) else _reason_against(input, parameters, residual, norm)
        if reason is not None:
            backend.count_fallback("block_linear", reason, projections[0])
            return None
        if kind is not None and parameters[0].shape[0] // 2 % parameters[0].rows:  # type: ignore[union-attr]
            return None
        return _by_kernel(input, parameters, norm, residual, kind or "")  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of `[…, I]`, `[…, O]`."""
        if not is_block_linear(self):  # a model that was cast: its own class has an answer
            output: Tensor = super().forward(input)
            return output
        if (rounded := _by_aiter(self, input)) is not None:
            return rounded
        return block_affine(input, (blocks_of(self), self._parameters["bias"]))


_classes: dict[type, type] = {}
"""What takes the place of a class."""


def _is_block_scaled(module: nn.Module) -> bool:
    if type(module).__name__ != "FP8Linear" or isinstance(module, BlockLinear):
        return False
    scale, size = module._parameters.get("weight_scale_inv"), getattr(module, "block_size", None)
    weight = module._parameters.get("weight")
    plain = type(weight) is nn.Parameter and type(scale) is nn.Parameter
    return plain and size is not None and scale.dim() == 2 and weight.dtype == torch.float8_e4m3fn  # type: ignore[union-attr]


def blocks_of(module: nn.Module) -> Blocks:
    """Return the weight of a block-scaled layer."""
    weight, scale = module._parameters["weight"], module._parameters["weight_scale_inv"]
    size: Any = module.block_size
    return Blocks(weight.detach(), scale.detach(), *size)  # type: ignore[union-attr]


def is_block_linear(projection: nn.Module) -> bool:
    """Return whether a projection has products of its own; they stand for it where nothing observes it."""
    return isinstance(projection, ScaledLinear) and projection.is_intact()


def are_blocks(projections: Sequence[nn.Module]) -> bool:
    """Return whether all projections have products of their own, and the same."""
    first = getattr(projections[0], "product", None)
    return all(is_block_linear(one) and getattr(one, "product", None) is first for one in projections)


def block_parameters(projections: Sequence[nn.Module]) -> Parameters | str:
    """Return weight and bias of projections as one; or why they are not one, a key of `REASONS`."""
    if any(backend.observed(projection) for projection in projections):
        return "observed"
    first: Any = projections[0]
    biases = [projection._parameters["bias"] for projection in projections]
    if len(projections) == 1:
        return blocks_of(first), biases[0]
    rows, columns = first.block_size
    alike = all(tuple(p.block_size) == (rows, columns) for p in projections)  # type: ignore[arg-type]
    whole = all(p.get_parameter("weight").shape[0] % rows == 0 for p in projections[:-1])
    if not alike or not whole or len({bias is None for bias in biases}) > 1:
        return "different_weights"
    # Nothing may hold the parameters' memory while they are moved into one.
    found = {}
    for name in ("weight", "weight_scale_inv", *(() if biases[0] is None else ("bias",))):
        one = as_one([projection.get_parameter(name) for projection in projections])
        if isinstance(one, str):
            return one
        found[name] = one.detach()
    return Blocks(found["weight"], found["weight_scale_inv"], rows, columns), found.get("bias")


def block_linear(
    input: Tensor,
    projections: Sequence[nn.Module],
    norm: nn.Module | None = None,
    residual: Tensor | None = None,
    kind: str | None = None,
) -> Tensor | None:
    """Return `projection(norm(input)) + residual` of projections with products of their own as one, by a kernel.

    With `kind`, an activation of `gated_activation`, the gated product. None where the projections have to be called;
    why is counted.
    """
    first: Any = projections[0]
    found: Tensor | None = first.product(input, projections, norm, residual, kind)
    return found


def takes_rows(input: Tensor) -> bool:
    """Return whether `input` is rows for these kernels."""
    return row_tiles.few_rows(input, MOST_ROWS)


def block_affine(input: Tensor, parameters: Parameters) -> Tensor:
    """Return `input Wᵀ + b`, for any input."""
    if takes_rows(input) and _reason_against(input, parameters, None, None) is None:
        return _by_kernel(input, parameters, None, None, "")
    weight, bias = parameters
    return F.linear(input, dequantized(weight, input.dtype), bias if bias is None else bias.to(input.dtype))


def _by_aiter(module: Any, input: Tensor) -> Tensor | None:
    """Return the product of many rows in 8 bits, where that is asked for by name."""
    if input.numel() <= MOST_ROWS * input.shape[-1] or not backend.nothing_watches(input):
        return None
    if _reason_against(input, (blocks_of(module), module._parameters["bias"]), None, None) is not None:
        return None
    weight, scale, bias = (module._parameters[name] for name in ("weight", "weight_scale_inv", "bias"))
    found: Tensor | None = aiter_blockscale.product(input, weight, scale, module.block_size, bias)
    return found


def _reason_against(
    input: Tensor, parameters: Parameters, residual: Tensor | None, norm: nn.Module | None
) -> str | None:
    """Return why the kernels do not stand for the module with these tensors, a key of `REASONS`.

    The weight is looked at for each call: what a layer was adopted with may have been replaced since.
    """
    weight, bias = parameters
    return reason_against_call(input, weight, bias, residual, norm) or reason_against(weight)


def reason_against_call(
    input: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None, norm: nn.Module | None
) -> str | None:
    """Return why kernels of a weight with `values`, `shape` and `columns` do not take a call, a key of `REASONS`."""
    beside = [tensor for tensor in (bias, residual) if tensor is not None]
    if backend.wants_gradient(input, *beside) or (norm is not None and is_trained(norm)):
        return "gradient"
    if backend.autocasts(input.device.type):
        return "autocast"
    if any(tensor.device != input.device for tensor in (weight.values, *beside)):
        return "another_device"
    if any(tensor.dtype not in row_tiles.KERNEL_DTYPES for tensor in beside):
        return "dtype"
    if residual is not None and torch.promote_types(input.dtype, residual.dtype) != residual.dtype:
        return "dtype"
    if residual is not None and residual.shape != (*input.shape[:-1], weight.shape[0]):
        return "shape"
    if weight.shape[1] != input.shape[-1] or (weight.columns % 32 and input.numel() != input.shape[-1]):
        return "shape"
    return None if bias is None or bias.is_contiguous() else "strided"


def _by_kernel(
    input: Tensor, parameters: Parameters, norm: nn.Module | None, residual: Tensor | None, kind: str
) -> Tensor:
    prologue = None if norm is None else prologue_of(norm)
    one_row = input.numel() == input.shape[-1]
    several = input.dtype != torch.float16 and not HIP  # on AMD's chips the norm is cheaper once (`fp8.fp8_linear`)
    if not isinstance(prologue, Prologue) or not (one_row or several):
        input, prologue = input if norm is None else norm(input), None
    weight, bias = parameters
    size = weight.shape[0] // 2 if kind else weight.shape[0]
    out = input.new_empty((*input.shape[:-1], size), dtype=None if residual is None else residual.dtype)
    if one_row:
        _launch_row(input, weight, bias, prologue, residual, out, kind)
    else:
        launch_block_rows(input, weight, bias, prologue, residual, out)
    return out


def _launch_row(
    input: Tensor,
    weight: Blocks,
    bias: Tensor | None,
    prologue: Prologue | None,
    residual: Tensor | None,
    out: Tensor,
    kind: str = "",
    tile: Tile | None = None,
) -> None:
    size, cols = weight.shape
    size = size // 2 if kind else size
    block_rows, block_groups, num_warps = tile or rule(
        size, cols, processors(input.get_device() if input.is_cuda else None), gated=bool(kind)
    )
    read = in_words(weight)
    norm, eps, offset, has_weight = norm_arguments(prologue, input)
    overlap = overlaps(input)
    with backend.device_guard(input):
        block_linear_kernel.launch(
            (-(-size // block_rows), 1, 1),
            num_warps,
            (
                input.contiguous(), norm, read.values, read.scale, input if bias is None else bias,
                input if residual is None else residual.contiguous(), out,
            ),
            (),
            (),
            (eps, offset),
            (
                cols, size, weight.rows, weight.columns, weight.exponents, read.size, read.decode, read.ptx,
                prologue is not None, has_weight, bias is not None, residual is not None, kind, overlap, block_rows,
                block_groups,
            ),
            overlap=overlap,
        )  # fmt: skip


WIDE = 512
"""Groups of a row from which on it takes twice the threads."""


@functools.cache
def rule(size: int, cols: int, processors: int, *, gated: bool) -> Tile:
    """Return rows (of each half), groups and warps of a program of one row: a thread has a group of all these rows.

    Wide rows take twice the threads, and few short ones half the rows, so that there are five programs for each
    multiprocessor: of 8B's on an H100 4096 × 14336 24.1 → 21.4 µs, 4096 × 4096 8.1 → 7.4 (torch 2.11, Triton 3.6).
    With eight rows AMD's compilers hold up to 395 registers (gfx942, Triton 3.8); with four, 123.
    """
    groups = cols // GROUP
    block_groups = 256 if groups >= WIDE else min(128, 1 << (groups - 1).bit_length())
    if block_groups <= 128 and groups % block_groups:  # a block that divides the columns needs no mask
        block_groups = max(32, min(block_groups, groups & -groups))
    block_rows = (4 if HIP else 8) // (2 if gated else 1)
    if not gated and groups < WIDE and size < 5 * processors * block_rows:
        block_rows = 4
    while size % block_rows:
        block_rows //= 2
    return block_rows, block_groups, max(WAVE, block_groups) // WAVE
