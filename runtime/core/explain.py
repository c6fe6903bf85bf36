"""Says where a rewritten model did not take its fast path, and why."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import nn

from . import backend, place


@dataclass(frozen=True)
class Explanation:
    """What ran in its slower form since the last `reset_fallbacks`."""

    backend: str
    """The backend in force: auto, reference, triton or aiter."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """How often, by `operator: reason`, in this package."""
    modules: dict[str, str] = field(default_factory=dict)
    """The last fallback at each module, `operator: reason` by the module's name; for a group of projections that was
    not packed, the first of them stands for all; the model itself has the name `""`."""
    graphs: list[str] = field(default_factory=list)
    """What is kept for the model: the decode graphs of `generate()`, copies in 8 bits, who multiplies."""

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}"]
        lines += [f"{count:>8} × {what}" for what, count in sorted(self.fallbacks.items())]
        lines += _alike(self.modules)
        lines += self.graphs
        if not self.fallbacks and not self.modules:
            lines.append("every operator took its fast form")
        return "\n".join(lines)


def _alike(modules: dict[str, str]) -> list[str]:
    """Return a line for each group of modules whose names differ in numbers only."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, what in sorted(modules.items()):
        groups[re.sub(r"\d+", "*", name), what].append(name)
    return [
        f"{pattern} ({len(names)}): {what}" if len(names) > 1 else f"{names[0] or 'model'}: {what}"
        for (pattern, what), names in groups.items()
    ]


def explain(model: nn.Module | None = None) -> Explanation:
    """Return every fallback of this package's operators, and the modules of `model` that they happened at."""
    counts = {f"{operator}: {reason}": count for (operator, reason), count in backend.fallbacks().items()}
    if model is None:
        return Explanation(backend.get_backend(), counts)
    graphs = [line for describe in _describers() for line in describe(model)]
    return Explanation(backend.get_backend(), counts, backend.last_reasons(model), graphs)


def _describers() -> Iterator[Callable[[nn.Module], list[str]]]:
    """Yield the function `describe` of every file of this runtime that has one and is in use."""
    for name in sorted(name for name in sys.modules if name.startswith(place.MODULES)):
        describe = vars(sys.modules[name]).get("describe")
        if callable(describe) and describe.__module__ == name:
            yield describe
