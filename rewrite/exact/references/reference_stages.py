"""Stages that several kernels have in common, as formulas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rewrite.finite import ring
from rewrite.finite.ring_tensor import RingTensor

from ..exact_launch import Arguments

Outputs = dict[str, Tensor]
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def activated(kind: str, x: Tensor, scaling: Any = 1.0) -> Tensor:
    """Return an activation, by the name that kernels have for it."""
    return {
        "": lambda: x,
        "none": lambda: x,
        "silu": lambda: x * torch.sigmoid(x),
        "swish": lambda: x * torch.sigmoid(scaling * x),
        "quick_gelu": lambda: x * torch.sigmoid(1.702 * x),
        "sigmoid": lambda: torch.sigmoid(x),
        "gelu": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "relu": lambda: torch.relu(x),
        "relu2": lambda: torch.relu(x) ** 2,
    }[kind]()


def rms(x: Tensor, eps: Any) -> Tensor:
    """Return rows over their root mean square."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def centred(x: Tensor, eps: Any, *, clamped: bool = False) -> Tensor:
    """Return rows with mean 0 and variance 1; clamped, of a variance that is a difference and at least 0."""
    away = x - x.mean(-1, keepdim=True)
    variance = (away * away).mean(-1, keepdim=True)
    return away * torch.rsqrt((variance.clamp(min=0) if clamped else variance) + eps)


def entered(a: Arguments) -> Tensor:
    """Return the rows that a product reads: the input, normalised where the launch has a norm."""
    x = a.x_ptr.reshape(-1, a.I)
    if not a.NORM:
        return x
    layer = a.values.get("CENTRED", "SHIFT" in a.values)
    x = centred(x, a.eps, clamped=True) if layer else rms(x, a.eps)
    x = x * (a.norm_ptr + a.offset) if a.NORM_WEIGHT else x
    return x + a.shift_ptr.reshape(-1) if layer and a.SHIFT else x


def scaled_codes(a: Arguments, codes: Tensor, columns: int, *, fnuz: bool = False) -> Tensor:
    """Return a weight of 8 or 4 bits, `[…, rows, columns]`, times the scales of its blocks."""
    codes = codes.view(torch.uint8) if codes.dtype == torch.int32 else codes
    if a.values.get("FOUR", False) or a.values.get("KIND") == "four":
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        numbers = _E2M1[(pairs & 7).long()] * torch.where(pairs > 7, -1.0, 1.0)
    else:
        kind = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        numbers = (codes.view(kind) if codes.dtype == torch.uint8 else codes).float()
    weight = RingTensor(ring.elements(numbers))
    scale = a.scale_ptr
    if not isinstance(scale, RingTensor):
        scale = RingTensor(ring.elements(torch.exp2(scale.double() - 127)))
    if scale.dim() < numbers.dim():
        return weight * scale[..., None]
    rows, cols = (-(-numbers.shape[place] // scale.shape[place]) for place in (-2, -1))
    rows, cols = a.values.get("ROWS", rows), -(-columns // scale.shape[-1])
    spread = scale.repeat_interleave(rows, -2)[..., : numbers.shape[-2], :].repeat_interleave(cols, -1)
    return weight * spread[..., : numbers.shape[-1]]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, a: Arguments, *, deinterleave: bool = False) -> Tensor:
    """Rotate the first R columns of heads, by tables that broadcast with them."""
    pairs = x[..., : a.R]
    first, second = (pairs[..., ::2], pairs[..., 1::2]) if a.INTERLEAVED else pairs.chunk(2, -1)
    if a.HALF_TABLE:
        cos, other_cos, sin, other_sin = cos, cos, sin, sin
    else:
        (cos, other_cos), (sin, other_sin) = (
            (table[..., ::2], table[..., 1::2]) if a.INTERLEAVED else table.chunk(2, -1) for table in (cos, sin)
        )
    turned = first * cos - second * sin, second * other_cos + first * other_sin
    joined = torch.stack(turned, -1).flatten(-2) if a.INTERLEAVED and not deinterleave else torch.cat(turned, -1)
    return torch.cat((joined, x[..., a.R :]), -1)


def put(cache: Tensor, at: Any, new: Tensor) -> Tensor:
    """Return a cache `[B, H, S, D]` with other slots."""
    cache[:, :, at] = new
    return cache
