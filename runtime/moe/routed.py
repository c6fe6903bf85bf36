"""The tokens of each expert, for a loop over the experts: as many turns as there are routed tokens, or hit experts.

N tokens, k experts a token, E experts. A loop over the experts that were hit needs their number on the host. For so
few tokens that each expert would get about one (N k ≤ E), and in a stream capture, the loop runs over the N k pairs of
a token and one of its experts instead, without a look at them. A token's experts come in ascending order either way,
so that its results are added in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MOST_CAPTURED = 1024
"""Pairs of a token and an expert, each some kernels of its own, that a graph is to hold."""


def routed(top_k_index: Tensor, num_experts: int) -> Iterator[tuple[int | Tensor, Tensor, Tensor]]:
    """Yield `(expert_idx, top_k_pos, token_idx)`: an expert and where in `top_k_index` it stands.

    Args:
        top_k_index: `[N, k]` experts of each token, all different; E itself stands for those of another process.
        num_experts: E.

    Raises:
        RuntimeError: if the loop runs over hit experts, and one of them is beyond E.

    Yields:
        The expert, a number or a tensor `[1]` (`select` takes both), and the columns and rows of
        `top_k_index` that hold it, each `[n]` with n ≥ 1.
    """
    yield from _pairs(top_k_index) if _by_pairs(top_k_index, num_experts) else _hits(top_k_index, num_experts)


def select(weight: Tensor, expert_idx: int | Tensor) -> Tensor:
    """Return `weight[expert_idx]`, `[…]` of `[E, …]`; an index on the device stays there."""
    return weight[expert_idx] if isinstance(expert_idx, int) else weight.index_select(0, expert_idx)[0]


def _by_pairs(top_k_index: Tensor, num_experts: int) -> bool:
    if torch.is_grad_enabled() or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    if top_k_index.is_cuda and torch.cuda.is_current_stream_capturing():
        if top_k_index.numel() > MOST_CAPTURED:
            raise RuntimeError(f"{top_k_index.numel()} pairs of a token and an expert are too many for a graph")
        return True
    return top_k_index.numel() <= num_experts


def _pairs(top_k_index: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    experts, positions = top_k_index.sort(dim=-1)
    tokens = torch.arange(top_k_index.shape[0], device=top_k_index.device)
    for token in range(top_k_index.shape[0]):
        for place in range(top_k_index.shape[1]):
            here = slice(place, place + 1)
            yield experts[token, here], positions[token, here], tokens[token : token + 1]


def _hits(top_k_index: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    for expert_idx in top_k_index.unique().tolist():
        if not 0 <= expert_idx <= num_experts:
            raise RuntimeError(f"expert {expert_idx} of {num_experts}: there is none")
        if expert_idx < num_experts:
            top_k_pos, token_idx = torch.where(top_k_index.t() == expert_idx)
            yield expert_idx, top_k_pos, token_idx
