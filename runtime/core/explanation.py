"""Says where a rewritten model did not take its fast path, and why."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ..guards import place
from ..guards.observers import global_observers, observers
from . import backend
from .package_lock import read_lock
from .sharded_models import is_local


@dataclass(frozen=True)
class Explanation:
    """What ran in its slower form since the last `reset_fallbacks`: of a model, or of the process if none is given."""

    backend: str
    """The backend in force: auto, reference, triton or aiter."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """How often, by `operator: reason`."""
    modules: dict[str, str] = field(default_factory=dict)
    """The last fallback at each module, `operator: reason` by the module's name; for a group of projections that was
    not packed, the first of them stands for all; the model itself has the name `""`."""
    graphs: list[str] = field(default_factory=list)
    """What is kept for the model: the decode graphs of `generate()`, copies in 8 bits, who multiplies."""
    decode_loops: dict[str, str] = field(default_factory=dict)
    """Whether `generate()` of the model's class, or of every class, can take the decode loop, and why not."""
    watched: dict[str, str] = field(default_factory=dict)
    """Who takes part in calls at the moment, and so rules out what would not make them, by the module's name: hooks,
    and a `forward` of the instance, each with the file that it is of."""
    outside: dict[str, int] = field(default_factory=dict)
    """How often outside of any model's call, by `operator: reason`: of a backward or a compiled model it is not known
    which model it was."""
    process: list[str] = field(default_factory=list)
    """What is counted and kept for all models of this process together: who computed attention, who multiplied."""

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}"]
        lines += _counted(self.fallbacks)
        lines += _alike(self.modules)
        lines += _alike({name: f"watched by {who}" for name, who in self.watched.items()})
        lines += [f"{name}: decode loop: {said}" for name, said in self.decode_loops.items()]
        lines += self.graphs
        slow = any(said != "yes" for said in self.decode_loops.values())
        if not self.fallbacks and not self.outside and not self.modules and not self.watched and not slow:
            lines.append("every operator took its fast form")
        if self.outside:
            lines += ["outside of any model's call, in this process:", *_counted(self.outside)]
        if self.process:
            lines += ["of all models of this process:", *(f"  {line}" for line in self.process)]
        return "\n".join(lines)


def _counted(fallbacks: dict[str, int]) -> list[str]:
    return [f"{count:>8} × {what}" for what, count in sorted(fallbacks.items())]


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
    """Return the fallbacks of `model`, by where they happened, and what is kept for it; without one, all fallbacks."""
    process = [line for describe in _functions("describe_process") for line in describe()]
    if model is None:
        return Explanation(backend.get_backend(), _named(backend.fallbacks()), process=process)
    counts, outside = _named(backend.fallbacks_of(model)), _named(backend.fallbacks_outside())
    graphs = [line for describe in _functions("describe") for line in describe(model)]
    reasons = backend.last_reasons(model)
    with torch.no_grad():  # where marks of what wants a gradient do nothing
        watched = _watched(model)
        if not any(map(backend.observed, model.modules())):  # whoever watched is gone
            reasons = {name: reason for name, reason in reasons.items() if not reason.endswith("observed")}
    return Explanation(backend.get_backend(), counts, reasons, graphs, _of_model(model), watched, outside, process)


def _named(fallbacks: dict[tuple[str, str], int]) -> dict[str, int]:
    return {f"{operator}: {reason}": count for (operator, reason), count in fallbacks.items()}


def _watched(model: nn.Module) -> dict[str, str]:
    """Return who watches the modules of a model now, by their names."""
    found = {name: list(observers(module)) for name, module in model.named_modules() if not is_local(module)}
    found[""] = [*found.get("", ()), *global_observers()]
    return {name: ", ".join(who) for name, who in found.items() if who}


def decode_loops(module: str) -> dict[str, str]:
    """Return what the lock beside a modeling file says of its classes that generate; nothing if it cannot be read."""
    file = getattr(sys.modules.get(module), "__file__", None)
    said = read_lock(Path(file).parent).get("decode_loops") if file else None
    return {str(name): str(text) for name, text in said.items()} if isinstance(said, dict) else {}


def _of_model(model: nn.Module) -> dict[str, str]:
    """Return it of the first class of a package in a model, which something may be wrapped around."""
    for module in model.modules():
        for kind in type(module).__mro__:
            if kind.__name__ in (loops := decode_loops(kind.__module__)):
                return {kind.__name__: loops[kind.__name__]}
        lineage = [kind for kind in type(module).__mro__ if kind.__module__.startswith(place.PREFIX)]
        if lineage and hasattr(module, "generate"):
            has_one = any(kind.__name__.endswith("GraphGeneration") for kind in lineage)
            return {type(module).__name__: "yes" if has_one else "no: the class generates as transformers does"}
    return {}


def _functions(called: str) -> Iterator[Callable[..., list[str]]]:
    """Yield the function of a name of every file of this runtime that has one and is in use.

    `describe(model)` returns lines on what is kept for a model, `describe_process()` on what is counted for all.
    """
    for name in sorted(name for name in sys.modules if name.startswith(place.PREFIX)):
        describe = vars(sys.modules[name]).get(called)
        if callable(describe) and describe.__module__ == name:
            yield describe
