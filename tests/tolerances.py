"""How far a kernel may be from exact arithmetic, with the reason; never loosened inside a test."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Limits in terms of the reference's own error against fp64, in the same dtype on the same inputs."""

    largest: float
    root_mean_square: float
    largest_floor_ulps: float
    row_floor_ulps: float
    reference_ulps: float
    reason: str


KERNEL = Tolerance(
    largest=2.0,
    root_mean_square=1.25,
    largest_floor_ulps=2.0,
    row_floor_ulps=2.0,
    reference_ulps=16.0,
    reason="sums run in another order, and a GPU's exp and rsqrt are good to two units in the last place; the "
    "mean and scale of a row round once for the whole row, so the mean error over few rows is that of few roundings; "
    "a reference further from fp64 than a handful of roundings computes something else",
)


IN_AN_EXPONENT = KERNEL._replace(
    largest_floor_ulps=24.0,
    row_floor_ulps=24.0,
    reason="a weight of attention has the logarithm of its value's scale in its exponent, -22 to 5 for numbers of any "
    "model: in fp32 that is rounded to 24 roundings of 1; in 16 bits it is none",
)


LOSS = KERNEL._replace(
    root_mean_square=2.0,
    reason="the column of the label is most of a row's gradient, and shares the roundings of the row's norm and of "
    "a tanh that is good to a unit in the last place: the mean is that of as few roundings as there are rows",
)


# A model that takes a softmax in the hidden states' dtype, fp64 here, loses this much where ours is taken in fp32.
SOFTMAX_IN_FP32 = 1e-5
# Everything else of a block in fp64.
BLOCK_IN_FP64 = 1e-10


# Norms and sums of a whole small model in fp32, in another order: a few roundings of each of its layers, relative.
WHOLE_FORWARD_IN_FP32 = 2e-5
# Logits of single steps beside those of the whole sequence, relative: attention sums over a cache with empty slots.
STEPS_IN_FP32 = 1e-4


# A sum of gradients rounds after each term, and autograd adds the terms of another expression in another order.
GRADIENT_ULPS = 4.0


def assert_same_gradient(wanted: torch.Tensor, got: torch.Tensor, coarsest: torch.dtype | None = None) -> None:
    """Fail unless two gradients agree to a few roundings of the largest element.

    `coarsest` is that of the dtypes that take part, where it is not theirs.
    """
    assert wanted.dtype == got.dtype
    limit = GRADIENT_ULPS * torch.finfo(coarsest or wanted.dtype).eps * wanted.abs().max().item()
    apart = (wanted.double() - got.double()).abs().max().item()
    assert apart <= limit, f"{apart:.3g} > {limit:.3g}"


def assert_as_exact_as(
    reference: torch.Tensor, got: torch.Tensor, exact: torch.Tensor, eps: float, tolerance: Tolerance = KERNEL
) -> None:
    """Fail unless `got` is about as near to `exact` (fp64) as `reference` is; all three have one shape.

    `eps` is that of the coarsest dtype that takes part.
    """
    assert got.shape == reference.shape == exact.shape
    assert got.dtype == reference.dtype
    if not got.numel():
        return
    assert torch.isfinite(got).all(), "not every element was written, or some overflowed"
    ulp = eps * exact.abs().max().item()
    ours, theirs = (got.double() - exact).abs(), (reference.double() - exact).abs()
    assert theirs.max().item() <= tolerance.reference_ulps * ulp, "the reference is wrong"
    assert ours.max().item() <= tolerance.largest * theirs.max().item() + tolerance.largest_floor_ulps * ulp
    row_ulp = eps * exact.square().mean().sqrt().item()
    row_floor = tolerance.row_floor_ulps * row_ulp * got.shape[-1] / got.numel()
    limit = tolerance.root_mean_square * theirs.square().mean().sqrt().item() + row_floor
    assert ours.square().mean().sqrt().item() <= limit


# Logits in fp64 beside the original's, whose cache rounds to 8 bits in plain torch, relative: the same roundings,
# unless two sums in another order meet one halfway, which moves a number by a sixteenth of it; none of these do.
ROUNDED_CACHE = 1e-6
# The same in fp32 by kernels: as a whole forward in another order.
ROUNDED_CACHE_IN_FP32 = WHOLE_FORWARD_IN_FP32
