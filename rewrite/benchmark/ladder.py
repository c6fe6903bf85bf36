"""The ladder: packages with one optimisation more each, measured rung by rung beside the original.

`rewrite bench --ladder-prepare` writes the packages and a manifest; measuring needs only those. Every rung is timed in
turn with the original and shares its weights, so its ratio stands on its own and a rung is compared with the one below
by the ratios of both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rewrite.console.progress_steps import Step
from rewrite.errors import UsageError
from rewrite.measure import profiling, timing
from rewrite.measure.categories import CATEGORIES, TITLES
from rewrite.measure.presets import config_for

from . import contenders, token_parity
from .benchmark_models import build, load, sharing
from .benchmark_plan import ORIGINAL, OURS, Cell, Plan
from .benchmark_run import _quiet, claim, header
from .benchmark_tables import NONE, Table, narrow, plain_rows, ratio_text

MANIFEST = "ladder.json"
LARGE = 0.02
"""Share of a token's kernels from which a change of a category is said."""


class NoLadder(UsageError):
    """A folder has no manifest of a ladder."""

    def __init__(self, folder: Path):
        super().__init__(f"{folder} has no {MANIFEST}: `rewrite bench MODEL --ladder-prepare {folder}` writes one.")


def rungs(folder: Path) -> list[dict[str, Any]]:
    """The rungs of a prepared ladder, lowest first: `name`, `package`, `transforms`, `sites`.

    Raises:
        NoLadder: there is no manifest.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise NoLadder(folder)
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rungs"]
    return found


def measure(
    folder: Path,
    plan: Plan,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Climb the ladder in `folder` at the first cell of `plan`; `keep` gets the results after every rung."""
    import torch

    steps, cell = rungs(folder), plan.cells[0]
    if not steps:
        raise NoLadder(folder)
    top = load(folder / steps[-1]["package"], plan.original)
    assert plan.shape is not None
    with _quiet():
        donor = build(
            top.rewritten, config_for(top.original.config_class, plan.shape), plan.dtype, plan.device, plan.seed
        )
        theirs = sharing(top.original, donor)
        prompts = _prompts(donor, plan, max(cell.batch, plan.parity_rows), cell.context)
        record = header(replace(plan, package=folder / steps[-1]["package"]), top) | {
            "cell": asdict(cell),
            "rungs": [],
        }
        progress("what the original generates")
        truth = token_parity.truth(theirs, prompts, plan.parity_tokens)
        baseline = contenders.original(theirs, plan.new_tokens)
        first = _profiled(baseline, prompts[: cell.batch], plan.device)
        record["rungs"].append({"name": "original, eager", "sites": 0, **first})
        for number, step in enumerate(steps):
            progress(Step(step["name"], number, len(steps)))
            last = step is steps[-1]
            model = donor if last else sharing(load(folder / step["package"], plan.original).rewritten, donor)
            side = contenders.rewritten(model, plan.new_tokens, plan.device)
            entry = {"name": step["name"], "sites": step["sites"]}
            try:
                entry |= _rung(plan, cell, side, baseline, theirs, truth, prompts)
            except Exception as error:  # a rung under test may raise anything; the others are still measured
                entry["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            record["rungs"].append(entry)
            original = [rung["original_ms"] for rung in record["rungs"] if "original_ms" in rung]
            record["rungs"][0]["decode_ms"] = median(original) if original else None
            keep(record)
            del model, side
            if plan.device != "cpu":
                torch.cuda.empty_cache()
    return record


def _rung(
    plan: Plan, cell: Cell, side: Any, baseline: Any, theirs: Any, truth: token_parity.Truth, prompts: Any
) -> dict[str, Any]:
    found = token_parity.compare(theirs, truth, token_parity.generated(side, prompts, plan.parity_tokens, cell.batch))
    sides = {OURS: side, ORIGINAL: baseline}
    for one in sides.values():
        one.generate(prompts[: cell.batch], one.short + one.steps)

    def slope(one: Any, number: int) -> float:
        prompt = _prompts(theirs, plan, cell.batch, cell.context, number + 1)
        short = timing.wall_ms(plan.device, lambda: one.generate(prompt, one.short))
        long = timing.wall_ms(plan.device, lambda: one.generate(prompt, one.short + one.steps))
        return max(long - short, 1e-6) / float(one.steps)

    calls = {name: lambda number, one=one: slope(one, number) for name, one in sides.items()}
    times = timing.interleaved(calls, plan.rounds, plan.seconds)
    ratio = timing.ratio(times[ORIGINAL], times[OURS])
    return {
        "decode_ms": median(times[OURS]),
        "original_ms": median(times[ORIGINAL]),
        "ratio": ratio,
        "claim": claim(ratio["low"], ratio["high"], found.passed, plan.device != "cpu"),
        "parity": {**asdict(found), "summary": found.summary},
        **_profiled(side, prompts[: cell.batch], plan.device),
    }


def _profiled(side: Any, prompt: Any, device: str) -> dict[str, Any]:
    return {} if device == "cpu" else profiling.kernels(side, prompt)


def _prompts(model: Any, plan: Plan, rows: int, length: int, number: int = 0) -> Any:
    import torch

    vocab = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(plan.seed * 1000 + number)
    return torch.randint(4, vocab, (rows, length), generator=generator).to(plan.device)


def table(record: Mapping[str, Any]) -> Table:
    """A row for each rung."""
    rows = []
    for rung in record["rungs"]:
        if "error" in rung:
            rows.append((rung["name"], str(rung["sites"]), "failed", NONE, rung["error"][:24], ""))
            continue
        ms = narrow(rung["decode_ms"]) if rung.get("decode_ms") else NONE
        kernels = f"{rung['kernels_per_token']:.0f}" if "kernels_per_token" in rung else NONE
        ratio = rung.get("ratio")
        said = ratio_text(ratio) if ratio else ""
        said += " ?" if rung.get("claim") == "no difference shown" else ""
        tokens = ("agree" if rung["parity"]["passed"] else "DIFFER") if "parity" in rung else ""
        rows.append((rung["name"], str(rung["sites"]), ms, kernels, said, tokens))
    cell = record["cell"]
    title = f"ladder, batch {cell['batch']}, {cell['context']} tokens before"
    headings = ("", "sites", "ms/token", "kernels", "speed-up", "tokens")
    return Table(title, headings, tuple(rows), tuple(_moved(record["rungs"])))


def _moved(rungs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each rung moved between the categories of `rewrite profile`, in µs of kernels a token."""
    before: Mapping[str, float] | None = None
    for rung in rungs:
        now = rung.get("categories")
        if before is not None and now is not None:
            changes = {kind: now.get(kind, 0.0) - before.get(kind, 0.0) for kind in CATEGORIES}
            large = [kind for kind in CATEGORIES if abs(changes[kind]) > LARGE * sum(before.values())]
            if large:
                said = ", ".join(f"{TITLES[kind]} {changes[kind]:+.0f} µs" for kind in large)
                yield f"{rung['name']}: {said}"
        before = now if now is not None else before


def text(record: Mapping[str, Any]) -> str:
    """The ladder as plain text."""
    made = table(record)
    return "\n".join([made.title, *plain_rows(made.headings, made.rows), *made.notes])


def exit_code(record: Mapping[str, Any]) -> int:
    """1 if a rung failed, or its tokens are not the original's."""
    higher = record["rungs"][1:]
    return int(any("error" in rung or not rung["parity"]["passed"] for rung in higher))
