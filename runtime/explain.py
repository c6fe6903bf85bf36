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
    modules: dict[str, str] = field(default_factory=dict)
    """The last fallback at each module, `operator: reason` by the module's name; for a group of projections that was
    not packed, the first of them stands for all."""

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}"]
        lines += [f"{count:>8} × {what}" for what, count in sorted(self.fallbacks.items())]
        lines += [f"{name}: {what}" for name, what in sorted(self.modules.items())]
        if len(lines) == 1:
            lines.append("every operator took its fast form")
        return "\n".join(lines)


def explain(model: nn.Module | None = None) -> Explanation:
    """Return every fallback of this package's operators, and the modules of `model` that they happened at."""
    counts = {f"{operator}: {reason}": count for (operator, reason), count in backend.fallbacks().items()}
    return Explanation(backend.get_backend(), counts, backend.last_reasons(model) if model is not None else {})
