"""References of norms, activations and their gradients, and of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ..exact_launch import Arguments, Reference
from .reference_stages import Outputs, activated, centred, rms


def _rms_norm(a: Arguments) -> Outputs:
    x = a.x_ptr.reshape(-1, a.H)
    summed = x + a.residual_ptr.reshape(-1, a.H) if a.ADD else x
    y = rms(summed, a.eps)
    y = y * (a.weight_ptr + a.offset) if a.WEIGHTED else y
    y = y + a.residual_ptr.reshape(-1, a.H) if a.AFTER else y
    return {"out_ptr": y, **({"sum_ptr": summed} if a.ADD else {})}


def _layer_norm(a: Arguments) -> Outputs:
    x = a.x_ptr.reshape(-1, a.G, a.H)
    summed = x + a.residual_ptr.reshape(-1, a.G, a.H) if a.ADD else x
    y = centred(summed, a.eps)
    y = y * a.weight_ptr.reshape(a.G, a.H) if a.WEIGHTED else y
    y = y + a.bias_ptr.reshape(a.G, a.H) if a.BIASED else y
    return {"out_ptr": y, **({"sum_ptr": summed} if a.ADD else {})}


def _in_parts(a: Arguments, rows: Tensor, parts: Tensor) -> Tensor:
    """Sum rows `[N, …]` by the program that walks over them."""
    program = torch.arange(rows.shape[0]) // a.BLOCK_ROWS % parts.shape[0]
    return torch.zeros_like(parts).index_add(0, program, rows.reshape(rows.shape[0], *parts.shape[1:]))


def _rms_norm_backward(a: Arguments) -> Outputs:
    x, gradient = a.x_ptr.reshape(-1, a.H), a.gradient_ptr.reshape(-1, a.H)
    rstd, scaled = torch.rsqrt((x * x).mean(-1, keepdim=True) + a.eps), gradient
    scaled = gradient * (a.weight_ptr + a.offset) if a.WEIGHTED else gradient
    out = rstd * (scaled - x * rstd * (scaled * x * rstd).mean(-1, keepdim=True))
    out = out + a.after_ptr.reshape(-1, a.H) if a.ADD else out
    return {"out_ptr": out, **({"parts_ptr": _in_parts(a, gradient * x * rstd, a.parts_ptr)} if a.FOR_WEIGHT else {})}


def _layer_norm_backward(a: Arguments) -> Outputs:
    x, gradient = a.x_ptr.reshape(-1, a.G, a.H), a.gradient_ptr.reshape(-1, a.G, a.H)
    normed, away = centred(x, a.eps), x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((away * away).mean(-1, keepdim=True) + a.eps)
    scaled = gradient * a.weight_ptr.reshape(a.G, a.H) if a.WEIGHTED else gradient
    out = rstd * (scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True))
    found = {"out_ptr": out + a.after_ptr.reshape(-1, a.G, a.H) if a.ADD else out}
    found |= {"weight_parts_ptr": _in_parts(a, gradient * normed, a.weight_parts_ptr)} if a.FOR_WEIGHT else {}
    return found | ({"bias_parts_ptr": _in_parts(a, gradient, a.bias_parts_ptr)} if a.FOR_BIAS else {})


def _gated_activation(a: Arguments) -> Outputs:
    return {"out_ptr": activated(a.ACTIVATION, a.gate_ptr) * a.up_ptr}


def slope(kind: str, x: Tensor) -> Tensor:
    """Return the derivative of an activation."""
    if kind == "gelu":
        density = 0.3989422804014327 * torch.exp(-0.5 * x * x)
        return 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)) + x * density
    if kind in ("relu", "relu2"):
        return torch.where(x > 0, 2.0 * x if kind == "relu2" else torch.ones_like(x), torch.zeros_like(x))
    bent = x if kind == "silu" else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    share = torch.sigmoid(bent)
    inner = 1.0 if kind == "silu" else 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    return share + x * share * (1.0 - share) * inner


def _gated_activation_backward(a: Arguments) -> Outputs:
    opened = activated(a.ACTIVATION, a.gate_ptr)
    of_gate = a.gradient_ptr * a.up_ptr * slope(a.ACTIVATION, a.gate_ptr)
    again = {"product_ptr": opened * a.up_ptr} if a.AGAIN else {}
    return {"of_gate_ptr": of_gate, "of_up_ptr": a.gradient_ptr * opened} | again


def _gated_norm(a: Arguments) -> Outputs:
    x, gate = (each.reshape(a.row_count, -1, a.G) for each in (a.x_ptr, a.gate_ptr))
    opened = activated(a.ACTIVATION, gate) if a.GATED else torch.ones_like(x)
    y = rms(x * opened if a.GATE_FIRST else x, a.eps) * a.weight_ptr.reshape(-1, a.G)
    return {"out_ptr": y if a.GATE_FIRST else y * opened}


def _cross_entropy(a: Arguments) -> Outputs:
    inner, labels = a.logits_ptr * a.inner, a.labels_ptr
    values = _capped(inner, a)
    top = values.amax(-1, keepdim=True)
    norm = top + torch.log(torch.exp(values - top).sum(-1, keepdim=True))
    slopes = torch.exp(values - norm) - (torch.arange(a.V) == labels[:, None]).float()
    losses, live = norm[:, 0] - _capped(a.picked_ptr * a.inner, a), labels != a.ignore_index
    if a.CAPPED:
        slopes = slopes * (a.outer * (1.0 - torch.tanh(inner) * torch.tanh(inner)))
    slopes = slopes * (a.inner * a.lift) * live[:, None].float()
    return {"logits_ptr": slopes, "losses_ptr": losses * live.float()}


def _capped(values: Tensor, a: Arguments) -> Tensor:
    return a.outer * torch.tanh(values) if a.CAPPED else values


def _labels(a: Arguments) -> Tensor:
    rows = a.values["labels_ptr"].shape[0]
    return torch.where(torch.arange(rows) % 7 == 3, a.ignore_index, torch.arange(rows) * 37 % a.V)


NORMS = (
    Reference("rms_norm", _rms_norm),
    Reference("layer_norm", _layer_norm),
    Reference("rms_norm_backward", _rms_norm_backward),
    Reference("layer_norm_backward", _layer_norm_backward),
    Reference("gated_activation", _gated_activation),
    Reference("gated_activation_backward", _gated_activation_backward),
    Reference("gated_norm", _gated_norm),
    Reference("cross_entropy", _cross_entropy, {"labels_ptr": _labels}),
)
