"""References of what brings queries, keys and values to attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..exact_launch import Arguments, Reference
from .reference_stages import Outputs, entered, put, rms, rotated

Position = {"position_ptr": lambda a: torch.tensor(a.capacity - 3)}


def _heads(a: Arguments, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[B, heads, 1, D]` of a packed product."""
    return y.view(y.shape[0], -1, 1, a.D).split((a.H, a.HK, a.HK), 1)


def _tables(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return cosines and sines `[B, 1, 1, columns]`, of a step."""
    return a.cos_ptr[:, :, None], a.sin_ptr[:, :, None]


def _turned(a: Arguments, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    return rotated(x, *tables, a) if a.R else x


def _into(a: Arguments, query: Tensor, key: Tensor, value: Tensor, at: Any) -> Outputs:
    return {"query_ptr": query, "keys_ptr": put(a.keys_ptr, at, key), "values_ptr": put(a.values_ptr, at, value)}


def _qkv(a: Arguments) -> Outputs:
    y = entered(a) @ a.weight_ptr.T
    query, key, value = _heads(a, y + a.bias_ptr if a.BIAS else y)
    query, key = _turned(a, query, _tables(a)), _turned(a, key, _tables(a))
    return _into(a, query, key, value, a.position_ptr)


def _qkv_rows(a: Arguments) -> Outputs:
    y = entered(a) @ a.weight_ptr.T
    query, key, value = _heads(a, y + a.bias_ptr if a.BIAS else y)
    query = rms(query, a.q_eps) * (a.q_norm_ptr + a.q_offset) if a.Q_NORM else query
    key = rms(key, a.k_eps) * (a.k_norm_ptr + a.k_offset) if a.K_NORM else key
    query, key = _turned(a, query, _tables(a)), _turned(a, key, _tables(a))
    return _into(a, query, key, value, a.position_ptr)


def _split(a: Arguments) -> list[Tensor]:
    """Return queries, keys and values `[B, heads, tokens, D]`, normed."""
    query, key, value = (x.unflatten(-1, (-1, a.D)).transpose(1, 2) for x in (a.q_ptr, a.k_ptr, a.v_ptr))
    query = rms(query, a.q_eps) * (a.q_norm_ptr + a.q_offset) if a.Q_NORM else query
    return [query, rms(key, a.k_eps) * (a.k_norm_ptr + a.k_offset) if a.K_NORM else key, value]


def _qkv_prompt(a: Arguments) -> Outputs:
    query, key, value = _split(a)
    tables = a.cos_ptr[:, None], a.sin_ptr[:, None]
    query, key = _turned(a, query, tables), _turned(a, key, tables)
    return _into(a, query.transpose(1, 2), key, value, slice(a.tokens))


def _rope_cache(a: Arguments) -> Outputs:
    query, key, value = _split(a)
    query, key = _turned(a, query, _tables(a)), _turned(a, key, _tables(a))
    return _into(a, query, key, value, a.position_ptr)


def _rotary(a: Arguments) -> Outputs:
    cos, sin = a.cos_ptr[:, None], a.sin_ptr[:, None]
    q, k = (rotated(x, cos, sin, a, deinterleave=a.DEINTERLEAVE) for x in (a.q_ptr, a.k_ptr))
    return {"q_out_ptr": q, "k_out_ptr": k}


def _rotary_rows(a: Arguments) -> Outputs:
    at = a.position_ptr.flatten()
    return {"cos_out_ptr": a.cos_ptr[at], "sin_out_ptr": a.sin_ptr[at]}


ROTATIONS = (
    Reference("qkv", _qkv, Position),
    Reference("qkv_rows", _qkv_rows, Position, scratch=("part_ptr", "square_ptr")),
    Reference("qkv_prompt", _qkv_prompt),
    Reference(
        "rope_cache",
        _rope_cache,
        Position,
        unseen=lambda a: "rounds to 8 bits by operations on the bits of numbers" if a.FP8_CACHE else "",
    ),
    Reference(
        "rotary",
        _rotary,
        unseen=lambda a: "gradients turn back: tests/runtime/test_gradient_kernels.py" if a.INVERSE else "",
    ),
    Reference("rotary_rows", _rotary_rows, {"position_ptr": lambda a: torch.tensor(17)}),
)
