"""Gradients of an operator by its kernels, by its torch form and in fp64, and how far the first may be off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tolerances import assert_as_exact_as
from torch import Tensor

from hf_rewrite_runtime.core import backend


def gradients(function: Callable[..., Any], inputs: list[Tensor], seed: int = 5) -> list[Tensor]:
    """Return the gradients of a random projection of what a function returns."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs]
    return list(torch.autograd.grad(outputs, leaves, directions))


def check(function: Callable[..., Any], exact: Callable[..., Any], *inputs: Tensor) -> None:
    """Compare the kernels' gradients with fp64, and with what the torch form's are off by."""
    backend.reset_fallbacks()
    ours = gradients(function, list(inputs))
    assert not backend.fallbacks(), "the kernel did not run"
    with backend.use_backend("reference"):
        reference = gradients(function, list(inputs))
    truth = gradients(exact, [x.double() for x in inputs])
    for mine, theirs, right in zip(ours, reference, truth, strict=True):
        eps = torch.finfo(mine.dtype).eps
        assert_as_exact_as(theirs, mine, right, eps)


def all_as_exact(theirs: Sequence[Tensor], ours: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Compare each of ours with fp64, and with what theirs is off by."""
    for wanted, mine, right in zip(theirs, ours, exact, strict=True):
        assert_as_exact_as(wanted.detach(), mine.detach(), right.detach(), torch.finfo(mine.dtype).eps)
