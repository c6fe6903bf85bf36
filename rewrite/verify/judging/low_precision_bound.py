"""The low-precision rule: the rewritten model may be off by a little more than the original itself is.

Some errors are rare events: where the largest score of an attention is far above the others, a rounding of two that
are near each other sends a whole weight to another key, once in many rows. Of one draw of inputs such errors tell
little: two equally good roundings came out between 0.07 and 1.75 times each other, of 16 draws with all their rows
between 0.89 and 0.96 (attention over 450 tokens in bfloat16, hidden states times eight, weights of 24 seeds). So what
exceeds a bound is asked again with other inputs, and judged by the errors of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .compare import (
    DRAWS,
    Mismatch,
    NotRun,
    Observations,
    measure,
    require_same_dtypes,
    require_same_shape,
    same_names,
)
from .tolerances import bound
from .verdict import Figure

if TYPE_CHECKING:
    from torch import Tensor

FEW_DRAWS = 4
"""After so many draws what is plainly beyond its bound has failed."""


@dataclass(frozen=True)
class Runs:
    """The outputs of one draw of inputs: of the original in fp64, and of both sides in a low precision."""

    truth: Observations
    original: Observations
    rewritten: Observations

    def only(self, names: list[str]) -> Runs:
        """Some of the outputs."""
        parts = (self.truth, self.original, self.rewritten)
        return Runs(*({name: part[name] for name in names} for part in parts))


@dataclass(frozen=True)
class Side:
    """The errors of one side: how many, the sum of their squares and the largest."""

    count: int
    squares: float
    largest: float

    @property
    def rms(self) -> float:
        """The RMS error."""
        return (self.squares / self.count) ** 0.5

    def with_more(self, other: Side) -> Side:
        """The errors of two draws."""
        return Side(self.count + other.count, self.squares + other.squares, max(self.largest, other.largest))


@dataclass(frozen=True)
class Pool:
    """The errors of both sides in all outputs of one kind, over one draw of inputs or several."""

    original: Side
    rewritten: Side
    peak: float
    where: str
    draws: int = 1

    def with_more(self, other: Pool) -> Pool:
        """The errors of two pools."""
        worse = other if other.rewritten.largest > self.rewritten.largest else self
        return Pool(
            self.original.with_more(other.original),
            self.rewritten.with_more(other.rewritten),
            max(self.peak, other.peak),
            worse.where,
            self.draws + other.draws,
        )

    def largest_allowed(self, eps: float) -> float:
        """The bound of the rewritten side's largest error."""
        return bound("yardstick max") * self.original.largest + bound("yardstick max floor") * eps * self.peak

    def figures(self, eps: float) -> dict[str, Figure]:
        """How far both are off; `bound` is that of the ratio of the largest errors."""
        own, new = self.original, self.rewritten
        figures: dict[str, Figure] = {
            "rms": new.rms,
            "original rms": own.rms,
            "rms ratio": _ratio(new.rms, own.rms),
            "max ratio": _ratio(new.largest, own.largest),
            "bound": _ratio(self.largest_allowed(eps), own.largest),
        }
        return figures | ({"draws": self.draws} if self.draws > 1 else {})

    def problem(self, eps: float, times: float = 1.0) -> str:
        """What exceeds its bound, or so many times its bound, in words; nothing if nothing does."""
        own, new = self.original, self.rewritten
        largest = self.largest_allowed(eps)
        typical = bound("yardstick rms") * own.rms + bound("yardstick rms floor") * eps
        unit = f"(× RMS, {self.draws} draws)" if self.draws > 1 else "(× RMS)"
        if not new.largest <= times * largest:
            return f"largest error {new.largest:.3g} > {largest:.3g} {unit}; the original's own is {own.largest:.3g}"
        if not new.rms <= times * typical:
            return f"RMS error {new.rms:.3g} > {typical:.3g} {unit}; the original's own is {own.rms:.3g}"
        return ""


Pools = dict[str, Pool]


def compare(
    truth: Observations, original: Observations, rewritten: Observations, eps: float, routed: bool
) -> dict[str, Figure]:
    """Compare two low-precision runs by their errors against the fp64 run of the original.

    Outputs of one kind are pooled over all scenarios: the largest error over a single short tensor is too noisy for
    the bound of 2, its RMS for the bound of 1.25. A bug in one scenario alone shows in the fp64 checks.

    Raises:
        Mismatch: an error exceeds its bound.
    """
    runs = Runs(truth, original, rewritten)
    pools = _pools(runs, routed)
    _judge(pools, eps)
    return _figures(pools, eps) | {"bit-equal": _equal(runs)}


def compare_draws(draw: Callable[[int], Runs], eps: float, routed: bool) -> dict[str, Figure]:
    """The same of a first draw of inputs; where that exceeds a bound, of all errors over many draws.

    Args:
        draw: runs both sides on the inputs of that number. One after the first that raises `NotRun` is left out.
        eps: of the dtype.
        routed: whether tokens are routed to experts.

    Raises:
        Mismatch: an error exceeds its bound over all draws, or plainly over the first few.
    """
    first = draw(0)
    pools = _pools(first, routed)
    if not any(pool.problem(eps) for pool in pools.values()):
        return _figures(pools, eps) | {"bit-equal": _equal(first)}
    for number in range(1, DRAWS):
        if number == FEW_DRAWS:
            _judge(pools, eps, bound("plainly beyond"))
        try:
            more = _pools(draw(number), routed)
        except NotRun:
            continue
        pools = {kind: pool.with_more(more[kind]) if kind in more else pool for kind, pool in pools.items()}
    _judge(pools, eps)
    return _figures(pools, eps) | {"bit-equal": False}


def _judge(pools: Pools, eps: float, times: float = 1.0) -> None:
    for kind, pool in pools.items():
        if problem := pool.problem(eps, times):
            raise Mismatch(f"{kind}: {problem}; {pool.where}", pool.figures(eps))


def _figures(pools: Pools, eps: float) -> dict[str, Figure]:
    kind = "logits" if "logits" in pools else next(iter(pools))
    return pools[kind].figures(eps)


def _equal(runs: Runs) -> bool:
    import torch

    return all(torch.equal(value.cpu(), runs.rewritten[name].cpu()) for name, value in runs.original.items())


def _pools(runs: Runs, routed: bool) -> Pools:
    same_names(runs.original, runs.rewritten)
    require_same_dtypes(runs.original, runs.rewritten)
    groups: dict[str, list[str]] = {}  # layers and parts of a cache by themselves, everything else as logits
    for name in runs.original:
        found = re.search(r"(hidden_states|keys|values|attentions)\[(\d+)\]", name)
        groups.setdefault(found.group(0) if found else "logits", []).append(name)
    return {kind: _pooled(runs, names, routed) for kind, names in groups.items()}


def _pooled(runs: Runs, names: list[str], routed: bool) -> Pool:
    """The errors `[tokens, width]` of outputs of one kind, in units of the RMS of each expected tensor."""
    own: list[Tensor] = []
    new: list[Tensor] = []
    peak = 0.0
    worst, where = -1.0, ""
    for name in names:
        error = measure(name, runs.truth[name], runs.rewritten[name])
        require_same_shape(name, runs.original[name], runs.rewritten[name])
        scale = max(error.scale_rms, 1e-30)
        for errors, side in ((own, runs.original), (new, runs.rewritten)):
            errors.append(_rows(_errors(runs.truth[name], side[name])) / scale)
        peak = max(peak, error.scale / scale)
        if error.max / scale > worst:
            worst, where = error.max / scale, error.where
    return Pool(_side(_joined(own, routed)), _side(_joined(new, routed)), peak, where)


def _side(errors: Tensor) -> Side:
    return Side(errors.numel(), float(errors.square().sum()), float(errors.abs().max()))


def _ratio(new: float, own: float) -> float:
    return new / own if own else 1.0 if new == 0 else float("inf")


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
