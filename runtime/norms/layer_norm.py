"""LayerNorm over the last dimension (Ba et al., 2016), all in fp32 with one rounding at the end.

N is any leading shape, H the hidden size, G the rows of an N-D weight, `x32` the input in fp32:

    normed = (x32 - mean(x32)) * rsqrt(mean((x32 - mean(x32))²) + eps)
    Cohere's own class   cast(float(weight) * normed)     weight [H], or [G, H] for per-head norms
    torch's LayerNorm    cast(normed * weight + bias)     used through `add_layer_norm`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..aiter import aiter_norms
from ..core import backend, lazy_hooks
from ..device import row_tiles
from ..launching.launch import Kernel, overlaps
from .layer_norm_backward import layer_norm_backward
from .layer_norm_backward import refusal as backward_refusal

CASES = """
case("4096 columns", layer_norm, tensor(1, 4096), tensor(4096), None, EPS)
"""

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..device.pdl import follow

    @triton.jit
    def _load(x_row, residual_row, sum_row, col, mask, ADD: tl.constexpr, STORE: tl.constexpr):  # type: ignore[no-untyped-def]
        x = tl.load(x_row + col, mask=mask, other=0.0)
        if ADD:
            residual = tl.load(residual_row + col, mask=mask, other=0.0)
            x = (residual.to(tl.float32) + x.to(tl.float32)).to(sum_row.dtype.element_ty)
            if STORE:
                tl.store(sum_row + col, x, mask=mask)
        return x.to(tl.float32)

    @triton.jit
    def _scale(normed, weight_row, bias_row, col, mask, WEIGHTED: tl.constexpr, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
        if WEIGHTED:
            normed = normed * tl.load(weight_row + col, mask=mask, other=0.0).to(tl.float32)
        if BIASED:
            normed = normed + tl.load(bias_row + col, mask=mask, other=0.0).to(tl.float32)
        return normed

    @triton.jit(do_not_specialize=["row_count"])
    def _layer_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        residual_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        sum_ptr,
        row_count,
        inner,
        outer_stride,
        inner_stride,
        residual_stride,
        eps,
        H: tl.constexpr,
        G: tl.constexpr,
        ADD: tl.constexpr,
        WEIGHTED: tl.constexpr,
        BIASED: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Normalise BLOCK_ROWS rows a program; with ADD, of the rounded sum of x and residual, which it stores."""
        follow(OVERLAP)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        live = row < row_count
        x_row = x_ptr + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
        residual_row = residual_ptr + row.to(tl.int64) * residual_stride
        out_row = out_ptr + row.to(tl.int64) * H
        sum_row = sum_ptr + row.to(tl.int64) * H
        weight_row = weight_ptr + (row % G) * H
        bias_row = bias_ptr + (row % G) * H
        if H <= BLOCK_COLS:
            col = tl.arange(0, BLOCK_COLS)[None, :]
            mask = live & (col < H)
            x = _load(x_row, residual_row, sum_row, col, mask, ADD, True)
            centred = tl.where(col < H, x - tl.sum(x, axis=1, keep_dims=True) / H, 0.0)
            normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / H + eps)
            normed = _scale(normed, weight_row, bias_row, col, mask, WEIGHTED, BIASED)
            tl.store(out_row + col, normed.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
            for start in range(0, H, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                total += _load(x_row, residual_row, sum_row, col, live & (col < H), ADD, True)
            mean = tl.sum(total, axis=1, keep_dims=True) / H
            squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
            for start in range(0, H, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                x = _load(x_row, residual_row, sum_row, col, live & (col < H), ADD, False)
                centred = tl.where(col < H, x - mean, 0.0)
                squares += centred * centred
            rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / H + eps)
            for start in range(0, H, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                mask = live & (col < H)
                normed = (_load(x_row, residual_row, sum_row, col, mask, ADD, False) - mean) * rstd
                normed = _scale(normed, weight_row, bias_row, col, mask, WEIGHTED, BIASED)
                tl.store(out_row + col, normed.to(out_ptr.dtype.element_ty), mask=mask)

    layer_norm_kernel = Kernel(_layer_norm_kernel)


def layer_norm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    normalized_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Normalise each row of `hidden_states` to mean 0 and variance 1, computing in fp32.

    Args:
        hidden_states: `[N, H]`, any strides.
        weight: `[H]`, or `[G, H]` and more where N ends in G (Cohere's norm of each head), or None.
        bias: shaped as the weight, or None.
        eps: added to the variance, in fp32.
        normalized_shape: of torch's LayerNorm, which is called with all in fp32 where the kernel is not.

    Returns:
        `[N, H]` in the input's dtype, laid out as the torch form lays it out. Differentiable, by a kernel
        (`layer_norm_backward`) or in the torch form, which runs where eps is no number, too.
    """
    if normalized_shape is not None and not _is_kernels(hidden_states, weight, bias, normalized_shape):
        weight, bias = (None if parameter is None else parameter.float() for parameter in (weight, bias))
        return F.layer_norm(hidden_states.float(), normalized_shape, weight, bias, eps).to(hidden_states.dtype)
    if isinstance(eps, torch.Tensor):
        backend.count_fallback("layer_norm", "eps_is_a_tensor")
        return _reference(hidden_states, weight, bias, eps)
    if backend.composes():
        return _reference(hidden_states, weight, bias, eps)
    if backend.wants_gradient(hidden_states, weight, bias):
        reason = _not_learned(hidden_states, weight, bias)
        if reason is None:
            normed: torch.Tensor = _LayerNorm.apply(hidden_states, weight, bias, eps)
            return normed
        backend.count_fallback("layer_norm", str(reason))
        return _reference(hidden_states, weight, bias, eps)
    deferred = lazy_hooks.layer_norm(hidden_states, weight, bias, eps)
    return _op(hidden_states, weight, bias, eps) if deferred is None else deferred


def _is_kernels(
    hidden_states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: Sequence[int]
) -> bool:
    """Return whether one kernel takes the place of torch's and of the casts around it."""
    if backend.composes() or hidden_states.dtype not in (torch.float16, torch.bfloat16):
        return False  # in fp32 there is nothing to cast
    last = len(shape) == 1 and shape[0] == hidden_states.shape[-1] and row_tiles.order(hidden_states) == ()
    return last and not backend.wants_gradient(hidden_states, weight, bias) and backend.uses_triton(hidden_states)


class _LayerNorm(torch.autograd.Function):
    """The norm, and its gradients from what was normalised."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_states, weight, bias)
        ctx.eps = eps
        return launch_layer_norm(hidden_states, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            reference = lambda x, weight, bias: _reference(x, weight, bias, ctx.eps)
            return (*backend.again(reference, ctx.saved_tensors, needed, [gradient]), None)
        hidden_states, weight, bias = ctx.saved_tensors
        return (*layer_norm_backward(gradient, None, hidden_states, weight, bias, ctx.eps, needed[1:]), None)


def _not_learned(hidden_states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> str | None:
    """Return why the torch form is differentiated, and not the kernel."""
    if not backend.learns(hidden_states, weight, bias):
        return "gradient_wanted"
    return refusal(hidden_states, weight, bias) or backward_refusal(hidden_states)


def _reference(
    hidden_states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    x = hidden_states.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    normed = (x - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        normed = weight.to(torch.float32) * normed
    if bias is not None:
        normed = normed + bias.to(torch.float32)
    return normed.to(hidden_states.dtype)


def refusal(hidden_states: torch.Tensor, *parameters: torch.Tensor | None) -> str | None:
    """Return why the kernel does not take these tensors, or None if it does."""
    if not hidden_states.ndim:
        return "scalar"
    if hidden_states.dtype not in row_tiles.KERNEL_DTYPES:
        return "dtype"
    shapes = set()
    for parameter in parameters:
        if parameter is None:
            continue
        if parameter.dtype not in row_tiles.KERNEL_DTYPES:
            return "dtype"
        if parameter.device != hidden_states.device:
            return "weight_shape_or_device"
        shapes.add(parameter.shape)
    if len(shapes) > 1 or any(shape != hidden_states.shape[-len(shape) :] for shape in shapes):
        return "weight_shape_or_device"
    return None


def _forward(
    hidden_states: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    order = row_tiles.order(hidden_states)
    if order == ():
        normed = aiter_norms.layer_norm(hidden_states, weight, bias, eps, _reference)
        if normed is not None:
            return normed
    if backend.uses_triton(hidden_states):
        reason = refusal(hidden_states, weight, bias)
        grouped = any(parameter is not None and parameter.ndim > 1 for parameter in (weight, bias))
        if order is None or (order and grouped):
            reason = reason or "layout"
        if reason is None and order is not None:
            x = hidden_states.permute(order) if order else hidden_states
            return row_tiles.restored(launch_layer_norm(x, weight, bias, eps), order)
        backend.count_fallback("layer_norm", str(reason))
    return _reference(hidden_states, weight, bias, eps)


def launch_layer_norm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel; the result is `out`, contiguous and of the input's shape, where that is given.

    With `summed`, contiguous memory for it, the norm is that of the sum with `residual`.
    """
    if out is None:
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    hidden_size = out.shape[-1]
    row_count = out.numel() // hidden_size
    x, inner, outer_stride, inner_stride = row_tiles.collapse(hidden_states)
    added, added_stride = (x, 0) if residual is None else row_tiles.flatten(residual)
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    parameter = weight if weight is not None else bias
    groups = 1 if parameter is None else parameter.numel() // hidden_size
    block_rows, block_cols, num_warps = row_tiles.tile(hidden_size, row_count)
    overlap = overlaps(out)
    with backend.device_guard(out):
        layer_norm_kernel.launch(
            (-(-row_count // block_rows), 1, 1),
            num_warps,
            (
                x, added, x if weight is None else weight, x if bias is None else bias, out,
                out if summed is None else summed,
            ),
            (row_count,),
            (inner, outer_stride, inner_stride, added_stride),
            (eps,),
            (
                hidden_size, groups, summed is not None, weight is not None, bias is not None, block_rows, block_cols,
                overlap,
            ),
            overlap=overlap,
        )  # fmt: skip
    return out


_op = backend.register(
    "layer_norm", "(Tensor hidden_states, Tensor? weight, Tensor? bias, float eps) -> Tensor", _forward, _reference
)
