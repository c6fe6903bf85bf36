"""RMSNorm over the last dimension (Zhang and Sennrich, 2019), in the rounding orders of transformers' modeling files.

N is any leading shape, H the hidden size, `x32` the input in fp32:

    normed = x32 * rsqrt(mean(x32²) + eps)
    Llama            weight * cast(normed)                      result in torch's promotion of the two
    Gemma            cast(normed * (1.0 + float(weight)))       offset=1.0, weight_in_fp32=True
    OLMo2, gpt_oss   cast(weight * normed)                      weight_in_fp32=True
    no weight        cast(normed)                               weight=None
    T5               weight * (normed, rounded to the weight's dtype where that has 16 bits)     rounds_as_weight=True

Reading on: `runtime/cache/preallocated.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..aiter import aiter_norms
from ..core import backend, lazy_hooks
from ..core.probe import INPUT
from ..core.recompute import remember
from ..device import row_tiles
from ..launching.launch import Kernel, overlaps
from .norm_form import Prologue
from .rms_norm_backward import refusal as backward_refusal
from .rms_norm_backward import rms_norm_backward

CASES = """
def of_heads(model):
    packed = tensor(1, PROMPT, model.heads + 2 * model.kv_heads, model.head_dim)
    return rms_norm(packed[:, :, : model.heads], tensor(model.head_dim), EPS)

for model in LLAMAS:
    case(model.name, rms_norm, tensor(1, model.hidden_size), tensor(model.hidden_size), EPS)
size = GEMMA_9B.hidden_size
case("Gemma 9B", rms_norm, tensor(1, size), tensor(size), EPS, offset=1.0, weight_in_fp32=True)
case("131072 columns", rms_norm, tensor(1, 131072), tensor(131072), EPS)
case("Qwen3, heads of a prompt", of_heads, QWEN3_30B)
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
        return x

    @triton.jit
    def _scale(normed, weight, offset, X_DTYPE: tl.constexpr, WEIGHT_IN_FP32: tl.constexpr):  # type: ignore[no-untyped-def]
        shifted = weight.to(tl.float32) + offset
        if not WEIGHT_IN_FP32:
            normed = normed.to(X_DTYPE).to(tl.float32)
            shifted = shifted.to(weight.dtype).to(tl.float32)
        return normed * shifted

    @triton.jit(do_not_specialize=["row_count"])
    def _rms_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        residual_ptr,
        weight_ptr,
        out_ptr,
        sum_ptr,
        row_count,
        inner,
        outer_stride,
        inner_stride,
        residual_stride,
        eps,
        offset,
        H: tl.constexpr,
        ADD: tl.constexpr,
        AFTER: tl.constexpr,
        WEIGHTED: tl.constexpr,
        WEIGHT_IN_FP32: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Normalise BLOCK_ROWS rows a program; with ADD, of the rounded sum of x and residual, which it stores.

        With AFTER the residual is added to the norm.
        """
        follow(OVERLAP)
        row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        live = row < row_count
        x_row = x_ptr + (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
        residual_row = residual_ptr + row.to(tl.int64) * residual_stride
        out_row = out_ptr + row.to(tl.int64) * H
        sum_row = sum_ptr + row.to(tl.int64) * H
        X_DTYPE: tl.constexpr = sum_ptr.dtype.element_ty if ADD else x_ptr.dtype.element_ty
        if H <= BLOCK_COLS:
            col = tl.arange(0, BLOCK_COLS)[None, :]
            mask = live & (col < H)
            if WEIGHTED:
                weight = tl.load(weight_ptr + col, mask=col < H, other=0.0)
            x = _load(x_row, residual_row, sum_row, col, mask, ADD, True).to(tl.float32)
            if AFTER:
                residual = tl.load(residual_row + col, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / H + eps)
            normed = x * rstd
            if WEIGHTED:
                normed = _scale(normed, weight, offset, X_DTYPE, WEIGHT_IN_FP32)
            if AFTER:
                normed += residual
            tl.store(out_row + col, normed.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            squares = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
            for start in range(0, H, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                x = _load(x_row, residual_row, sum_row, col, live & (col < H), ADD, True).to(tl.float32)
                squares += x * x
            rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / H + eps)
            for start in range(0, H, BLOCK_COLS):
                col = start + tl.arange(0, BLOCK_COLS)[None, :]
                mask = live & (col < H)
                x = _load(x_row, residual_row, sum_row, col, mask, ADD, False).to(tl.float32)
                normed = x * rstd
                if WEIGHTED:
                    weight = tl.load(weight_ptr + col, mask=col < H, other=0.0)
                    normed = _scale(normed, weight, offset, X_DTYPE, WEIGHT_IN_FP32)
                if AFTER:
                    normed += tl.load(residual_row + col, mask=mask, other=0.0).to(tl.float32)
                tl.store(out_row + col, normed.to(out_ptr.dtype.element_ty), mask=mask)

    rms_norm_kernel = Kernel(_rms_norm_kernel)


def rms_norm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    weight_in_fp32: bool = False,
    rounds_as_weight: bool = False,
) -> torch.Tensor:
    """Normalise each row of `hidden_states` by its root mean square.

    Args:
        hidden_states: `[N, H]`, any strides.
        weight: `[H]`, or None.
        eps: added to the mean square, in fp32.
        offset: added to the weight (1.0 for Gemma).
        weight_in_fp32: multiply by the weight before the result is rounded (Gemma, OLMo2, gpt_oss), not after (Llama).
        rounds_as_weight: round what is normalised as the weight is rounded, not as the input is (T5).

    Returns:
        `[N, H]`, laid out as the torch form lays it out. The input's dtype if `weight_in_fp32` or without a weight,
        else torch's promotion of the two. Differentiable, by a kernel (`rms_norm_backward`) or in the torch form,
        which runs where eps is no number, too.
    """
    if hidden_states is INPUT:
        if rounds_as_weight:
            raise TypeError("a norm that rounds as its weight does is no stage of another kernel")
        return Prologue(weight, eps, offset, weight_in_fp32)  # type: ignore[return-value]
    if rounds_as_weight and weight is not None and not hidden_states.dtype == weight.dtype != torch.float64:
        backend.count_fallback("rms_norm", "rounds_as_weight")
        return _rounded_as_weight(hidden_states, weight, eps)
    if isinstance(eps, torch.Tensor):
        backend.count_fallback("rms_norm", "eps_is_a_tensor")
        return reference(hidden_states, weight, eps, offset, weight_in_fp32)
    if backend.composes():
        return reference(hidden_states, weight, eps, offset, weight_in_fp32)
    if backend.wants_gradient(hidden_states, weight):
        reason = _not_learned(hidden_states, weight)
        if reason is None:
            given = (hidden_states, weight, eps, offset, weight_in_fp32)
            normed: torch.Tensor = _RmsNorm.apply(*given)
            note_made(normed, hidden_states, weight, (eps, offset, weight_in_fp32))
            return normed
        backend.count_fallback("rms_norm", str(reason))
        return reference(hidden_states, weight, eps, offset, weight_in_fp32)
    deferred = lazy_hooks.rms_norm(hidden_states, weight, eps, offset, weight_in_fp32)
    return _op(hidden_states, weight, eps, offset, weight_in_fp32) if deferred is None else deferred


class _RmsNorm(torch.autograd.Function):
    """The norm, and its gradients from what it was given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        offset: float,
        weight_in_fp32: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_states, weight)
        ctx.form = (eps, offset, weight_in_fp32)
        return launch_rms_norm(hidden_states, weight, eps, offset, weight_in_fp32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight = ctx.saved_tensors
        eps, offset, weight_in_fp32 = ctx.form
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            found = backend.again(lambda x, w: reference(x, w, *ctx.form), (hidden_states, weight), needed, [gradient])
            return (*found, None, None, None)
        of_x, of_weight = rms_norm_backward(
            gradient, None, hidden_states, weight, eps, needed[1], offset=offset, weight_in_fp32=weight_in_fp32
        )
        return of_x, of_weight, None, None, None


def note_made(
    normed: torch.Tensor, source: torch.Tensor, weight: torch.Tensor | None, form: tuple[float, float, bool]
) -> None:
    """Note that `normed` is this norm of `source`, which its own gradient keeps."""
    remember(normed, source, weight, lambda x, w: launch_rms_norm(x, w, *form), lambda x, w: reference(x, w, *form))


def _not_learned(hidden_states: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    """Return why the torch form is differentiated, and not the kernel."""
    if not backend.learns(hidden_states, weight):
        return "gradient_wanted"
    return refusal(hidden_states, weight) or backward_refusal(hidden_states)


def reference(
    hidden_states: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, weight_in_fp32: bool
) -> torch.Tensor:
    """Compute `rms_norm` in plain torch, rounding where the modeling files round."""
    x = hidden_states.to(torch.float32)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(hidden_states.dtype)
    if weight_in_fp32:  # with an offset the files cast the weight, without one torch promotes it: fp64 stays fp64
        return (normed * (offset + weight.float() if offset else weight)).to(hidden_states.dtype)
    return (offset + weight if offset else weight) * normed.to(hidden_states.dtype)


def _rounded_as_weight(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    normed = hidden_states * torch.rsqrt(variance + eps)
    return weight * (normed.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else normed)


def result_dtype(dtype: torch.dtype, weight: torch.Tensor | None, weight_in_fp32: bool) -> torch.dtype:
    """Return the dtype of the norm of a `dtype` input."""
    return dtype if weight is None or weight_in_fp32 else torch.promote_types(dtype, weight.dtype)


def refusal(hidden_states: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    """Return why the kernel does not take these tensors, or None if it does."""
    if not hidden_states.ndim:
        return "scalar"
    if hidden_states.dtype not in row_tiles.KERNEL_DTYPES:
        return "dtype"
    if weight is None:
        return None
    if weight.shape != hidden_states.shape[-1:] or weight.device != hidden_states.device:
        return "weight_shape_or_device"
    return None if weight.dtype in row_tiles.KERNEL_DTYPES else "dtype"


def _forward(
    hidden_states: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, weight_in_fp32: bool
) -> torch.Tensor:
    order = row_tiles.order(hidden_states)
    if order == ():
        normed = aiter_norms.rms_norm(hidden_states, weight, eps, offset, weight_in_fp32, reference)
        if normed is not None:
            return normed
    if backend.uses_triton(hidden_states):
        reason = refusal(hidden_states, weight) or ("layout" if order is None else None)
        if reason is None and order is not None:
            x = hidden_states.permute(order) if order else hidden_states
            return row_tiles.restored(launch_rms_norm(x, weight, eps, offset, weight_in_fp32), order)
        backend.count_fallback("rms_norm", str(reason))
    return reference(hidden_states, weight, eps, offset, weight_in_fp32)


def launch_rms_norm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernel; the result is `out`, contiguous and of the result's shape, where that is given.

    To one row a contiguous `residual` of its shape is added, before anything is rounded. With `summed`, contiguous
    memory for it, the norm is that of the sum with `residual`, of any strides.
    """
    if out is None:
        out = _empty(hidden_states, weight, weight_in_fp32)
    if out.numel() == 0:
        return out
    hidden_size = out.shape[-1]
    row_count = out.numel() // hidden_size
    x, inner, outer_stride, inner_stride = row_tiles.collapse(hidden_states)
    added, added_stride = x if residual is None else residual, 0
    if summed is not None:
        added, added_stride = row_tiles.flatten(added)
    weight = None if weight is None else weight.contiguous()
    block_rows, block_cols, num_warps = row_tiles.tile(hidden_size, row_count)
    overlap = overlaps(out)
    with backend.device_guard(out):
        rms_norm_kernel.launch(
            (-(-row_count // block_rows), 1, 1),
            num_warps,
            (x, added, x if weight is None else weight, out, out if summed is None else summed),
            (row_count,),
            (inner, outer_stride, inner_stride, added_stride),
            (eps, offset),
            (
                hidden_size, summed is not None, residual is not None and summed is None, weight is not None,
                weight_in_fp32, block_rows, block_cols, overlap,
            ),
            overlap=overlap,
        )  # fmt: skip
    return out


def _empty(hidden_states: torch.Tensor, weight: torch.Tensor | None, weight_in_fp32: bool) -> torch.Tensor:
    dtype = result_dtype(hidden_states.dtype, weight, weight_in_fp32)
    return torch.empty_like(hidden_states, dtype=dtype, memory_format=torch.contiguous_format)


_op = backend.register(
    "rms_norm",
    "(Tensor hidden_states, Tensor? weight, float eps, float offset, bool weight_in_fp32) -> Tensor",
    _forward,
    reference,
)
