"""Attention of a prompt to itself, without a mask, by the fastest of torch's kernels on the card at hand.

B rows, N tokens, H and Hk heads, D head_dim:

    out[b, t, h] = softmax(scaling q[b, h, t] · k[b, h Hk // H, :t + 1]) v[b, h Hk // H, :t + 1]

torch has two kernels for it on NVIDIA's cards, its own form of FlashAttention 2 and cuDNN's, and an order of them that
knows no card. Which of the two is faster depends on card, head size and length: the first prompt of a size, before its
graph is captured, takes both a few times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..core import backend
from ..core.fastest import fastest
from .native_gqa import native_gqa

FEWEST_TOKENS = 512
"""Of a prompt, for a trial: shorter ones spend little in attention."""

_CANDIDATES = {
    SDPBackend.FLASH_ATTENTION: can_use_flash_attention,
    SDPBackend.CUDNN_ATTENTION: can_use_cudnn_attention,
}
_chosen: dict[tuple[Any, ...], SDPBackend | None] = {}


def prompt_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attend to the first slots of a layer's cache, which hold the prompt's own keys and values.

    Args:
        query: `[B, H, N, D]`.
        keys, values: `[B, Hk, S, D]`, `[B, Hk, S, Dv]`, S >= N.
        scaling: of the scores.

    Returns:
        `[B, N, H Dv]`.
    """
    tokens = query.shape[2]
    keys, values = keys[:, :, :tokens], values[:, :, :tokens].to(query.dtype)
    module: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // keys.shape[1], is_causal=True)
    with _preferring(prompt_attention_backend(query, keys, values, scaling)):
        out, _ = native_gqa(sdpa_attention_forward)(module, query, keys, values, None, scaling=scaling)
    return out.flatten(2)


def prompt_attention_backend(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> SDPBackend | None:
    """Return which of torch's kernels attends to a prompt of this size; None for torch's own choice."""
    if not query.is_cuda or torch.version.hip is not None or query.shape[2] < FEWEST_TOKENS or backend.runs_plainly():
        return None
    size = (query.device, query.dtype, tuple(query.shape), keys.shape[1], values.shape[3])
    if size not in _chosen:
        if torch.cuda.is_current_stream_capturing() or not backend.nothing_watches(query):
            return None
        _chosen[size] = _fastest(query, keys, values, scaling)
    return _chosen[size]


def _fastest(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> SDPBackend | None:
    grouped = query.shape[1] != keys.shape[1]
    parameters = SDPAParams(query, keys, values, None, 0.0, True, grouped)
    able = [name for name, takes in _CANDIDATES.items() if takes(parameters, False)]
    if len(able) < 2:
        return None

    def way(name: SDPBackend | None) -> Callable[[], object]:
        def run() -> object:
            with _preferring(name):
                return F.scaled_dot_product_attention(
                    query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
                )

        return run

    return fastest({name: way(name) for name in (None, *able)}, None)


def _preferring(name: SDPBackend | None) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if name is None else sdpa_kernel(name)
