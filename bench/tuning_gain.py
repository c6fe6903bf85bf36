"""What `rewrite tune` still gains: a step of a whole model by the tiles of the rule and by those that a search found.

    python bench/tuning_gain.py PACKAGES --models 1b,qwen3 --batches 1,8 --seconds 25 --json FILE

`PACKAGES` holds a package for each file (`rewrite llama --out PACKAGES/llama`). The search is that of the command, in
a few layers; both tables are then replayed in turn in all layers, and the logits of one step are compared. Nothing is
written into the packages.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path
from typing import Any

import family_sizes
import torch

from rewrite.benchmark.benchmark_models import build
from rewrite.benchmark.benchmark_plan import write_json
from rewrite.measure.presets import config_for
from rewrite.tuning import results
from rewrite.tuning.candidates import Entry, Limits, candidates
from rewrite.tuning.search import search
from rewrite.tuning.tuned_steps import Steps
from rewrite.tuning.tuning_run import LAYERS, rounds
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.subjects import find_subjects

PRESETS = ("1b", "8b", "30b-a3b")
CONTEXT = 512
BLOCKS = 12
"""Figures for each table; the median is kept."""


def main() -> int:
    """Measure each model at each batch size and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--models", default="1b,8b,qwen3,qwen2,granite,gemma2", help="presets of Llama, or families")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--seconds", type=float, default=75.0, help="for each search")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.models.split(","):
        for batch in map(int, given.batches.split(",")):
            rows.append(measured(given.packages, name, batch, given.seconds))
            print(line(rows[-1]), flush=True)
            if given.json:
                write_json(given.json, rows)
    return 0


def measured(packages: Path, name: str, batch: int, seconds: float) -> dict[str, Any]:
    """Search tiles for a model of a few layers, and time both tables in the whole one."""
    model = built(packages, name, batch, LAYERS)
    properties = torch.cuda.get_device_properties(model.device)
    options = functools.partial(candidates, limits=Limits.of(properties))
    steps = Steps(model, batch, CONTEXT)
    steps.compile_ahead(rounds(steps, options))
    changes = search(steps, options, seconds)
    found: dict[str, Entry] = {change.name: change.after for change in changes if change.after != change.before}
    steps.decode.release()
    del steps, model
    torch.cuda.empty_cache()
    model = built(packages, name, batch, None)  # a graph does not keep its model
    whole = Steps(model, batch, CONTEXT)
    logits = [logits_with(whole, table) for table in ({}, found)]
    by_rule, by_search = (statistics.median(times or [float("nan")]) for times in whole.times([{}, found], BLOCKS))
    row = {
        "model": name,
        "batch": batch,
        "chip": properties.name,
        "rule_ms": by_rule,
        "tuned_ms": by_search,
        "gain": by_rule / by_search - 1,
        "logits_off": float((logits[0] - logits[1]).norm() / logits[0].norm()),
        "searched": [change.name for change in changes],
        "changed": {change.name: [results.shown(change.before), results.shown(change.after)] for change in changes
                    if change.after != change.before},
    }  # fmt: skip
    whole.decode.release()
    torch.cuda.empty_cache()
    return row


def built(packages: Path, name: str, batch: int, layers: int | None) -> Any:
    """A model of the package with random weights: all of its layers, or the first few."""
    if name in PRESETS:
        package = "qwen3_moe" if name == "30b-a3b" else "llama"
        main = subject(packages / package)
        config = config_for(main.config_class, name, **({} if layers is None else {"num_hidden_layers": layers}))
    else:
        family = next(family for family in family_sizes.FAMILIES if family.file == name)
        main = subject(packages / name)
        config = main.config_class(**family.fields | {"pad_token_id": 0})
        if layers is not None:
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
    return build(main.rewritten, config, "bfloat16", "cuda")


def subject(package: Path) -> Any:
    """The causal model of a package."""
    module = loaded_sides.load(loaded_sides.locate(package))
    return find_subjects(module, module).main


def logits_with(steps: Steps, table: dict[str, Entry]) -> torch.Tensor:
    """Logits of one step with a table, `[B, V]` in fp32."""
    steps.tiles.try_out(table)
    try:
        with torch.no_grad():
            steps._begin()
            return steps.decode.call.forward().float().clone()
    finally:
        steps.tiles.try_out({})


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    return (
        f"{row['model']} batch {row['batch']}: {row['rule_ms']:.3f} ms by the rule, {row['tuned_ms']:.3f} by the "
        f"search ({row['gain']:+.1%}); logits {row['logits_off']:.1e}; of {len(row['searched'])} names changed: "
        + ", ".join(f"{name} {' to '.join(pair)}" for name, pair in row["changed"].items())
    )


if __name__ == "__main__":
    sys.exit(main())
