"""Training figures: steps of four models beside their originals, and a loss curve beside the original's own band.

    python bench/training.py --out bench/results/training.json           # all, on a GPU
    python bench/training.py --models llama --curve 200 --device cpu     # tiny sizes

A curve is trained three times from the same weights on the same tokens: by the original twice, whose atomics and
choices of kernels differ from run to run, and by the package. The largest distance of ours from the first run is to be
within twice that of the second, or within the rounding of the loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rewrite.benchmark import training_speed
from rewrite.benchmark.benchmark_models import load
from rewrite.benchmark.benchmark_plan import ORIGINAL, OURS, Cell, Plan, write_json
from rewrite.benchmark.rungs import write
from rewrite.codemod.build import build
from rewrite.commands.bench import FOR_TRAINING
from rewrite.package.assemble import assemble
from rewrite.package.lock import Options
from rewrite.source.resolve import resolve
from rewrite.transforms import select

MODELS: dict[str, tuple[str, int | None, Cell]] = {
    "llama": ("1b", None, Cell(4, 2048)),
    "qwen3": ("1b", 28, Cell(4, 2048)),
    "gemma2": ("1b", 26, Cell(1, 2048)),  # four rows do not fit: its attention keeps every score
    "qwen3_moe": ("30b-a3b", 8, Cell(4, 2048)),
}
"""The preset, the layers and the rows of each."""
ROUNDING = 2e-3
"""What losses of bf16 models differ by where nothing but the order of sums does."""


def package_of(model: str, folder: Path) -> Path:
    """Rewrite a model with everything that is for training."""
    source, transforms = resolve(model), select(also=FOR_TRAINING)
    package = folder / f"trained_{model}"
    write(assemble(build(source, transforms), transforms, Options(), package), package)
    return package


def curve(plan: Plan, steps: int) -> dict[str, Any]:
    """Train the original twice and ours once."""
    import torch

    subject = load(plan.package, plan.original)
    losses: dict[str, list[float]] = {}
    for name, side in (("original", ORIGINAL), ("again", ORIGINAL), ("ours", OURS)):
        trainer = training_speed.Trainer(training_speed._model(plan, subject, side), False, plan.device != "cpu")
        batches = [
            training_speed._tokens(dataclasses.replace(plan, seed=plan.seed + number % 20), subject, *_shape(plan))
            for number in range(20)
        ]
        losses[name] = [float(trainer.step(batches[number % 20])) for number in range(steps)]
        del trainer
        training_speed._release(plan.device != "cpu")
    first = torch.tensor(losses["original"])
    band, distance = (float((torch.tensor(losses[name]) - first).abs().max()) for name in ("again", "ours"))
    return {
        "steps": steps,
        "band": band,
        "distance": distance,
        "within": distance <= max(2 * band, ROUNDING),
        **losses,
    }


def said(started: float, model: str, step: str) -> None:
    """Print what is done now, and after how many seconds."""
    print(f"{time.perf_counter() - started:6.1f} s  {model}: {step}", flush=True)


def _shape(plan: Plan) -> tuple[int, int]:
    return plan.cells[0].batch, plan.cells[0].context


def main() -> None:
    """Measure, print tables, and keep the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--sides", nargs="+", choices=training_speed.SIDES, help="Default: all, on a CPU without compilers."
    )
    parser.add_argument("--curve", type=int, default=0, metavar="STEPS", help="of the first model")
    parser.add_argument("--seconds", type=float, default=8.0, help="Of timed steps of a model, at least three rounds.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    gpu, started = given.device != "cpu", time.perf_counter()
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in given.models:
            shape, layers, cell = MODELS[model] if gpu else ("tiny", None, Cell(2, 32))
            sides = given.sides or (training_speed.SIDES if gpu else (ORIGINAL, OURS))
            plan = Plan(
                package_of(model, Path(folder)), shape=shape, layers=layers, device=given.device, cells=(cell,),
                dtype="bfloat16" if gpu else "float32", sides=tuple(sides),
                rounds=(3, 10), seconds=given.seconds if gpu else 1.0,
            )  # fmt: skip
            record[model] = training_speed.measure(plan, progress=functools.partial(said, started, model))
            for table in training_speed.tables(record[model]):
                print(model, table.title, *table.rows, *table.notes, sep="\n  ", flush=True)
            if given.curve and model == given.models[0]:
                record["curve"] = curve(plan, given.curve)
                shown = {key: value for key, value in record["curve"].items() if not isinstance(value, list)}
                print("curve", json.dumps(shown), flush=True)
            if given.out is not None:
                write_json(given.out, record)


if __name__ == "__main__":
    main()
