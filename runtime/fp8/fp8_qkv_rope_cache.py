"""Queries, keys and values of attention with weights in 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rope.qkv_rope_cache import qkv_rope_cache
from .fp8_linear import fp8_packed_linear
from .fp8_qkv_step import fp8_qkv_step


def fp8_qkv_rope_cache(hidden_states: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries, and the keys and values that they attend to, by products of weights in 8 bits.

    Arguments and results as of `qkv_rope_cache`.
    """
    keywords |= {"multiply": fp8_packed_linear, "step": fp8_qkv_step}
    return qkv_rope_cache(hidden_states, *arguments, **keywords)
