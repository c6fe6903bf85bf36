"""Norms of queries and keys, over one head or over all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..linear.prologue import prologue_of
from ..norms.norm_form import Prologue


def head_norms(
    q_norm: nn.Module | None, k_norm: nn.Module | None, head_dim: int
) -> tuple[Prologue | None, Prologue | None] | None:
    """Return both norms for a kernel; None where one of them is something else than an RMSNorm over one head."""
    of_query, of_key = (None if norm is None else _of_one_head(norm, head_dim) for norm in (q_norm, k_norm))
    known = (of_query is None) == (q_norm is None) and (of_key is None) == (k_norm is None)
    return (of_query, of_key) if known else None


def _of_one_head(norm: nn.Module, head_dim: int) -> Prologue | None:
    prologue = prologue_of(norm)
    fits = prologue is not None and prologue.weight is not None and prologue.weight.shape == (head_dim,)
    return prologue if fits else None


def over_one_head(x: Tensor, norm: nn.Module | None, head_dim: int) -> tuple[Tensor, Prologue | None]:
    """Return rows and the norm for the kernel where it is an RMSNorm over one head; any other is computed here."""
    if norm is None:
        return x, None
    if (prologue := _of_one_head(norm, head_dim)) is not None:
        return x, prologue
    return split_heads(x, norm, head_dim).transpose(1, 2).reshape(x.shape), None


def split_heads(x: Tensor, norm: nn.Module | None, head_dim: int, heads_first: bool = False) -> Tensor:
    """Split `[B, n, H D]` into `[B, H, n, D]` and normalise over a head, or over all where the norm is that wide.

    A norm over a head is given `[B, n, H, D]`, or `[B, H, n, D]` with `heads_first`.
    """
    shape = (*x.shape[:-1], -1, head_dim)
    if norm is None:
        return x.view(shape).transpose(1, 2)
    weight = getattr(norm, "weight", None)
    if heads_first:
        given: Tensor = norm(x.view(shape).transpose(1, 2))
        return given
    over_all = isinstance(weight, torch.Tensor) and weight.shape == (x.shape[-1],)
    normed: Tensor = norm(x).view(shape) if over_all else norm(x.view(shape))
    return normed.transpose(1, 2)
