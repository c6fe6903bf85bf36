"""How much a model's fp64 outputs move when nothing of it changes: the yardstick for those that amplify roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .compare import Mismatch, Observations, measure, near_exact
from .tolerances import bound
from .verdict import Figure

TRIALS = 3


def within_noise(
    expected: Observations,
    found: Observations,
    fresh: Callable[[], Any],
    run: Callable[[Any], Observations],
) -> dict[str, Figure]:
    """Compare two fp64 runs; where the fixed bounds are exceeded, by what the original itself moves.

    `fresh` builds the original anew, `run` runs it as `expected` was made. Its noise is measured, not assumed: its own
    weights are nudged, by far less than fp32 can tell, and its outputs compared.

    Raises:
        Mismatch: the error is larger than the fixed bounds, and than the noise allows.
    """
    try:
        return near_exact(expected, found)
    except Mismatch as mismatch:
        if "rms" not in mismatch.figures:
            raise
        noise = [_moved(expected, fresh(), run, trial) for trial in range(TRIALS)]
        typical, largest = (max(figures) for figures in zip(*noise, strict=True))
        figures = mismatch.figures | {"noise max": largest, "noise rms": typical}
        allowed = bound("fp64 noise")
        if largest > bound("fp64 noise ceiling") or not (
            float(mismatch.figures["rms"]) <= allowed * typical and float(mismatch.figures["max"]) <= allowed * largest
        ):
            raise Mismatch(f"{mismatch}; the original itself moves by {largest:.2g}", figures) from mismatch
        return figures


def _moved(expected: Observations, model: Any, run: Callable[[Any], Observations], seed: int) -> tuple[float, float]:
    """RMS and largest relative error of the original with its weights nudged."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + bound("fp64 nudge") * noise.to(parameter))
    found = run(model)
    errors = [measure(name, expected[name], found[name]) for name in expected]
    return max(error.relative_rms for error in errors), max(error.relative_max for error in errors)
