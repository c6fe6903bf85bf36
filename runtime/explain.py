"""Says where a rewritten model did not take its fast path, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from . import backend


@dataclass(frozen=True)
class Explanation:
    """What ran in its slower form since the last `reset_fallbacks`."""

    backend: str
    """The backend in force: auto, reference or triton."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """How often, by `operator: reason`, in this package."""
    unpacked: dict[str, str] = field(default_factory=dict)
    """Why a group of projections was last called separately, by the name of its first module."""

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}"]
        lines += [f"{count:>8} × {what}" for what, count in sorted(self.fallbacks.items())]
        lines += [f"{name}: not packed, {reason}" for name, reason in sorted(self.unpacked.items())]
        if len(lines) == 1:
            lines.append("every operator took its fast form")
        return "\n".join(lines)


def explain(model: nn.Module | None = None) -> Explanation:
    """Return every fallback of this package's operators, and the projections of `model` that are not packed."""
    counts = {f"{operator}: {reason}": count for (operator, reason), count in backend.fallbacks().items()}
    return Explanation(backend.get_backend(), counts, _unpacked(model) if model is not None else {})


def _unpacked(model: nn.Module) -> dict[str, str]:
    try:
        from .packing import packing_outcomes
    except ModuleNotFoundError:  # a package without packed projections does not carry that file
        return {}
    return packing_outcomes(model)
