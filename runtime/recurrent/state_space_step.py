"""One token of a selective state space with heads (Mamba 2).

B rows, H heads, P channels of a head, G groups, N size of the state. For each channel the state `s [N]` becomes
`exp(dt a) s + dt x b`, and the output is `s · c + D x`, times `silu(z)` where there is a gate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import backend
from ..device.row_tiles import KERNEL_DTYPES
from ..guards.overwriting import steps
from ..launching.launch import WAVE, Kernel, overlaps

CASES = """
def step(heads, channels, size, gated=False):
    a = tensor(heads, 1, 1, dtype=torch.float32).expand(heads, channels, size)
    per_head = tensor(heads, 1).expand(heads, channels)
    dt, x, b = tensor(1, heads, 1).expand(1, heads, channels), tensor(1, heads, channels), tensor(1, 1, size)
    state = tensor(1, heads, channels, size, dtype=torch.float32)
    return state_space_step(state, x, dt, a, b, b, per_head, per_head, True, x if gated else None)

case("Mamba2 1.3B", step, 64, 64, 128)
case("Falcon-H1 1.5B", step, 48, 64, 256, gated=True)
"""

CHANNELS = 16
"""Channels of a head a program steps."""
_LARGEST = 256

if backend.triton_installed():
    import triton
    import triton.language as tl

    @triton.jit
    def _state_space_step_kernel(  # type: ignore[no-untyped-def]
        state_ptr,
        x_ptr,
        dt_ptr,
        a_ptr,
        b_ptr,
        c_ptr,
        d_ptr,
        bias_ptr,
        z_ptr,
        out_ptr,
        x_row_stride,
        x_head_stride,
        dt_row_stride,
        dt_head_stride,
        dt_channel_stride,
        a_head_stride,
        a_channel_stride,
        a_state_stride,
        b_row_stride,
        b_group_stride,
        c_row_stride,
        c_group_stride,
        d_head_stride,
        d_channel_stride,
        bias_head_stride,
        bias_channel_stride,
        z_row_stride,
        z_head_stride,
        HEADS: tl.constexpr,
        GROUPS: tl.constexpr,
        P: tl.constexpr,
        N: tl.constexpr,
        SKIP: tl.constexpr,
        BIAS: tl.constexpr,
        SOFTPLUS: tl.constexpr,
        GATED: tl.constexpr,
        ONE_RATE: tl.constexpr,
        BLOCK_N: tl.constexpr,
        CHANNELS: tl.constexpr,
        AHEAD: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):
        """Step CHANNELS channels of one head of one row a program."""
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            if not AHEAD:
                tl.extra.cuda.gdc_wait()
        head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
        group = head // (HEADS // GROUPS)
        p = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        n = tl.arange(0, BLOCK_N)
        live = (p[:, None] < P) & (n[None, :] < N)
        place = ((row * HEADS + head) * P + p[:, None]) * N + n[None, :]
        state = tl.load(state_ptr + place, mask=live, other=0.0).to(tl.float32)
        if OVERLAP and AHEAD:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + row * x_row_stride + head * x_head_stride + p, mask=p < P, other=0.0).to(tl.float32)
        dt = tl.load(
            dt_ptr + row * dt_row_stride + head * dt_head_stride + p * dt_channel_stride, mask=p < P, other=0.0
        ).to(tl.float32)
        if BIAS:
            dt += tl.load(bias_ptr + head * bias_head_stride + p * bias_channel_stride, mask=p < P, other=0.0).to(
                tl.float32
            )
        if SOFTPLUS:
            dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
        if ONE_RATE:
            a = tl.load(a_ptr + head * a_head_stride).to(tl.float32)
        else:
            a_place = head * a_head_stride + p[:, None] * a_channel_stride + n[None, :] * a_state_stride
            a = tl.load(a_ptr + a_place, mask=live, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * b_row_stride + group * b_group_stride + n, mask=n < N, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + row * c_row_stride + group * c_group_stride + n, mask=n < N, other=0.0).to(tl.float32)
        state = state * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        tl.store(state_ptr + place, state.to(state_ptr.dtype.element_ty), mask=live)
        out = tl.sum(state * c[None, :], axis=1)
        if SKIP:
            out += x * tl.load(d_ptr + head * d_head_stride + p * d_channel_stride, mask=p < P, other=0.0).to(
                tl.float32
            )
        if GATED:
            z = tl.load(z_ptr + row * z_row_stride + head * z_head_stride + p, mask=p < P, other=0.0).to(tl.float32)
            out *= z / (1.0 + tl.exp(-z))
        tl.store(out_ptr + (row * HEADS + head) * P + p, out.to(out_ptr.dtype.element_ty), mask=p < P)

    state_space_step_kernel = Kernel(_state_space_step_kernel)


def state_space_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
) -> Tensor | None:
    """Step the state of every channel by one token, in place.

    Args:
        state: `[B, H, P, N]`, written.
        hidden_states: `[B, H, P]`.
        dt: `[B, H, P]` length of the step.
        a: `[H, P, N]` rates.
        b: `[B, G, N]` how the input enters the state.
        c: `[B, G, N]` how the output reads it.
        d: `[H, P]` how the input passes by; None for not at all.
        dt_bias: `[H, P]` added to `dt`; None for nothing.
        dt_softplus: whether `dt` is what a softplus makes of it.
        z: `[B, H, P]` gate; None for none.

    Returns:
        `[B, H, P]` in the dtype of `hidden_states`; None where torch's own operators are to run instead.
    """
    tensors = Inputs(state, hidden_states, dt, a, b, c, d, dt_bias, z)
    return launch(tensors, dt_softplus) if fits(tensors) else None


def reference(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
) -> Tensor:
    """Compute `state_space_step` in plain torch, rounding where the modeling files round."""
    rows, heads, channels = hidden_states.shape
    groups, size = b.shape[1], b.shape[-1]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt[..., None]
    stays = torch.exp(dt.float() * a.float()).to(device=state.device)
    b, c = (x.reshape(rows, groups, 1, size).expand(rows, groups, heads // groups, size).contiguous() for x in (b, c))
    c = c.reshape(rows, heads, size)
    enters = dt * b.reshape(rows, heads, 1, size)
    after = state * stays + (enters * hidden_states[..., None]).to(device=state.device)
    state.copy_(after.to(state.dtype))
    after = after.to(device=c.device, dtype=c.dtype).view(rows * heads, channels, size)
    out = torch.bmm(after, c.view(rows * heads, size, 1)).view(rows, heads, channels)
    if d is not None:
        out = (out + hidden_states * d).to(out.dtype)
    if z is not None:
        out = out * F.silu(z)
    return out.to(hidden_states.dtype)


class Inputs(NamedTuple):
    """What a step reads; the fields are the arguments of `state_space_step`."""

    state: Tensor
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    bias: Tensor | None
    z: Tensor | None


def fits(tensors: Inputs) -> bool:
    """Return whether the kernel takes these tensors: a state and groups without gaps, channels side by side."""
    state, x, dt, a, b, c, d, bias, z = tensors
    given = [t for t in tensors if t is not None]
    if x.dim() != 3 or state.dim() != 4 or state.shape[:3] != x.shape or b.dim() != 3 or b.shape != c.shape:
        return False
    rows, heads, channels, size = state.shape
    return (
        dt.shape == x.shape
        and a.shape == (heads, channels, size)
        and b.shape[::2] == (rows, size)
        and heads % b.shape[1] == 0
        and size <= _LARGEST
        and all(t is None or t.shape == (heads, channels) for t in (d, bias))
        and (z is None or (z.shape == x.shape and z.stride(-1) == 1))
        and state.is_contiguous()
        and all(t.stride(-1) == 1 for t in (x, b, c))
        and all(t.dtype in KERNEL_DTYPES and t.device == x.device for t in given)
        and backend.nothing_watches(x)
        and not backend.wants_gradient(*given)
        and backend.uses_triton(x)
    )


def launch(tensors: Inputs, softplus: bool) -> Tensor:
    """Run the kernel."""
    state, x, dt, a, b, c, d, bias, z = tensors
    rows, heads, channels, size = state.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    overlap = overlaps(out)
    skip, shift, gate = (x[0] if d is None else d, x[0] if bias is None else bias, x if z is None else z)
    with backend.device_guard(out):
        state_space_step_kernel.launch(
            (-(-channels // CHANNELS), heads, rows),
            128 // WAVE,
            (state, x, dt, a, b, c, skip, shift, gate, out),
            (),
            (
                *x.stride()[:2], *dt.stride(), *a.stride(), *b.stride()[:2], *c.stride()[:2], *skip.stride(),
                *shift.stride(), *gate.stride()[:2],
            ),
            (),
            (
                heads, b.shape[1], channels, size, d is not None, bias is not None, softplus, z is not None,
                a.stride()[1:] == (0, 0), 1 << (size - 1).bit_length(), CHANNELS, steps(state), overlap,
            ),
            overlap=overlap,
        )  # fmt: skip
    return out
