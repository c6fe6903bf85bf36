"""Texts of many lengths, one call after another: the original and its rewritten model in turn, outputs compared.

What an embedding server sees: one text of 8 to 500 tokens a call, or eight of them padded to the longest. The same
calls are made twice before they are timed, so that the buckets have their graphs. Batches are run as ragged ones, too.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from forward_run import Cells
from torch import Tensor

from rewrite.benchmark.forward_speed import LARGEST_ERROR, SMALLEST_ERROR
from rewrite.measure import timing
from rewrite.verify.models import model_inputs

SHORTEST, LONGEST = 8, 500
BATCHES = (1, 8)
SIDES = ("original", "ours", "ragged")
EVERY = 10
"""One call in so many is compared with fp32."""
Side = Callable[[dict[str, Tensor]], Any]


class Lengths:
    """One model; every batch size has its own texts.

    Args:
        cells: both models.
        given: the options of `bench/forwards.py lengths`.
    """

    def __init__(self, cells: Cells, given: argparse.Namespace):
        self.cells, self.given = cells, given
        self.longest = 60 if given.tiny else LONGEST
        if given.device == "cpu":
            cells.ours._forward_without_graph = True
        self.calls: dict[int, list[dict[str, Tensor]]] = {}
        self.warm: dict[int, dict[str, float]] = {}
        self.exact = copy.deepcopy(cells.theirs).float()

    def prepare(self) -> None:
        """Make the calls twice, which captures."""
        deadline = time.monotonic() + self.given.warm_seconds
        for batch in BATCHES:
            self.calls[batch] = self._texts(batch)
            sides = self._sides(batch)
            sides.pop("original")
            started, made = time.monotonic(), 0
            for call in self.calls[batch] * 2:
                for side in sides.values():
                    timing.wall_ms(self.given.device, partial(side, call))
                made += 1
                if time.monotonic() > deadline - self.given.warm_seconds / 2 * (batch == BATCHES[0]):
                    break
            self.warm[batch] = {"calls": made, "seconds": time.monotonic() - started}

    def measured(self) -> dict[str, Any]:
        """Return ms of the sides by batch size, errors, the graphs and their memory."""
        row: dict[str, Any] = {"name": self.cells.model.name, "published": self.cells.model.published, "batches": {}}
        row["device"] = torch.cuda.get_device_name() if self.given.device != "cpu" else "CPU"
        for batch in BATCHES:
            row["batches"][batch] = self._batch(batch)
        row["explain"] = str(self.cells.explain(self.cells.ours))
        return row

    def _texts(self, batch: int) -> list[dict[str, Tensor]]:
        return list(texts(self.cells.ours.config, batch, self.given.calls, self.longest, self.given.device))

    def _batch(self, batch: int) -> dict[str, Any]:
        calls, sides = self.calls[batch], self._sides(batch)
        for call in calls[:3]:
            self._tensors(sides["original"], call)
        store = self.cells.store.store_of(self.cells.ours)
        replays = store.replays
        found: dict[str, Any] = {"warm": self.warm[batch], "timed": self._timed(sides, calls)}
        found |= {"graphs": len(store.graphs), "graphs_mib": store.nbytes / 2**20, "replays": store.replays - replays}
        return {**found, "errors": self._errors(batch, calls)}

    def _sides(self, batch: int) -> dict[str, Side]:
        def ragged(call: dict[str, Tensor]) -> Any:
            with self.cells.graphs.use_ragged_batches():
                return self.cells.ours(**call)

        sides = (lambda call: self.cells.theirs(**call), lambda call: self.cells.ours(**call), ragged)
        return dict(zip(SIDES[: 2 + (batch > 1)], sides, strict=False))

    def _timed(self, sides: dict[str, Side], calls: list[dict[str, Tensor]]) -> dict[str, Any]:
        times: dict[str, list[float]] = {name: [] for name in sides}
        started = time.monotonic()
        for call in calls:
            for name, side in sides.items():
                times[name].append(timing.wall_ms(self.given.device, partial(side, call)))
            if time.monotonic() - started > self.given.seconds:
                break
        found: dict[str, Any] = {"calls": len(times["original"])}
        for name, ms in times.items():
            slower = sum(one > original for one, original in zip(ms, times["original"], strict=True))
            found[name] = {"median_ms": median(ms), "total_ms": sum(ms), "worst_ms": max(ms), "slower": slower}
        return found

    def _errors(self, batch: int, calls: list[dict[str, Tensor]]) -> dict[str, Any]:
        """Return the largest error against fp32 of each side at positions that no mask hides, and if they agree."""
        sides = self._sides(batch)
        errors = dict.fromkeys(sides, 0.0)
        agrees = True
        for call in calls[::EVERY]:
            truth = self._tensors(lambda call: self.exact(**call), call)
            one = {name: self._error(truth, self._tensors(side, call), call) for name, side in sides.items()}
            most = max(LARGEST_ERROR * one["original"], SMALLEST_ERROR)
            agrees = agrees and all(error <= most for error in one.values())
            errors = {name: max(errors[name], one[name]) for name in errors}
        return {**errors, "agrees": agrees}

    def _error(self, truth: dict[str, Tensor], found: dict[str, Tensor], call: dict[str, Tensor]) -> float:
        worst, shown = 0.0, call["attention_mask"].bool()
        for name, wanted in truth.items():
            other = found[name].float()
            if wanted.shape[:2] == shown.shape:
                wanted, other = wanted[shown], other[shown]
            worst = max(worst, ((other - wanted).norm() / wanted.norm()).item())
        return worst

    def _tensors(self, side: Side, call: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(model_inputs.tensors(side(call)))


def texts(config: Any, batch: int, calls: int, longest: int, device: str) -> Iterator[dict[str, Tensor]]:
    """The arguments of calls as a tokenizer makes them: ids [batch, longest of these texts], and their mask."""
    drawn = random.Random(batch)
    generator = torch.Generator().manual_seed(batch)
    for _ in range(calls):
        lengths = torch.tensor([drawn.randint(SHORTEST, longest) for _ in range(batch)])
        most = int(lengths.max())
        ids = torch.randint(5, model_inputs.vocabulary(config), (batch, most), generator=generator)
        mask = (torch.arange(most) < lengths[:, None]).long()
        padding = config.pad_token_id or 0
        yield {"input_ids": torch.where(mask.bool(), ids, padding).to(device), "attention_mask": mask.to(device)}


def told(row: dict[str, Any]) -> str:
    """Return a row as lines of text."""
    lines = []
    for batch, cell in row["batches"].items():
        timed, warm = cell["timed"], cell["warm"]
        lines.append(
            f"{row['name']} batch {batch}: {timed['calls']} calls after {warm['calls']} in {warm['seconds']:.1f} s; "
            f"{cell['replays']} replays, {cell['graphs']} graphs, {cell['graphs_mib']:.0f} MiB; "
            f"errors {cell['errors']}"
        )
        for side in SIDES[: 2 + (batch > 1)]:
            ms = timed[side]
            lines.append(
                f"  {side:8} median {ms['median_ms']:.2f}, total {ms['total_ms']:.0f}, worst {ms['worst_ms']:.0f} ms, "
                f"{ms['slower']} slower than the original"
            )
    return "\n".join([*lines, "  " + row["explain"].replace("\n", "\n  ")[:2000]])
