"""The low-precision rule: the rewritten model may be off by a little more than the original itself is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .compare import Mismatch, Observations, measure, require_same_dtypes, same_names
from .tolerances import bound
from .verdict import Figure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """Errors against the fp64 run, pooled over the outputs of one name, in units of the expected magnitude."""

    original: Tensor
    rewritten: Tensor
    where: str


def compare(
    truth: Observations, original: Observations, rewritten: Observations, eps: float, routed: bool
) -> dict[str, Figure]:
    """Compare two low-precision runs by their errors against the fp64 run of the original.

    Each tensor's largest error is held to twice the original's; the RMS error is pooled over all tensors, each scaled
    by its own RMS, because a short tensor's RMS is too noisy for the bound of 1.25.

    Raises:
        Mismatch: an error exceeds its bound.
    """
    import torch

    same_names(original, rewritten)
    require_same_dtypes(original, rewritten)
    samples = [_sample(name, truth[name], original[name], rewritten[name], eps, routed) for name in original]
    own = torch.cat([sample.original for sample in samples])
    new = torch.cat([sample.rewritten for sample in samples])
    own_rms, new_rms = float(own.square().mean().sqrt()), float(new.square().mean().sqrt())
    figures: dict[str, Figure] = {
        "rms": new_rms,
        "original rms": own_rms,
        "rms ratio": new_rms / own_rms if own_rms else float(new_rms > 0),
        "max ratio": max(_ratio(sample.rewritten, sample.original) for sample in samples),
        "bit-equal": all(torch.equal(original[name].cpu(), rewritten[name].cpu()) for name in original),
    }
    limit = bound("yardstick rms") * own_rms + bound("yardstick rms floor") * eps
    if not new_rms <= limit:
        worst = max(samples, key=lambda sample: float(sample.rewritten.square().mean()))
        raise Mismatch(
            f"RMS error {new_rms:.3g} > {limit:.3g}; the original's own is {own_rms:.3g}; {worst.where}", figures
        )
    return figures


def _ratio(new: Tensor, own: Tensor) -> float:
    largest_new, largest_own = float(new.abs().max()), float(own.abs().max())
    return largest_new / largest_own if largest_own else float(largest_new > 0)


def _sample(name: str, truth: Tensor, original: Tensor, rewritten: Tensor, eps: float, routed: bool) -> Sample:
    error = measure(name, truth, rewritten)
    measure(name, original, rewritten)
    own, new = _errors(truth, original), _errors(truth, rewritten)
    if routed:
        own, new = _without_outliers(own), _without_outliers(new)
    limit = bound("yardstick max") * float(own.abs().max()) + bound("yardstick max floor") * eps * error.scale
    largest = float(new.abs().max())
    if not largest <= limit:
        raise Mismatch(
            f"largest error {largest:.3g} > {limit:.3g} = 2 × the original's own + 1 eps; {error.where}",
            {"max": largest, "original max": float(own.abs().max())},
        )
    scale = max(error.scale_rms, 1e-30)
    return Sample(own.flatten() / scale, new.flatten() / scale, error.where)


def _errors(truth: Tensor, found: Tensor) -> Tensor:
    import torch

    expected, result = truth.detach().double().cpu(), found.detach().double().cpu()
    same = (expected == result) | (expected.isnan() & result.isnan())
    return torch.where(same, torch.zeros_like(expected), result - expected).nan_to_num(nan=float("inf"))


def _without_outliers(errors: Tensor) -> Tensor:
    """The errors without the tokens (all axes but the last) that are furthest off."""
    rows = errors.reshape(-1, errors.shape[-1]) if errors.dim() > 1 else errors.reshape(-1, 1)
    keep = rows.shape[0] - round(bound("routed tokens") * rows.shape[0])
    return rows[rows.abs().amax(-1).argsort()[: max(keep, 1)]]
