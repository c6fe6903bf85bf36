"""Keys and values rounded to 8 bits in plain torch, by a definition of its own, and a growing cache that does so.

rounded(x)[..., d] = s * nearest(x[..., d] / s)        s the least power of two with max|x[..., :]| <= s * largest
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_rewrite_runtime.device.e4m3 import dtype_for


@functools.cache
def numbers_of(kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all numbers of an e4m3 in fp64, the lowest first, and whether the last bit of each is zero."""
    least, most = (int(math.log2(number)) for number in (torch.finfo(kind).smallest_normal, torch.finfo(kind).max))
    positive = [
        *(mantissa / 8 * 2.0**least for mantissa in range(8)),
        *((1 + mantissa / 8) * 2.0**exponent for exponent in range(least, most + 1) for mantissa in range(8)),
    ]
    kept = [value for value in positive if value <= torch.finfo(kind).max]
    numbers = torch.tensor([sign * value for sign in (1, -1) for value in kept], dtype=torch.float64).unique()
    return numbers, torch.arange(len(numbers)) % 2 == len(numbers) // 2 % 2  # zero is in the middle


def rounded(x: Tensor) -> Tensor:
    """Return `[..., D]` in 8 bits of its device and back: each row with its scale, to nearest, ties to even."""
    wide, kind = x.double(), dtype_for(x)
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest.clamp_min(2.0**-24) / torch.finfo(kind).max)))
    numbers, even = (table.to(x.device) for table in numbers_of(kind))
    at = (wide / scale).contiguous()
    above = torch.searchsorted(numbers, at).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    up = (high - at < at - low) | ((high - at == at - low) & even[above])
    return (torch.where(up, high, low) * scale).to(x.dtype)


class RoundedLayer(DynamicLayer):
    """Rounds what it keeps: the first tokens attend to their own keys and values, all others to what is kept."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep new keys and values; return what attention reads."""
        is_first = self.get_seq_length() == 0
        kept = super().update(self.rounded(key_states), self.rounded(value_states), *args, **kwargs)
        return (key_states, value_states) if is_first else kept

    def rounded(self, states: Tensor) -> Tensor:
        """Return `[B, Hk, n, D]` as it is kept."""
        return rounded(states)


def rounded_cache(layers: int, kind: type[DynamicLayer] = RoundedLayer) -> DynamicCache:
    """Return an empty growing cache that rounds."""
    cache = DynamicCache()
    cache.layers = [kind() for _ in range(layers)]
    return cache
