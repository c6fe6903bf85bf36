"""Compares what two models computed: how large the error is, where it is, and whether it is within its bound."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tolerances import bound
from .verdict import Figure

if TYPE_CHECKING:
    from torch import Tensor

Observations = Mapping[str, "Tensor"]
Triple = tuple[Observations, Observations, Observations]
"""What was computed without roundings to fp32, by the original and by the rewritten model."""

DRAWS = 16
"""Independent inputs over which errors are pooled where those of one draw say that one side rounds more."""


class NotRun(Exception):
    """A check does not apply here; the message says why."""


class DoesNotRun(Exception):
    """The code under test cannot be run at all; the message says why."""


class Mismatch(Exception):
    """A check failed: what differs, where, and the figures."""

    def __init__(self, detail: str, figures: Mapping[str, Figure] | None = None) -> None:
        super().__init__(detail)
        self.figures = dict(figures or {})


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Say in front of a `Mismatch` what it is about."""
    try:
        yield
    except Mismatch as error:
        raise Mismatch(f"{what}: {error}", error.figures) from error


@dataclass(frozen=True)
class Error:
    """The error of one tensor against the expected one, both taken to fp64; `max` and `rms` are absolute."""

    name: str
    max: float
    rms: float
    index: tuple[int, ...]
    expected: float
    found: float
    scale: float
    scale_rms: float

    @property
    def relative_max(self) -> float:
        """Largest error over the largest expected magnitude."""
        return self.max / max(self.scale, 1e-30)

    @property
    def relative_rms(self) -> float:
        """RMS error over the expected RMS."""
        return self.rms / max(self.scale_rms, 1e-30)

    @property
    def where(self) -> str:
        """The largest error in words."""
        return f"{self.name}{list(self.index)}: expected {self.expected:.9g}, found {self.found:.9g}"


def measure(name: str, expected: Tensor, found: Tensor) -> Error:
    """The error of `found` against `expected`.

    Raises:
        Mismatch: the shapes differ, or one is finite where the other is not.
    """
    import torch

    require_same_shape(name, expected, found)
    reference, result = expected.detach().double().cpu(), found.detach().double().cpu()
    if reference.numel() == 0:
        return Error(name, 0.0, 0.0, (), 0.0, 0.0, 0.0, 0.0)
    same = (reference == result) | (reference.isnan() & result.isnan())
    finite = torch.where(reference.isfinite(), reference, torch.zeros_like(reference))
    largest, rms, position = 0.0, 0.0, 0
    if not bool(same.all()):
        difference = torch.where(same, torch.zeros_like(reference), (result - reference).abs())
        difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest, rms = float(difference.max()), float(difference.square().mean().sqrt())
        position = int(difference.argmax())
    return Error(
        name,
        largest,
        rms,
        _index(position, reference.shape),
        float(reference.flatten()[position]),
        float(result.flatten()[position]),
        float(finite.abs().max()),
        float(finite.square().mean().sqrt()),
    )


def likeness(expected: Tensor, found: Tensor) -> dict[str, Figure]:
    """What an error alone does not tell apart: the size of a tensor beside the expected one's, and their cosine.

    An error is as large where a tensor is zero as where it is another one. What is not finite is counted apart.
    """
    reference, result = expected.detach().double().cpu(), found.detach().double().cpu()
    finite = reference.isfinite() & result.isfinite()
    wanted, given = reference[finite], result[finite]
    sizes = float(wanted.norm()), float(given.norm())
    product = sizes[0] * sizes[1]
    return {
        "size": sizes[1] / max(sizes[0], 1e-30),
        "cosine": float(wanted @ given) / product if product else 0.0,
        "not finite": int((~finite).sum()),
    }


def require_same_shape(name: str, expected: Tensor, found: Tensor) -> None:
    """Raise `Mismatch` where an output changed its shape."""
    if expected.shape != found.shape:
        raise Mismatch(f"{name} has shape {list(found.shape)}, expected {list(expected.shape)}")


def _index(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Where an element of a tensor is that has this number."""
    index: list[int] = []
    for size in reversed(shape):
        position, axis = divmod(position, size)
        index.insert(0, axis)
    return tuple(index)


def same_names(expected: Observations, found: Observations) -> None:
    """Raise `Mismatch` unless both sides produced the same outputs."""
    if expected.keys() != found.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        raise Mismatch(f"outputs differ: missing {missing or 'none'}, unexpected {extra or 'none'}")


def require_same_dtypes(expected: Observations, found: Observations) -> None:
    """Raise `Mismatch` where an output changed its dtype."""
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype:
            raise Mismatch(f"{name} is {found[name].dtype}, expected {tensor.dtype}")


_EXPLAINED = {"fp64 max": "fp32 max", "gradient max": "gradient roundings"}
"""Up to which error the original's own roundings to fp32 may explain what is beyond a bound."""


def near_exact(
    expected: Observations,
    found: Observations,
    maximum: str = "fp64 max",
    unrounded: Callable[[], Observations] | None = None,
    more: Callable[[int], Triple] | None = None,
) -> dict[str, Figure]:
    """Compare two fp64 runs. Returns the figures.

    Args:
        expected: of the original.
        found: of the rewritten model.
        maximum: the bound of the largest error.
        unrounded: runs the original without what it rounds to fp32 inside. Where the RMS error is over its bound,
            this is the truth of which the rewritten model has to be as far off as the original: one that is much
            closer leaves out a rounding, which in 16 bits is the cast that a norm depends on. Where the largest error
            is, it may be as large as two such runs make it (a model that multiplies what its norms round).
        more: runs both sides and that truth on other inputs, by their number from 1: one tensor is a sample of a few
            rows, so where it is further off, or closer, the errors over many draws are compared.

    Raises:
        Mismatch: an error exceeds its bound.
    """
    same_names(expected, found)
    require_same_dtypes(expected, found)
    errors = [measure(name, expected[name], found[name]) for name in expected]
    if not errors:
        raise NotRun("the scenario produced no tensor")
    worst = max(errors, key=lambda error: error.relative_max)
    rms = max(error.relative_rms for error in errors)
    figures: dict[str, Figure] = {
        "max": worst.relative_max,
        "bound": bound(maximum),
        "rms": rms,
        "tensors": len(errors),
    }
    loudest = max(errors, key=lambda error: error.relative_rms).name
    text = ""
    if not worst.relative_max <= bound(maximum):
        text = f"relative error {worst.relative_max:.3g} > {bound(maximum):.0e} at {worst.where}"
    elif maximum == "fp64 max" and not rms <= bound("fp64 rms"):
        text = f"relative RMS error {rms:.3g} > {bound('fp64 rms'):.0e} (largest at {worst.where})"
    if not text:
        return figures
    figures |= likeness(expected[loudest], found[loudest])
    most = _EXPLAINED.get(maximum)
    if most is None or unrounded is None or not worst.relative_max <= bound(most):
        raise Mismatch(text, figures)
    try:
        truth = unrounded()
    except NotRun as reason:
        raise Mismatch(f"{text}; without roundings to fp32 the original does not run: {reason}", figures) from None
    same_names(expected, truth)
    for (name, tensor), error in zip(expected.items(), errors, strict=True):
        own = measure(name, truth[name], tensor).relative_max
        allowed = max(bound(maximum), bound("fp64 roundings") * own)
        if error is worst:
            figures["bound"] = allowed
        if not error.relative_max <= allowed:
            raise Mismatch(f"{text}; the original's own roundings to fp32 make {own:.3g}", figures)
    if maximum != "fp64 max":
        return figures
    return figures | _as_far_as_the_original((truth, expected, found), more, text, figures)


def _as_far_as_the_original(
    runs: Triple, more: Callable[[int], Triple] | None, text: str, figures: dict[str, Figure]
) -> dict[str, Figure]:
    """Compare the errors of both sides against the run without roundings to fp32, tensor by tensor."""
    truth, expected, found = runs
    ratios = []
    for name in truth:
        if measure(name, expected[name], found[name]).relative_rms <= bound("fp64 rms"):
            continue
        own, new = _squares(runs, [name])
        if more is not None and not _alike(own, new):
            own, new = _over_draws(own, new, name.partition("#")[0], more)
        ratios.append((new / own) ** 0.5 if own else float("inf"))
        if not _alike(own, new):
            times = f"{ratios[-1]:.3g} times that"
            own_text = f"the original's own roundings to fp32 make {own**0.5:.3g}, the rewritten model's {times}"
            own_text += f" (a cast {'to fp32 is left out' if new < own else 'more, or where the original has none'}?)"
            raise Mismatch(f"{text}; {own_text}", figures)
    return {"rms ratio of the roundings to fp32": max(ratios)} if ratios else {}


def _alike(own: float, new: float) -> bool:
    """Whether neither of two sums of squared errors is so much larger that one side rounds more than the other."""
    limit = bound("fp64 roundings") ** 2
    return own > 0 and own / limit <= new <= own * limit


def _squares(runs: Triple, names: Iterable[str]) -> tuple[float, float]:
    """The squared relative RMS errors of the original and of the rewritten model, summed over some outputs."""
    truth, expected, found = runs
    both = [[measure(name, truth[name], side[name]).relative_rms for name in names] for side in (expected, found)]
    return sum(error**2 for error in both[0]), sum(error**2 for error in both[1])


def _over_draws(own: float, new: float, output: str, more: Callable[[int], Triple]) -> tuple[float, float]:
    """The mean of the squared errors in one output over more draws; one that the original does not run is left out."""
    count = 1
    for number in range(1, DRAWS):
        try:
            runs = more(number)
        except NotRun:
            continue
        names = [name for name in runs[0] if name.partition("#")[0] == output]
        added = _squares(runs, names)
        own, new, count = own + added[0], new + added[1], count + len(names)
    return own / count, new / count


def equal(expected: Observations, found: Observations) -> bool:
    """Whether every output is bit-equal."""
    import torch

    same_names(expected, found)
    return all(torch.equal(expected[name].cpu(), found[name].cpu()) for name in expected)


def join(observations: Iterable[Observations]) -> dict[str, Tensor]:
    """The outputs of several runs as one set, numbered."""
    return {f"{name}#{run}": tensor for run, one in enumerate(observations) for name, tensor in one.items()}


def finite(observations: Observations) -> bool:
    """Whether no output holds an infinity or NaN."""
    return all(bool(tensor.isfinite().all()) for tensor in observations.values())
