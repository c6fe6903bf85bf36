"""How near to its bound the checks of a gate came."""

from __future__ import annotations

from collections.abc import Iterator

from .judging.verdict import Check, Gate

ERRORS = ("max", "max ratio", "KL mean")
"""The figures that a bound stands beside, the larger the worse: a relative error, one as a multiple of the original's
own, and how far apart two distributions are."""
BOUND = "bound"


def worst(gate: Gate) -> str:
    """Return the figure of each kind that comes nearest to its bound and where, and the smallest speed-up claimed."""
    said = []
    for kind in ERRORS:
        found = [(_share(value, limit), value, limit, check.name) for check, value, limit in _pairs(gate, kind)]
        if found:
            _, value, limit, name = max(found, key=lambda one: one[0])
            said.append(f"{kind} {value:.2g} of {limit:.2g} ({name})")
    timed = [
        (float(check.figures["speed-up"]), check.name)
        for check in gate.checks
        if "speed-up" in check.figures and not str(check.figures["outcome"]).startswith("not claimed")
    ]
    if timed:
        value, name = min(timed)
        said.append(f"speed-up {value:.2f} ({name})")
    return "; ".join(said)


def _pairs(gate: Gate, kind: str) -> Iterator[tuple[Check, float, float]]:
    """Yield every figure of a kind with its bound; a check of several comparisons names them in front of both."""
    for check in gate.checks:
        for name, value in check.figures.items():
            prefix = name.removesuffix(kind)
            limit = check.figures.get(f"{prefix}{BOUND}")
            if limit is not None and name.endswith(kind) and (not prefix or prefix.endswith(" ")):
                yield check, float(value), float(limit)


def _share(value: float, limit: float) -> float:
    return value / limit if limit else float("inf") if value else 0.0
