"""One model in one process: every batch size's sides, prepared first and measured later."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forward_sizes import Model

from rewrite.benchmark import forward_speed
from rewrite.benchmark.benchmark_models import build, lock_of, sharing
from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.configs import small_variants

FOREVER = 10**6


class Cells:
    """The batch sizes of one model.

    Args:
        model: what is measured.
        given: the options of `bench/forwards.py child`.
    """

    def __init__(self, model: Model, given: argparse.Namespace):
        self.model, self.given = model, given
        module = importlib.import_module(f"transformers.models.{model.file}.modeling_{model.file}")
        rewritten = loaded_sides.load(loaded_sides.locate(given.package))
        original, ours = getattr(module, model.class_name), getattr(rewritten, model.class_name)
        package = str(rewritten.__package__)
        self.explain = runtime_part(package, "core/explanation").explain
        self.graphs = runtime_part(package, "forward/forward_settings")
        self.store = runtime_part(package, "forward/forward_cache")
        config = small_variants(original, False, {})[0].config if given.tiny else original.config_class(**model.fields)
        dtype = "float32" if given.device == "cpu" else "bfloat16"
        self.ours = build(ours, config, dtype, given.device)
        self.theirs = sharing(original, self.ours)
        self.cells: dict[int, forward_speed.Forward] = {}
        self.first_seconds: dict[int, list[float]] = {}
        """Of the first call of each batch size, and of the second, which captures."""

    def first_calls(self, batch: int, count: int = 2) -> list[float]:
        """Return s that each of the first calls of a batch size takes, with the wait for its end."""
        gpu = self.given.device != "cpu"
        inputs = self.inputs(batch)
        found = []
        for _ in range(count):
            if gpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            with torch.no_grad():
                self.ours(**inputs)
            if gpu:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - started)
        return found

    def inputs(self, batch: int) -> dict[str, Any]:
        """Return what the model is called with."""
        tokens = 11 if self.given.tiny else self.model.tokens[batch > 1]
        return forward_speed.arguments(self.ours, batch, tokens, self.given.device)

    def prepare(self) -> None:
        """Capture and compile everything."""
        given = self.given
        names, compiled = given.sides.split(","), [int(part) for part in given.compiled_batches.split(",") if part]
        for batch in [int(part) for part in given.batches.split(",")]:
            inputs = self.inputs(batch)
            wanted = [name for name in names if "compiled" not in name or batch in compiled]
            cell = forward_speed.Forward(self.theirs, self.ours, self.graphs, inputs, given.device, wanted)
            self.first_seconds[batch] = self.first_calls(batch)
            cell.prepare()
            self.cells[batch] = cell
            gc.collect()

    def measured(self) -> dict[str, Any]:
        """Return the row: times, parity, and what `explain` says."""
        row: dict[str, Any] = {
            "name": self.model.name,
            "class": self.model.class_name,
            "published": self.model.published,
            "package": lock_of(self.given.package)["digest"],
            "device": torch.cuda.get_device_name() if self.given.device != "cpu" else "CPU",
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "triton")},
            "date": time.strftime("%Y-%m-%d"),
            "tiny": self.given.tiny,
            "cells": [],
            "error": "",
        }
        for batch, cell in self.cells.items():
            parity = cell.parity()
            entry = {
                "batch": batch,
                "inputs": {name: list(getattr(value, "shape", ())) for name, value in cell.inputs.items()},
                "sides": cell.times((8, 60), self.given.seconds),
                "errors": cell.errors,
                "parity": parity,
                "agrees": forward_speed.agrees(parity),
                "first_two_calls_s": sum(self.first_seconds[batch]),
                "first_calls_s": self.first_seconds[batch],
            }
            row["cells"].append(entry)
        row["captured"] = [[list(map(list, shapes)), ms] for shapes, ms in self.store.captured_kinds(self.ours)]
        row["explain"] = str(self.explain(self.ours))
        return row
