"""The low-precision rule: the rewritten model may be off by a little more than the original itself is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .compare import Mismatch, Observations, measure, require_same_dtypes, same_names
from .tolerances import bound
from .verdict import Figure

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """Errors of one tensor `[tokens, width]` against the fp64 run, in units of the expected tensor's RMS."""

    name: str
    original: Tensor
    rewritten: Tensor
    peak: float
    where: str

    @property
    def kind(self) -> str:
        """What is compared with what: layers and cache parts by themselves, everything else as logits."""
        found = re.search(r"(hidden_states|keys|values|attentions)\[(\d+)\]", self.name)
        return found.group(0) if found else "logits"


def compare(
    truth: Observations, original: Observations, rewritten: Observations, eps: float, routed: bool
) -> dict[str, Figure]:
    """Compare two low-precision runs by their errors against the fp64 run of the original.

    Outputs of one kind are pooled over all scenarios: the largest error over a single short tensor is too noisy for
    the bound of 2, its RMS for the bound of 1.25. A bug in one scenario alone shows in the fp64 checks.

    Raises:
        Mismatch: an error exceeds its bound.
    """
    import torch

    same_names(original, rewritten)
    require_same_dtypes(original, rewritten)
    samples = [_sample(name, truth[name], original[name], rewritten[name]) for name in original]
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.kind, []).append(sample)
    figures: dict[str, Figure] = {}
    for kind, members in groups.items():
        pooled = _pooled(kind, members, eps, routed)
        if kind == "logits" or not figures:
            figures |= pooled
    equal = all(torch.equal(original[name].cpu(), rewritten[name].cpu()) for name in original)
    return figures | {"bit-equal": equal}


def _pooled(kind: str, samples: list[Sample], eps: float, routed: bool) -> dict[str, Figure]:
    own, new = _joined([s.original for s in samples], routed), _joined([s.rewritten for s in samples], routed)
    own_rms, new_rms = float(own.square().mean().sqrt()), float(new.square().mean().sqrt())
    own_max, new_max = float(own.abs().max()), float(new.abs().max())
    figures: dict[str, Figure] = {
        "rms": new_rms,
        "original rms": own_rms,
        "rms ratio": _ratio(new_rms, own_rms),
        "max ratio": _ratio(new_max, own_max),
    }
    worst = max(samples, key=lambda sample: float(sample.rewritten.abs().max()))
    peak = max(sample.peak for sample in samples)
    largest = bound("yardstick max") * own_max + bound("yardstick max floor") * eps * peak
    if not new_max <= largest:
        text = f"largest error {new_max:.3g} > {largest:.3g} (× RMS); the original's own is {own_max:.3g}"
        raise Mismatch(f"{kind}: {text}; {worst.where}", figures)
    typical = bound("yardstick rms") * own_rms + bound("yardstick rms floor") * eps
    if not new_rms <= typical:
        text = f"RMS error {new_rms:.3g} > {typical:.3g} (× RMS); the original's own is {own_rms:.3g}"
        raise Mismatch(f"{kind}: {text}; {worst.where}", figures)
    return figures


def _ratio(new: float, own: float) -> float:
    return new / own if own else 1.0 if new == 0 else float("inf")


def _sample(name: str, truth: Tensor, original: Tensor, rewritten: Tensor) -> Sample:
    error = measure(name, truth, rewritten)
    measure(name, original, rewritten)
    scale = max(error.scale_rms, 1e-30)
    own, new = (_rows(_errors(truth, found)) / scale for found in (original, rewritten))
    return Sample(name, own, new, error.scale / scale, error.where)


def _errors(truth: Tensor, found: Tensor) -> Tensor:
    import torch

    expected, result = truth.detach().double().cpu(), found.detach().double().cpu()
    same = (expected == result) | (expected.isnan() & result.isnan())
    return torch.where(same, torch.zeros_like(expected), result - expected).nan_to_num(nan=float("inf"))


def _rows(errors: Tensor) -> Tensor:
    """Errors with all axes but the last as one, the tokens."""
    return errors.reshape(-1, errors.shape[-1]) if errors.dim() > 1 else errors.reshape(-1, 1)


def _joined(tensors: list[Tensor], routed: bool) -> Tensor:
    """The errors of tensors as one; where tokens are routed to experts, without those that are furthest off.

    They are chosen among all: of a single token, the last one of a prompt, a tenth is none.
    """
    import torch

    if not routed:
        return torch.cat([rows.flatten() for rows in tensors])
    worst = torch.cat([rows.abs().amax(-1) for rows in tensors])
    keep = max(len(worst) - round(bound("routed tokens") * len(worst)), 1)
    limit = worst.sort().values[keep - 1]
    return torch.cat([rows[rows.abs().amax(-1) <= limit].flatten() for rows in tensors])
