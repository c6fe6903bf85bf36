"""One token of a selective state space whose channels are no heads (Mamba, Gu and Dao, 2023).

B rows, P channels, N size of the state: the step of `state_space_step` as its case of one head, with a rate for each
number of the state, rounded where Mamba's files round.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .state_space_step import Inputs, fits, launch

CASES = """
def step(channels, size):
    x, a, b = tensor(1, channels), tensor(channels, size, dtype=torch.float32), tensor(1, size)
    state = tensor(1, channels, size, dtype=torch.float32)
    return selective_scan_step(state, x, x, a, b, b, tensor(channels), tensor(channels), True, x)

case("Mamba 1.4B", step, 4096, 16)
"""


def selective_scan_step(
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
        state: `[B, P, N]`, written.
        hidden_states: `[B, P]`.
        dt: `[B, P]` length of the step.
        a: `[P, N]` rates.
        b: `[B, N]` how the input enters the state.
        c: `[B, N]` how the output reads it.
        d: `[P]` how the input passes by; None for not at all.
        dt_bias: `[P]` added to `dt`; None for nothing.
        dt_softplus: whether `dt` is what a softplus makes of it.
        z: `[B, P]` gate; None for none.

    Returns:
        `[B, P]` in the dtype of `hidden_states`; None where torch's own operators are to run instead.
    """
    if state.dim() != 3 or hidden_states.dim() != 2 or b.dim() != 2 or c.dim() != 2 or a.dim() != 2:
        return None
    skip, bias = (None if t is None else t[None] for t in (d, dt_bias))
    per_token = (state, hidden_states, dt), (b, c)
    (state, x, dt), (b, c) = (tuple(t.unsqueeze(1) for t in ts) for ts in per_token)
    tensors = Inputs(state, x, dt, a[None], b, c, skip, bias, None if z is None else z.unsqueeze(1))
    return launch(tensors, dt_softplus)[:, 0] if fits(tensors) else None


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
    """Compute `selective_scan_step` in plain torch, rounding where the modeling files round."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    stays = torch.exp(dt.float()[..., None] * a.float()).to(device=state.device)
    enters = dt.float()[..., None] * b.float()[:, None, :]
    after = state.float() * stays + enters * hidden_states.float()[..., None]
    state.copy_(after.to(state.dtype))
    out = torch.matmul(after.to(c.dtype), c.unsqueeze(-1)).squeeze(-1)
    if d is not None:
        out = out + hidden_states * d
    if z is not None:
        out = out * F.silu(z)
    return out.to(hidden_states.dtype)
