"""References of the steps of recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..exact_launch import Arguments, Reference
from .reference_stages import Outputs, activated


def _conv_step(a: Arguments) -> Outputs:
    window = torch.cat((a.window_ptr[..., 1:], a.x_ptr.view(-1, a.channels, 1)), -1)
    y = (window * a.weight_ptr.view(a.channels, a.W)).sum(-1)
    return {"window_ptr": window, "out_ptr": activated(a.ACTIVATION, y + a.bias_ptr if a.BIAS else y)}


def _unit(x: Tensor, a: Arguments) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + a.eps) if a.NORM else x


def _delta_rule_step(a: Arguments) -> Outputs:
    query, key = (_unit(x[:, 0], a).repeat_interleave(a.HEADS // a.GROUPS, 1) for x in (a.query_ptr, a.key_ptr))
    state = a.state_ptr * torch.exp(a.decay_ptr.view(-1, a.HEADS, 1, 1))
    delta = (a.value_ptr[:, 0] - (key[:, :, None] @ state)[:, :, 0]) * a.beta_ptr.view(-1, a.HEADS, 1)
    state = state + key[..., None] * delta[:, :, None]
    return {"next_ptr": state, "out_ptr": (query[:, :, None] * a.scaling) @ state}


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x.clamp(max=20.0))))


def _log_decay(a: Arguments) -> Outputs:
    return {"out_ptr": -torch.exp(a.rates_ptr) * _softplus(a.x_ptr + a.bias_ptr)}


def _state_space_step(a: Arguments) -> Outputs:
    x, dt, z = (each.reshape(-1, a.HEADS, a.P) for each in (a.x_ptr, a.dt_ptr, a.z_ptr))
    dt = dt + a.bias_ptr.view(a.HEADS, a.P) if a.BIAS else dt
    dt = (_softplus(dt) if a.SOFTPLUS else dt)[..., None]
    b, c = (
        each.reshape(-1, a.GROUPS, 1, a.N).repeat_interleave(a.HEADS // a.GROUPS, 1) for each in (a.b_ptr, a.c_ptr)
    )
    state = a.state_ptr * torch.exp(dt * a.a_ptr.view(a.HEADS, a.P, a.N)) + dt * x[..., None] * b
    y = (state * c).sum(-1) + (x * a.d_ptr.view(a.HEADS, a.P) if a.SKIP else 0.0)
    return {"state_ptr": state, "out_ptr": y * activated("silu", z) if a.GATED else y}


STATES = (
    Reference("conv_step", _conv_step),
    Reference("delta_rule_step", _delta_rule_step),
    Reference("log_decay", _log_decay),
    Reference("state_space_step", _state_space_step),
)
