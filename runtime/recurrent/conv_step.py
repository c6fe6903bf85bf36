"""One token's causal convolution over channels, with its window in a cache.

B rows, C channels, W width of the window, n new tokens. Torch concatenates, copies back, convolves and activates; the
kernel reads each window once and writes it once, moved on by a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..guards.overwriting import steps
from ..launching.launch import WAVE, Kernel, overlaps
from ..linear.gated_activation import activation_kind

CASES = """
case("Qwen3.5 2B", conv_step, tensor(1, 6144, 1), tensor(1, 6144, 4), tensor(6144, 4), None, "silu")
case("LFM2 1.2B", conv_step, tensor(1, 2048, 1), tensor(1, 2048, 3), tensor(2048, 3))
"""

BLOCK = 256
_WIDEST = 8

if backend.triton_installed():
    import triton
    import triton.language as tl

    from ..linear.gated_activation import _activate

    @triton.jit(do_not_specialize=["channels"])
    def _conv_step_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        window_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        channels,
        row_stride,
        channel_stride,
        W: tl.constexpr,
        BIAS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        AHEAD: tl.constexpr,
        BLOCK: tl.constexpr,
        TAPS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Convolve BLOCK channels of one row a program."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            if not AHEAD:
                tl.extra.cuda.gdc_wait()
        row = tl.program_id(1).to(tl.int64)
        channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tap = tl.arange(0, TAPS)[None, :]
        live = channel < channels
        window_at = window_ptr + (row * channels + channel)[:, None] * W + tap
        moved = tl.load(window_at + 1, mask=live[:, None] & (tap < W - 1), other=0.0)
        weight_at = weight_ptr + channel[:, None] * W + tap
        weight = tl.load(weight_at, mask=live[:, None] & (tap < W), other=0.0).to(tl.float32)
        if OVERLAP and AHEAD:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + row * row_stride + channel * channel_stride, mask=live, other=0.0)
        window = tl.where(tap == W - 1, x.to(window_ptr.dtype.element_ty)[:, None], moved)
        tl.debug_barrier()  # every number has been read by whom it moves to
        tl.store(window_at, window, mask=live[:, None] & (tap < W))
        total = tl.sum(window.to(tl.float32) * weight, 1)
        if BIAS:
            total += tl.load(bias_ptr + channel, mask=live, other=0.0).to(tl.float32)
        if ACTIVATION != "none":
            total = _activate(total, ACTIVATION)
        tl.store(out_ptr + row * channels + channel, total.to(out_ptr.dtype.element_ty), mask=live)

    conv_step_kernel = Kernel(_conv_step_kernel)


def conv_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """Convolve a new token with those before it, and keep the last ones for the next call.

    Args:
        hidden_states: `[B, C, n]` the new tokens.
        conv_state: `[B, C, W]` the tokens before them; written in place.
        weight: `[C, W]`.
        bias: `[C]`, or None.
        activation: a name of `ACT2FN`, or None.

    Returns:
        `[B, C, 1]` in the dtype of `hidden_states`; None where torch's own operators are to run instead.
    """
    if not _fits(hidden_states, conv_state, weight, bias):
        return None
    kind = "none" if activation is None else activation_kind(ACT2FN[activation])
    return None if kind is None else _launch(hidden_states, conv_state, weight, bias, kind)


def reference(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Compute `conv_step` in plain torch, rounding where the modeling files round."""
    _, channels, tokens = hidden_states.shape
    text = torch.cat([conv_state, hidden_states], dim=-1).to(weight.dtype)
    conv_state.copy_(text[:, :, -conv_state.shape[-1] :])
    mixed = F.conv1d(text, weight.unsqueeze(1), bias, padding=0, groups=channels)[:, :, -tokens:]
    if activation is not None:
        mixed = ACT2FN[activation](mixed)
    return mixed.to(hidden_states.dtype)


def _fits(hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernel takes these tensors: one token, a window as wide as the weight."""
    tensors = [hidden_states, conv_state, weight, *([] if bias is None else [bias])]
    return (
        hidden_states.dim() == 3
        and hidden_states.shape[2] == 1
        and conv_state.shape == (*hidden_states.shape[:2], weight.shape[-1])
        and weight.dim() == 2
        and weight.shape[1] <= _WIDEST
        and all(t.dtype in KERNEL_DTYPES and t.device == hidden_states.device for t in tensors)
        and all(t.is_contiguous() for t in tensors[1:])
        and conv_state.dtype == weight.dtype
        and backend.nothing_watches(hidden_states)
        and not backend.wants_gradient(*tensors)
        and backend.uses_triton(hidden_states)
    )


def _launch(hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    rows, channels, _ = hidden_states.shape
    out = hidden_states.new_empty((rows, channels, 1))
    overlap, width = overlaps(out), weight.shape[1]
    ahead = steps(conv_state) and nn.Parameter in (type(weight), type(weight._base))
    with backend.device_guard(out):
        conv_step_kernel.launch(
            (-(-channels // BLOCK), rows, 1),
            BLOCK // WAVE,
            (hidden_states, conv_state, weight, weight if bias is None else bias, out),
            (channels,),
            (hidden_states.stride(0), hidden_states.stride(1)),
            (),
            (width, bias is not None, kind, ahead, BLOCK, 1 << (width - 1).bit_length(), overlap),
            overlap=overlap,
        )
    return out
