"""aiter's RMSNorm, residual add and RMSNorm, and LayerNorm, in place of the bundled kernels.

N rows, H hidden size. aiter has three ways to round, of which each is one of `rms_norm`'s:

    use_model_sensitive_rmsnorm=1    weight * cast(normed)             Llama
    use_model_sensitive_rmsnorm=0    cast(weight * normed)             weight_in_fp32=True (OLMo2, gpt_oss)
    gemma_norm=True                  cast((weight + 1) * normed)       offset=1.0, weight_in_fp32=True (Gemma)

With a residual only the first normalises the rounded sum, as modeling files do; the others take the sum as it is in
fp32, so they do not run. aiter's kernels check nothing: another dtype of the weight is garbage, an odd H writes into
the next row, and a strided view is a fault, so all of that is refused here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import aiter_calls

DTYPES = frozenset({torch.float16, torch.bfloat16})
_ROWS = 37
"""Rows of the tensors that a variant is proven on."""

RMSReference = Callable[[Tensor, "Tensor | None", float, float, bool], Tensor]
LayerReference = Callable[[Tensor, "Tensor | None", "Tensor | None", float], Tensor]


def rms_norm(
    hidden_states: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
    reference: RMSReference,
) -> Tensor | None:
    """Return `rms_norm` by aiter, `[N, H]` and contiguous; None where the bundled form is to run."""
    if not aiter_calls.chosen("rms_norm", hidden_states):
        return None
    reason = _refusal(hidden_states, weight)
    if reason is None and offset and not (offset == 1.0 and weight_in_fp32):
        reason = "no_equal_mode"
    if reason is not None or weight is None:
        aiter_calls.refuse("rms_norm", reason or "weight")
        return None
    function = _gemma_function() if offset else _rms_function(weight_in_fp32)
    if function is None:
        return None

    def call(x: Tensor, scale: Tensor) -> Any:
        return function(x, scale, eps)

    def proof() -> bool:
        x, scale = rows_and_weight(hidden_states)
        return aiter_calls.mostly_equal(call(x, scale), reference(x, scale, eps, offset, weight_in_fp32))

    variant = (hidden_states.dtype, hidden_states.device, hidden_states.shape[-1], offset, weight_in_fp32)
    rows = as_rows(hidden_states)
    normed = aiter_calls.run("rms_norm", hidden_states, variant, lambda: _checked(call(rows, weight), rows), proof)
    return None if normed is None else normed.view(hidden_states.shape)


def add_rms_norm(
    hidden_states: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    weight_in_fp32: bool,
    reference: RMSReference,
) -> tuple[Tensor, Tensor] | None:
    """Return `add_rms_norm` by aiter, `(normed, summed)`; None where the bundled form is to run."""
    if not aiter_calls.chosen("add_rms_norm", hidden_states):
        return None
    reason = sum_refusal(hidden_states, residual, weight, bool(offset or weight_in_fp32))
    if reason is not None or weight is None:
        aiter_calls.refuse("add_rms_norm", reason or "weight")
        return None
    tensors = ("out", "input", "residual_in", "residual_out", "weight")
    keywords = ("epsilon", "use_model_sensitive_rmsnorm")
    function = aiter_calls.function("add_rms_norm", "rmsnorm2d_fwd_with_add", tensors, keywords)
    if function is None:
        return None

    def call(x: Tensor, other: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        normed, summed = torch.empty_like(x), torch.empty_like(x)
        function(normed, x, other, summed, scale, epsilon=eps, use_model_sensitive_rmsnorm=1)
        return normed, summed

    def proof() -> bool:
        x, scale = rows_and_weight(hidden_states)
        other = x.flip(0)
        normed, summed = call(x, other, scale)
        wanted = other + x
        return torch.equal(summed, wanted) and aiter_calls.mostly_equal(
            normed, reference(wanted, scale, eps, offset, weight_in_fp32)
        )

    shape = hidden_states.shape
    variant = (hidden_states.dtype, hidden_states.device, shape[-1])
    rows, others = as_rows(hidden_states), as_rows(residual)
    found = aiter_calls.run("add_rms_norm", hidden_states, variant, lambda: call(rows, others, weight), proof)
    return None if found is None else (found[0].view(shape), found[1].view(shape))


def layer_norm(
    hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, reference: LayerReference
) -> Tensor | None:
    """Return `layer_norm` by aiter, `[N, H]` and contiguous; None where the bundled form is to run."""
    if not aiter_calls.chosen("layer_norm", hidden_states):
        return None
    reason = _refusal(hidden_states, weight)
    if reason is None and bias is not None:
        reason = _refusal(hidden_states, bias)
    if reason is not None or weight is None:
        aiter_calls.refuse("layer_norm", reason or "weight")
        return None
    function = aiter_calls.function("layer_norm", "layernorm2d_fwd", ("input", "weight", "bias"), ("epsilon",))
    if function is None:
        return None
    shift = _zeros(weight.shape[0], weight.dtype, weight.device) if bias is None else bias

    def call(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return function(x, scale, shift, epsilon=eps)

    def proof() -> bool:
        x, scale = rows_and_weight(hidden_states)
        return aiter_calls.mostly_equal(call(x, scale, x[0]), reference(x, scale, x[0], eps))

    variant = (hidden_states.dtype, hidden_states.device, hidden_states.shape[-1])
    rows = as_rows(hidden_states)
    normed = aiter_calls.run(
        "layer_norm", hidden_states, variant, lambda: _checked(call(rows, weight, shift), rows), proof
    )
    return None if normed is None else normed.view(hidden_states.shape)


def sum_refusal(hidden_states: Tensor, residual: Tensor, weight: Tensor | None, other_mode: bool) -> str | None:
    """Return why aiter does not get a sum and its RMSNorm; `other_mode` is a rounding that it does not have."""
    reason = _refusal(hidden_states, weight)
    if reason is None and (residual.shape != hidden_states.shape or residual.device != hidden_states.device):
        reason = "layout"
    if reason is None and residual.dtype != hidden_states.dtype:
        reason = "dtype"
    return "no_equal_mode" if reason is None and other_mode else reason


def _refusal(hidden_states: Tensor, parameter: Tensor | None) -> str | None:
    """Return why aiter does not get these tensors, a key of `aiter_calls.REASONS`."""
    if hidden_states.dtype not in DTYPES:
        return "dtype"
    if hidden_states.numel() == 0:
        return "empty"
    hidden_size = hidden_states.shape[-1]
    if hidden_size % 8:
        return "hidden_size"
    if parameter is None or parameter.shape != (hidden_size,) or parameter.device != hidden_states.device:
        return "weight"
    if parameter.dtype != hidden_states.dtype:
        return "dtype"
    return None if parameter.is_contiguous() and not parameter.data_ptr() % 16 else "layout"


def _rms_function(weight_in_fp32: bool) -> Callable[[Tensor, Tensor, float], Any] | None:
    """Return a function of input, weight and eps that rounds as asked; None, and counted, if there is none."""
    mode = {} if weight_in_fp32 else {"use_model_sensitive_rmsnorm": 1}  # 0 is the default, and older than the name
    function = aiter_calls.function("rms_norm", "rms_norm", ("input", "weight"), ("epsilon", *mode))
    return None if function is None else lambda x, weight, eps: function(x, weight, epsilon=eps, **mode)


def _gemma_function() -> Callable[[Tensor, Tensor, float], Any] | None:
    function = aiter_calls.function("rms_norm", "rmsnorm", ("out", "input", "weight"), ("epsilon", "gemma_norm"))

    def call(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        function(out, x, weight, epsilon=eps, gemma_norm=True)  # type: ignore[misc]
        return out

    return None if function is None else call


def as_rows(tensor: Tensor) -> Tensor:
    """Return `[rows, H]`, contiguous and aligned."""
    rows = tensor.reshape(-1, tensor.shape[-1]).contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def rows_and_weight(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a norm is tried on: rows and a weight, of the dtype and columns of `like`."""
    hidden_size = like.shape[-1]
    x, weight = aiter_calls.samples(like, (_ROWS, hidden_size), (hidden_size,))
    return x * 3, weight * 0.3 + 1  # a weight near 1 shows best where it was rounded


def _checked(found: object, rows: Tensor) -> Tensor | None:
    return found if aiter_calls.is_result(found, tuple(rows.shape), rows) else None  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)
