"""`rewrite bench --forward`: builds both models of a package, and measures a call at each batch size."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite.measure.presets import config_for
from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.models.configs import small_variants

from . import forward_speed
from .benchmark_models import Subject, build, from_checkpoint, load, sharing
from .benchmark_run import described
from .benchmark_tables import NONE, Table

Progress = Callable[[str], object]
ROUNDS = (5, 60)


@dataclass(frozen=True)
class ForwardPlan:
    """One measurement of calls.

    `shape` is a preset of `presets.SHAPES`; without it and without a checkpoint in `weights` the configuration's own
    defaults are the sizes, on a CPU tiny ones. `tokens` is the length of a text.
    """

    package: Path
    original: str | None = None
    shape: str | None = None
    weights: str | None = None
    device: str = "cuda"
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 32)
    tokens: int = 128
    sides: tuple[str, ...] = forward_speed.SIDES
    seconds: float = 4.0


def measure(plan: ForwardPlan, progress: Progress) -> dict[str, Any]:
    """Measure every batch size.

    Raises:
        VerificationError: the model cannot be built, or nothing is known that it could be given.
        NotAPackage: the folder has no lock.
        OriginalNotFound: the lock names an original that is not here.
    """
    import torch

    subject = load(plan.package, plan.original, calls=True)
    ours = _built(plan, subject)
    theirs = sharing(subject.original, ours)
    graphs = runtime_part(str(subject.rewritten.__module__).rpartition(".")[0], "forward/forward_settings")
    record: dict[str, Any] = {
        **described(plan.package, subject, plan.device),
        "shape": plan.shape or ("" if plan.weights else "the configuration's own sizes"),
        "weights": "checkpoint" if plan.weights else "random",
        "dtype": plan.dtype,
        "gpu": plan.device != "cpu",
        "parameters": sum(parameter.numel() for parameter in ours.parameters()),
        "cells": [],
    }
    for batch in plan.batches:
        progress(f"batch {batch}")
        torch._dynamo.reset()  # no batch size inherits what was learnt of another
        inputs = forward_speed.arguments(ours, batch, plan.tokens, plan.device)
        cell = forward_speed.Forward(theirs, ours, graphs, inputs, plan.device, plan.sides)
        cell.prepare()
        parity = cell.parity()
        record["cells"].append(
            {
                "batch": batch,
                "inputs": {name: list(getattr(value, "shape", ())) for name, value in inputs.items()},
                "sides": cell.times(ROUNDS, plan.seconds),
                "errors": cell.errors,
                "parity": {"errors": parity, "passed": forward_speed.agrees(parity)},
            }
        )
        del cell
        gc.collect()
    record["explain"] = str(subject.explain(ours))
    return record


def _built(plan: ForwardPlan, subject: Subject) -> Any:
    if plan.weights is not None:
        return from_checkpoint(subject.rewritten, plan.weights, plan.dtype, plan.device)
    config_class = subject.original.config_class
    if plan.shape is not None:
        config = config_for(config_class, plan.shape)
    elif plan.device == "cpu":
        config = small_variants(subject.original, False, {})[0].config
    else:
        config = config_class()
    return build(subject.rewritten, config, plan.dtype, plan.device)


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each batch size."""
    for cell in record["cells"]:
        sides = cell["sides"]
        rows = [_row(name, sides[name]) for name in sorted(sides, key=lambda name: -sides[name]["ms"])]
        errors = ", ".join(
            f"{forward_speed.TITLES[name]} {error:.2e}" for name, error in cell["parity"]["errors"].items()
        )
        outcome = "agree" if cell["parity"]["passed"] else "DO NOT AGREE"
        notes = [f"outputs {outcome}, errors against fp32: {errors}"]
        notes += [f"{forward_speed.TITLES[name]}: {error}" for name, error in cell["errors"].items()]
        shapes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in cell["inputs"].items() if shape)
        yield Table(f"a call, batch {cell['batch']} ({shapes})", ("", "ms", "rewritten is"), tuple(rows), tuple(notes))


def _row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    ratio = figures.get("ours")
    said = f"{ratio['value']:.2f}× ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else NONE
    return forward_speed.TITLES[name], f"{figures['ms']:.3f}", said


def exit_code(record: Mapping[str, Any]) -> int:
    """0, or 1 where outputs differ, a rewritten side failed, or ours is slower than the original as it is on a GPU."""
    for cell in record["cells"]:
        own = (forward_speed.OURS, forward_speed.OURS_COMPILED)
        ratio = cell["sides"].get(forward_speed.ORIGINAL, {}).get("ours", {"high": 1.0})
        slower = ratio["high"] < 1.0 and record["gpu"]
        if not cell["parity"]["passed"] or slower or any(name in cell["errors"] for name in own):
            return 1
    return 0
