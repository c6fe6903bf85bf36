"""A norm as the first stage of a product's kernel, for so few rows that a launch costs more than the norm.

What a norm computes is read off its `forward` (`norms.norm_form`); a module that computes something else, or one that
something observes, is called as it stands.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import backend
from ..norms.norm_form import Prologue, norm_form


class LayerNormPrologue(NamedTuple):
    """A LayerNorm, which only the products of one row of `linear` and `conv1d_weight` compute."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float = 0.0


Norm = Prologue | LayerNormPrologue


def prologue_of(norm: nn.Module) -> Prologue | None:
    """Return what a kernel needs to compute `norm` itself, or None if the module has to be called.

    So it has where its weight is trained: a kernel that computes the norm gives it no gradient.
    """
    found = norm_form(norm)
    return None if found is None or backend.observed(norm) or is_trained(norm) else found


def is_trained(norm: nn.Module) -> bool:
    """Return whether gradients of a norm's parameters are wanted."""
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in norm.parameters())


def norm_arguments(prologue: Norm | None, input: Tensor) -> tuple[Tensor, float, float, bool]:
    """Return the norm's weight (any tensor where it has none), eps, offset, and whether it has a weight."""
    if prologue is None or prologue.weight is None:
        return input, 0.0 if prologue is None else prologue.eps, 0.0, False
    return prologue.weight.contiguous(), prologue.eps, prologue.offset, True


def several_rows_norm(norm: Norm | None) -> Prologue | None:
    """Return the norm, which is computed for several rows in a product's kernel.

    Raises:
        TypeError: it is a LayerNorm, which has a kernel of its own there.
    """
    if isinstance(norm, LayerNormPrologue):
        raise TypeError("a LayerNorm of several rows is a kernel of its own")
    return norm


def shift_of(prologue: Norm | None) -> Tensor | None:
    """Return what the norm adds at the end."""
    return prologue.bias if isinstance(prologue, LayerNormPrologue) else None
