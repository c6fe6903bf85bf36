"""Watches the calls of a profile's original for compute that need not happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rewrite.console.progress_steps import Step

from ..profile import subject
from ..profile.profiled_calls import DECODE, PROMPT, TRAIN, Call
from ..profile.subject import Models, Plan
from .redundant_ops import findings
from .repeated import parts
from .watch import Watched, Watcher

CALLS = 3
WRITTEN = ("input_ids", "decoder_input_ids", "inputs_embeds")
"""What a generation itself writes: two steps with the same token have it by chance."""


def look(plan: Plan, progress: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Watch the original, in three calls with other inputs; decode steps are consecutive ones of a generation.

    A call of `forward` is watched again with some arguments of the first and the rest of the second, for each set of
    arguments that a part of it depends on alone. Steps of a generation keep of themselves what stays the same.

    Training is watched in its forward, without gradients.
    """
    progress(Step("compute that need not happen", 5, 6))
    models = subject.load(replace(plan, kind="forward" if plan.kind == TRAIN else plan.kind))
    watched, kept = watch(plan, models)
    found = findings(watched, kept)
    file = Path(models.files[0]).name
    return {
        "file": file,
        "calls": len(watched),
        "operators": len(watched[0].ops) if watched else 0,
        "findings": [asdict(each) | {"text": f"{file}, {each.text}"} for each in found],
    }


def watch(plan: Plan, models: Models) -> tuple[list[Watched], list[Watched]]:
    """Return the operators of `forward` in three calls of the original, and in calls with arguments of the first."""
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
            return watcher.calls, []
        return called_often(watcher, models.theirs, [dict(call.inputs) for call in made])


def called_often(
    watcher: Watcher, model: Any, inputs: Sequence[dict[str, Any]]
) -> tuple[list[Watched], list[Watched]]:
    """Watch calls with these inputs, and then some with arguments of the first and the others of the second."""
    for given in inputs:
        called(watcher, model, given)
    calls = list(watcher.calls)
    for kept in parts(calls[0]):
        called(watcher, model, inputs[1] | {name: inputs[0][name] for name in sorted(kept)})
    return calls, watcher.calls[len(calls) :]


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
        with watcher.call({name: value for name, value in named.items() if name not in WRITTEN}):
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
