"""Carries out a plan: cold starts, then what runs at once, then what has to be compiled first.

Every figure is handed on as soon as it is there, so a run that is killed has lost the rest and nothing else.
"""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.console.progress_steps import Step
from rewrite.measure import limits, profiling, timing
from rewrite.measure.presets import config_for

from . import cold, contenders, overhead, prefill, token_parity
from .benchmark_models import Subject, build, from_checkpoint, load, sharing
from .benchmark_plan import COMPILED, LIGER, ORIGINAL, OURS, SCHEMA, STATIC, STEP, Cell, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from rewrite.measure.contender import Contender

Progress = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


def measure(plan: Plan, keep: Keep = lambda record: None, progress: Progress = lambda message: None) -> dict[str, Any]:
    """Measure everything in `plan`; `keep` gets the results whenever there are more of them.

    Raises:
        RewriteError: the package or its original cannot be loaded or built.
    """
    return _Run(plan, keep, progress).everything()


@dataclass
class _Run:
    plan: Plan
    keep: Keep
    progress: Progress
    started: float = field(default_factory=time.perf_counter)
    record: dict[str, Any] = field(default_factory=dict)
    subject: Subject = field(init=False)
    ours: Any = None
    theirs: Any = None
    steps: int = 0
    """Begun so far."""

    @property
    def gpu(self) -> bool:
        return self.plan.device != "cpu"

    def everything(self) -> dict[str, Any]:
        import torch

        plan = self.plan
        self.subject = load(plan.package, plan.original)
        self.record = header(plan, self.subject)
        torch.manual_seed(plan.seed)
        with _quiet():
            if self.gpu:
                self._say("memory bandwidth")
                self.record["bandwidth"] = limits.bandwidths(plan.device)
                torch.cuda.empty_cache()
            self._cold(ORIGINAL, OURS)
            self._build()
            for cell in plan.cells:
                self._at_once(cell)
            self._prefill(compiled=False)
            for cell in plan.cells if self.gpu else ():
                self._compiled(cell)
            if self.gpu:
                self._prefill(compiled=True)
            for cell in plan.cells if self.gpu and self._time_is_left() else ():
                self._profile(cell)
            self.ours = self.theirs = None
            _release(plan.device)
            if self.gpu and self._time_is_left():
                self._cold(STATIC)
        self.record["complete"] = True
        self._keep()
        return self.record

    def _say(self, message: str) -> None:
        """Say what is measured now, and how much of what the plan has was measured before."""
        self.progress(Step(message, self.steps, max(self._planned(), self.steps + 1)))
        self.steps += 1

    def _planned(self) -> int:
        """How many steps there are at most: models, bandwidth, first tokens, and what each cell and length takes."""
        plan = self.plan
        first_tokens = len({ORIGINAL, OURS, *([STATIC] if self.gpu else [])} & {*plan.sides}) if plan.cold else 0
        compiled = sum(plan.wants(name, cell) for cell in plan.cells for name in COMPILED) if self.gpu else 0
        passes = 2 if self.gpu else 1
        return passes + first_tokens + 2 * passes * len(plan.cells) + compiled + passes * len(plan.prefill)

    def _keep(self) -> None:
        self.record["seconds"] = time.perf_counter() - self.started
        self.keep(self.record)

    def _time_is_left(self) -> bool:
        return time.perf_counter() - self.started < self.plan.budget

    def _cold(self, *sides: str) -> None:
        for side in sides if self.plan.cold else ():
            if side in self.plan.sides:
                self._say(f"first token of a new process, {side}")
                self.record["cold"][side] = cold.first_token(self.plan, side, self.plan.cells[0])
                self._keep()

    def _build(self) -> None:
        plan, subject = self.plan, self.subject
        self._say("building the models")
        if plan.weights is not None:
            self.ours = from_checkpoint(subject.rewritten, plan.weights, plan.dtype, plan.device)
        else:
            assert plan.shape is not None
            config = config_for(subject.original.config_class, plan.shape)
            self.ours = build(subject.rewritten, config, plan.dtype, plan.device, plan.seed)
        self.theirs = sharing(subject.original, self.ours)
        self.record["parameters"] = sum(p.numel() for p in self.ours.parameters())

    def _prompts(self, rows: int, length: int, number: int) -> Tensor:
        import torch

        vocab = int(self.ours.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(self.plan.seed * 1000 + number)
        return torch.randint(4, vocab, (rows, length), generator=generator).to(self.plan.device)

    def _entry(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell, made when first asked for."""
        for entry in self.record["cells"]:
            if (entry["batch"], entry["context"]) == (cell.batch, cell.context):
                found: dict[str, Any] = entry
                return found
        entry = {**asdict(cell), "sides": {}, "limit": self._limit(cell)}
        self.record["cells"].append(entry)
        return entry

    def _limit(self, cell: Cell) -> dict[str, Any]:
        """Bytes that a step must read, and ms that this takes at the bandwidth read here."""
        weights = limits.weight_bytes(self.ours, cell.batch)
        size = next(self.ours.parameters()).element_size()
        cache = limits.cache_bytes(self.ours.config, cell.batch, cell.context, size)
        limit: dict[str, Any] = {"weight_bytes": weights, "cache_bytes": cache}
        if self.gpu:
            read = self.record["bandwidth"]["read"]
            limit |= {"weights_ms": weights / read * 1e3, "ms": (weights + cache) / read * 1e3}
        return limit

    def _at_once(self, cell: Cell) -> None:
        """Everything that needs no compiling: the original, Liger and ours, and whether the tokens agree."""
        entry, new = self._entry(cell), self.plan.new_tokens
        sides = [contenders.rewritten(self.ours, new, self.plan.device)]
        if self.plan.wants(ORIGINAL, cell):
            sides.append(contenders.original(self.theirs, new))
        if self.plan.wants(LIGER, cell) and contenders.liger_installed() and self.gpu:
            sides += self._tried(entry, LIGER, lambda: [contenders.liger(self.subject, self.ours, new)]) or []
        self._say(f"{cell}: tokens")
        self._tried(entry, OURS, lambda: self._parity(cell, entry, sides[0]))
        self._say(f"{cell}: {', '.join(side.name for side in sides)}")
        self._time(cell, entry, sides)

    def _parity(self, cell: Cell, entry: dict[str, Any], ours: Contender) -> None:
        rows = max(cell.batch, self.plan.parity_rows if cell.context <= 1024 else 1)
        prompts = self._prompts(rows, cell.context, 1)
        new = self.plan.parity_tokens
        expected = token_parity.truth(self.theirs, prompts, new)
        found = token_parity.compare(self.theirs, expected, token_parity.generated(ours, prompts, new, cell.batch))
        entry["parity"] = {**asdict(found), "summary": found.summary}
        entry["explain"] = str(self.subject.explain(self.ours))
        self._keep()

    def _compiled(self, cell: Cell) -> None:
        """The original compiled in its two ways, one at a time, each beside ours once more."""
        entry, new = self._entry(cell), self.plan.new_tokens
        for name in COMPILED:
            if not self.plan.wants(name, cell):
                continue
            if not self._time_is_left():
                entry["sides"].setdefault(name, {})["error"] = "not run: the time budget was spent"
                continue
            self._say(f"{cell}: compiling, {name}")
            capacity = cell.context + 16 + new
            makers: dict[str, Callable[[], Contender]] = {
                STATIC: lambda: contenders.static(self.theirs, new),
                STEP: lambda: contenders.CompiledStep(self.theirs, cell.batch, capacity, min(new, 64)),  # noqa: B023
            }
            began = time.perf_counter()
            side = self._tried(entry, name, makers[name])
            if side is not None:
                self._time(cell, entry, [contenders.rewritten(self.ours, new, self.plan.device), side], profiled=name)
            entry["sides"].setdefault(name, {})["seconds_in_all"] = time.perf_counter() - began
            del side
            _release(self.plan.device)

    def _time(self, cell: Cell, entry: dict[str, Any], sides: list[Contender], profiled: str | None = None) -> None:
        """Warm the sides up, time them in turn, and add their figures to the cell's entry."""
        warm, prompt = [], self._prompts(cell.batch, cell.context, 2)
        for side in sides:
            # Timed as the rounds are, also without gradients: compiled code is made anew where that differs.
            run = lambda new: timing.wall_ms(self.plan.device, lambda: side.generate(prompt, new))  # noqa: B023
            first = self._tried(entry, side.name, lambda: run(side.short + side.steps))  # noqa: B023
            if first is not None and self._tried(entry, side.name, lambda: run(side.short)):  # noqa: B023
                entry["sides"].setdefault(side.name, {}).setdefault("first_call_s", first / 1e3)
                warm.append(side)
        slopes: dict[str, list[float]] = {side.name: [] for side in warm}
        shorts: dict[str, list[float]] = {side.name: [] for side in warm}
        calls = {side.name: self._timer(cell, side, slopes[side.name], shorts[side.name]) for side in warm}
        if OURS not in calls:
            return
        timing.interleaved(calls, self.plan.rounds, self.plan.seconds)
        for side in warm:
            found = entry["sides"].setdefault(side.name, {})
            others = slopes[OURS] if side.name != OURS else None
            add_figures(found, slopes[side.name], shorts[side.name], side, others, self.plan.new_tokens)
            if side.name == profiled and self.gpu:
                found["profile"] = self._tried(entry, side.name, lambda: profiling.kernels(side, prompt))  # noqa: B023
        judge(entry, self.gpu)
        self._keep()

    def _timer(self, cell: Cell, side: Contender, slopes: list[float], shorts: list[float]) -> Callable[[int], float]:
        """One round of a side: a short and a long generation from a new prompt; notes ms a token and of the short."""

        def timed(number: int) -> float:
            prompt = self._prompts(cell.batch, cell.context, 100 + number)
            short = timing.wall_ms(self.plan.device, lambda: side.generate(prompt, side.short))
            long = timing.wall_ms(self.plan.device, lambda: side.generate(prompt, side.short + side.steps))
            slopes.append(max(long - short, 1e-6) / side.steps)
            shorts.append(short)
            return slopes[-1]

        return timed

    def _profile(self, cell: Cell) -> None:
        entry, new = self._entry(cell), self.plan.new_tokens
        prompt = self._prompts(cell.batch, cell.context, 2)
        for side in (contenders.rewritten(self.ours, new, self.plan.device), contenders.original(self.theirs, new)):
            if "decode_ms" in entry["sides"].get(side.name, {}):
                self._say(f"{cell}: kernels of {side.name}")
                found = self._tried(entry, side.name, lambda: profiling.kernels(side, prompt))  # noqa: B023
                entry["sides"][side.name]["profile"] = found
        ours = contenders.rewritten(self.ours, new, self.plan.device)
        found = self._tried(entry, OURS, lambda: overhead.measure(self.subject, self.ours, ours, prompt))
        if found is not None:
            entry["loop"] = found
        self._keep()

    def _prefill(self, compiled: bool) -> None:
        for length in self.plan.prefill:
            if compiled and not self._time_is_left():
                return
            self._say(f"prefill of {length} tokens" + (", compiled" if compiled else ""))
            prompts = lambda number: self._prompts(1, length, 200 + number)  # noqa: B023
            rows = prefill.measure(self.plan, self.ours, self.theirs, prompts, compiled)
            entry = next((e for e in self.record["prefill"] if e["tokens"] == length), None)
            if entry is None:
                self.record["prefill"].append(entry := {"tokens": length, "sides": {}})
            entry["sides"] |= rows
            self._keep()

    def _tried(self, entry: dict[str, Any], name: str, call: Callable[[], Any]) -> Any:
        """The call's result, or None with the error noted: a side that fails must not take the others with it."""
        try:
            return call()
        except Exception as error:  # compilers, libraries and models under test raise what they like
            lines = str(error).strip().splitlines() or [""]
            entry["sides"].setdefault(name, {})["error"] = f"{type(error).__name__}: {lines[0][:300]}"
            self.progress(f"{name} failed: {type(error).__name__}: {lines[0][:200]}")
            self._keep()
            return None


def add_figures(
    found: dict[str, Any],
    slopes: list[float],
    shorts: list[float],
    side: Contender,
    ours: list[float] | None,
    new_tokens: int,
) -> None:
    """Add a side's times: per decoded token, per token of a whole call, and ours against it."""
    samples = found["samples_ms"] = [*found.get("samples_ms", []), *slopes]
    low, high = timing.interval(samples)
    prefilled = median(shorts) - side.short * median(slopes)
    found |= {
        "decode_ms": median(samples),
        "decode_low_ms": low,
        "decode_high_ms": high,
        "decode_p95_ms": timing.percentile(samples, 0.95),
        "generate_ms": prefilled + new_tokens * median(slopes),
        "rounds": len(samples),
    }
    if ours is not None:
        found["ours"] = timing.ratio(slopes, ours)


def judge(entry: Mapping[str, Any], gpu: bool) -> None:
    """Say of each side whether ours is faster: only with equal tokens and an interval without 1."""
    agreed = entry.get("parity", {}).get("passed", False)
    for figures in entry["sides"].values():
        if "ours" in figures:
            figures["claim"] = claim(figures["ours"]["low"], figures["ours"]["high"], agreed, gpu)


def claim(low: float, high: float, agreed: bool, gpu: bool) -> str:
    """What may be said about a ratio (above 1: ours is faster) with this interval."""
    if not gpu:
        return "not claimed on a CPU"
    if low > 1.0:
        return "faster" if agreed else "not claimed: the tokens differ"
    return "slower" if high < 1.0 else "no difference shown"


def header(plan: Plan, subject: Subject) -> dict[str, Any]:
    """Where, with which versions and of what the results are."""
    return {
        **described(plan.package, subject, plan.device),
        "shape": plan.shape,
        "weights": "checkpoint" if plan.weights is not None else "random",
        "dtype": plan.dtype,
        "new_tokens": plan.new_tokens,
        "cold": {},
        "cells": [],
        "prefill": [],
        "complete": False,
    }


def described(package: Path, subject: Subject, device: str) -> dict[str, Any]:
    """A package, and where it is measured."""
    import torch

    from .benchmark_models import lock_of

    lock = lock_of(package)
    card = torch.cuda.get_device_name(device) if device != "cpu" else platform.processor() or "CPU"
    versions = {name: _version(name) for name in ("torch", "transformers", "triton", "liger-kernel")}
    return {
        "schema": SCHEMA,
        "device": card,
        "versions": {"python": platform.python_version(), **{n: v for n, v in versions.items() if v}},
        "model": subject.original.__name__,
        "package": {
            "name": package.name,
            "source": lock["source"]["path"],
            "sites": {name: len(report["rewritten"]) for name, report in lock["transforms"].items()},
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(device: str) -> None:
    import torch

    if device != "cpu":
        torch._dynamo.reset()
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:  # the graphs of compiled code keep their memory otherwise
            trees.reset_cudagraph_trees()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
