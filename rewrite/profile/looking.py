"""Watches the calls of a profile's original for compute that need not happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rewrite.show.step import Step

from . import subject
from .calls import DECODE, PROMPT, TRAIN, Call
from .needless import findings
from .subject import Models, Plan
from .watch import Watched, Watcher

CALLS = 3


def look(plan: Plan, progress: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Watch the original, in three calls with other inputs; decode steps are consecutive ones of a generation.

    Training is watched in its forward, without gradients.
    """
    progress(Step("compute that need not happen", 5, 6))
    models = subject.load(replace(plan, kind="forward" if plan.kind == TRAIN else plan.kind))
    watched = watch(plan, models)
    found = findings(watched)
    file = Path(models.files[0]).name
    return {
        "file": file,
        "calls": len(watched),
        "operators": len(watched[0].ops) if watched else 0,
        "findings": [asdict(each) | {"text": f"{file}, {each.text}"} for each in found],
    }


def watch(plan: Plan, models: Models) -> list[Watched]:
    """Return the operators of `forward` in three calls of the original."""
    import torch

    kind = "forward" if plan.kind == TRAIN else plan.kind
    file = models.files[0]
    watcher = Watcher(models.theirs, file)
    made = [
        subject.calls(replace(plan, kind=kind, seed=plan.seed + number), models)["original"] for number in range(CALLS)
    ]
    with torch.no_grad():
        if made[0].kind in (DECODE, PROMPT):
            _generating(watcher, made)
        else:
            for call in made:
                called(watcher, call.model, dict(call.inputs))
    return watcher.calls


def called(watcher: Watcher, model: Any, inputs: dict[str, Any]) -> None:
    """Watch one call of a model."""
    with watcher.call(inputs):
        held = model(**inputs)
    watcher.ended()
    del held


def _generating(watcher: Watcher, made: list[Call]) -> None:
    """Watch `forward` inside `generate()`: of a prompt each, or of steps of one generation."""
    model = made[0].model
    kind, decode = type(model), made[0].kind == DECODE
    original, own = kind.forward, kind.__dict__.get("forward")
    number = 0

    def forward(self: Any, *given: Any, **named: Any) -> Any:
        nonlocal number
        number += 1
        if self is not model or (number == 1 and decode):
            return original(self, *given, **named)
        inputs = {name: value for name, value in named.items() if isinstance(value, _tensor())}
        with watcher.call(inputs):
            out = original(self, *given, **named)
        watcher.ended()
        return out

    import functools

    kind.forward = functools.wraps(original)(forward)
    try:
        for call in made[:1] if decode else made:
            model.generate(**call.inputs, max_new_tokens=CALLS + 1 if decode else 1, do_sample=False, use_cache=True)
    finally:
        if own is None:
            del kind.forward
        else:
            kind.forward = own


def _tensor() -> Any:
    import torch

    return torch.Tensor
