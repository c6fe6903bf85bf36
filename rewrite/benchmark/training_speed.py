"""Training steps of a package, its original, the original compiled and Liger: time, memory, and parity of gradients.

A step is forward with labels, backward and a fused AdamW, on random tokens. All sides start from the same weights;
each has weights and an optimizer of its own, and they are timed in turn; where the card cannot hold them all, one
after the other, and the table says so. Memory is what a side's weights, optimizer and step take at their peak. Before
that, the loss and every gradient of a short row are compared with those of the original in fp32, where the original's
own error in the dtype at hand is the yardstick.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.console.progress_steps import Step
from rewrite.measure import timing
from rewrite.measure.presets import config_for

from . import contenders
from .benchmark_models import Subject, load
from .benchmark_plan import LIGER, ORIGINAL, OURS, Cell, Plan
from .benchmark_run import Keep, Progress, header
from .benchmark_tables import Table, narrow, ratio_text

if TYPE_CHECKING:
    from torch import Tensor

COMPILED, OURS_COMPILED = "compiled", "ours compiled"
SIDES = (ORIGINAL, COMPILED, LIGER, OURS, OURS_COMPILED)
TITLES = {
    ORIGINAL: "original, eager",
    COMPILED: "original, compiled",
    LIGER: "original with Liger",
    OURS: "rewritten",
    OURS_COMPILED: "rewritten, compiled",
}
PARITY_TOKENS = 512
STEPS = 3
"""Steps of a round: their kernels are queued one behind the other, as in training."""
MOST = {"largest": 2.0, "middle": 1.1}
"""Errors of our gradients, in terms of the original's in the same dtype: of any weight, and of the middle one."""
FILLED = 0.9
"""The part of a card's memory that all sides may take, for the allocator's gaps and what the driver takes."""
IN_FP32 = 1e-4
"""Relative error of a gradient in fp32, where the original is the yardstick itself."""


@dataclass(frozen=True)
class Gradients:
    """How near our gradients are to those of the original in fp32, in terms of the original's own error."""

    loss: float
    original_loss: float
    exact_loss: float
    middle: float
    largest: float
    where: str
    missing: tuple[str, ...]
    passed: bool

    @property
    def summary(self) -> str:
        """One line."""
        if self.missing:
            return f"no gradient of {', '.join(self.missing[:3])}"
        said = f"error {self.middle:.2f} times the original's, at most {self.largest:.2f} ({self.where})"
        return f"{said}; loss {self.loss:.5f}, original {self.original_loss:.5f}, in fp32 {self.exact_loss:.5f}"


class Trainer:
    """A side: a model with an optimizer of its own."""

    def __init__(self, model: Any, compiled: bool, gpu: bool):
        import torch

        self.model = model
        self.call = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=gpu)

    def step(self, tokens: Tensor) -> Tensor:
        """Train on tokens `[B, S]`; return the loss before."""
        loss: Tensor = self.call(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure(plan: Plan, keep: Keep = lambda record: None, progress: Progress = lambda message: None) -> dict[str, Any]:
    """Measure training steps at every cell of a plan: `batch` rows of `context` tokens.

    Raises:
        RewriteError: the package or its original cannot be loaded or built.
    """
    subject = load(plan.package, plan.original)
    record = header(plan, subject) | {"sides": list(plan.sides)}
    started = time.perf_counter()
    said = iter(range(1 << 20))
    steps = len(plan.cells) * (3 + 2 * len(plan.sides)) + 1
    for cell in plan.cells:
        entry: dict[str, Any] = asdict(cell) | {"sides": {}}
        record["cells"].append(entry)
        say = lambda what, cell=cell: progress(Step(f"{cell}: {what}", min(next(said), steps - 1), steps))
        say("gradients")
        found = gradients(plan, subject, cell)
        entry["parity"] = asdict(found) | {"summary": found.summary}
        say(f"gradients: {found.summary}")
        _measured(plan, subject, cell, entry, say)
        record["seconds"] = time.perf_counter() - started
        keep(record)
    record["complete"] = True
    keep(record)
    return record


def _measured(plan: Plan, subject: Subject, cell: Cell, entry: dict[str, Any], say: Callable[[str], Any]) -> None:
    gpu = plan.device != "cpu"
    tokens = _tokens(plan, subject, cell.batch, cell.context)
    sides: dict[str, Trainer] = {}
    times: dict[str, list[float]] = {}
    for name in plan.sides:
        if name == LIGER and not (gpu and contenders.liger_installed()):
            entry["sides"][name] = {"error": "not installed" if gpu else "needs a GPU"}
            continue
        say(TITLES[name])
        started = time.perf_counter()
        try:
            sides[name] = _warm(plan, subject, name, tokens, entry)
        except Exception as error:  # one side that cannot run says so in its row; the others go on
            entry["sides"][name] = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
        else:
            figures = entry["sides"][name]
            figures["first_seconds"] = time.perf_counter() - started
            if name == OURS:
                entry["explain"] = str(subject.explain(sides[name].model))
            entry.setdefault("together", not gpu or _fit_together(len(plan.sides), figures))
            if not entry["together"]:
                times |= _times(plan, sides, tokens)
                sides.clear()
            say(f"{TITLES[name]}, {_so_far(figures, times.get(name))}")
        _release(gpu)
    say("steps")
    times |= _times(plan, sides, tokens)
    for name, values in times.items():
        low, high = timing.interval(values)
        entry["sides"][name] |= {"step_ms": median(values), "low": low, "high": high}
        if name != OURS and OURS in times:
            entry["sides"][name]["ours"] = timing.ratio(values, times[OURS], in_turn=entry["together"])
    sides.clear()
    _release(gpu)


def _so_far(figures: Mapping[str, Any], times: Sequence[float] | None) -> str:
    """What is known of a side before all are measured, for who waits, and where something later does not end."""
    said = [f"{figures['first_seconds']:.1f} s for its first steps"]
    if "peak_bytes" in figures:
        said.append(f"{figures['peak_bytes'] / 2**30:.2f} GiB")
    if times:
        said.append(f"{median(times):.1f} ms a step")
    return ", ".join(said)


def _times(plan: Plan, sides: Mapping[str, Trainer], tokens: Tensor) -> dict[str, list[float]]:
    calls = {name: _timed(plan.device, side, tokens) for name, side in sides.items()}
    return timing.interleaved(calls, plan.rounds, plan.seconds) if calls else {}


def _fit_together(count: int, figures: Mapping[str, Any]) -> bool:
    """Return whether so many sides like the first fit into the card: weights and optimizer of all, a step of one."""
    import torch

    resident, peak = figures["resident_bytes"], figures["peak_bytes"]
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return bool((count - 1) * resident + peak < FILLED * total)


def _warm(plan: Plan, subject: Subject, name: str, tokens: Tensor, entry: dict[str, Any]) -> Trainer:
    """Build a side, let it take its first steps, and note its losses and its peak of memory."""
    import torch

    gpu = plan.device != "cpu"
    before = torch.cuda.memory_allocated() if gpu else 0
    side = Trainer(_model(plan, subject, name), name in (COMPILED, OURS_COMPILED), gpu)
    figures: dict[str, Any] = {"losses": [float(side.step(tokens)) for _ in range(2)]}
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        side.step(tokens)
        figures["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        figures["resident_bytes"] = torch.cuda.memory_allocated() - before
    entry["sides"][name] = figures
    return side


def _timed(device: str, side: Trainer, tokens: Tensor) -> Callable[[int], float]:
    def several() -> None:
        import torch

        with torch.enable_grad():
            for _ in range(STEPS):
                side.step(tokens)

    return lambda number: timing.wall_ms(device, several) / STEPS


def _model(plan: Plan, subject: Subject, name: str, dtype: str | None = None) -> Any:
    """A model in training mode with the weights that every side starts from."""
    if name == LIGER:
        return contenders.with_liger(subject, lambda kind: _trainable(plan, kind, dtype))
    ours = name in (OURS, OURS_COMPILED)
    return _trainable(plan, subject.rewritten if ours else subject.original, dtype)


def _trainable(plan: Plan, kind: Any, dtype: str | None = None) -> Any:
    import torch

    if plan.weights is not None:
        model = kind.from_pretrained(plan.weights, dtype=getattr(torch, plan.dtype)).to(plan.device)
    else:
        assert plan.shape is not None
        torch.manual_seed(plan.seed)
        with torch.device(plan.device):  # drawn in the dtype of all sides, so that every one has the same
            config = config_for(kind.config_class, plan.shape, **_overrides(plan))
            model = kind._from_config(config, dtype=getattr(torch, plan.dtype))
    return (model if dtype is None else model.to(getattr(torch, dtype))).train()


def _overrides(plan: Plan) -> dict[str, Any]:
    return {} if plan.layers is None else {"num_hidden_layers": plan.layers}


def _tokens(plan: Plan, subject: Subject, rows: int, length: int) -> Tensor:
    import torch

    if plan.weights is not None:
        vocabulary = subject.original.config_class.from_pretrained(plan.weights).get_text_config().vocab_size
    else:
        assert plan.shape is not None
        vocabulary = config_for(subject.original.config_class, plan.shape).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(plan.seed + 1)
    return torch.randint(4, int(vocabulary), (rows, length), generator=generator).to(plan.device)


def gradients(plan: Plan, subject: Subject, cell: Cell) -> Gradients:
    """Compare the loss and every gradient of one row with those of the original in fp32."""
    tokens = _tokens(plan, subject, 1, min(cell.context, PARITY_TOKENS))
    exact_loss, exact = _differentiated(plan, subject, ORIGINAL, tokens, "float32")
    original_loss, found = _differentiated(plan, subject, ORIGINAL, tokens)
    theirs = distances(exact, found)
    del found
    loss, found = _differentiated(plan, subject, OURS, tokens)
    ours = distances(exact, found)
    missing = tuple(sorted(exact.keys() ^ found.keys()))
    del found
    if plan.dtype == "float32":  # the original is the yardstick itself
        theirs = {key: IN_FP32 * float(gradient.norm()) for key, gradient in exact.items()}
    ratios = {key: ours[key] / max(theirs[key], 1e-30) for key in theirs} if not missing else {"": math.inf}
    where = max(ratios, key=lambda key: ratios[key])
    middle, largest = median(ratios.values()), ratios[where]
    near = abs(loss - exact_loss) <= 2 * abs(original_loss - exact_loss) + 1e-3
    passed = not missing and near and largest <= MOST["largest"] and middle <= MOST["middle"]
    del exact
    _release(plan.device != "cpu")
    return Gradients(loss, original_loss, exact_loss, middle, largest, where, missing, passed)


def _differentiated(
    plan: Plan, subject: Subject, side: str, tokens: Tensor, dtype: str | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of `tokens` and the gradient of every weight, and nothing else of the model."""
    model = _model(plan, subject, side, dtype)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    value = float(loss.detach())
    del model, loss
    _release(plan.device != "cpu")
    return value, found


def distances(exact: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each gradient is from the exact one, of those that are there."""
    return {key: float((found[key].float() - exact[key]).norm()) for key in exact if key in found}


def _release(gpu: bool) -> None:
    import torch

    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A table for each batch shape."""
    for cell in record["cells"]:
        sides = {name: figures for name, figures in cell["sides"].items() if "step_ms" in figures}
        rows = [_row(name, figures) for name, figures in sides.items()]
        notes = [f"{TITLES[name]}: {f['error']}" for name, f in cell["sides"].items() if "error" in f]
        if not cell.get("together", True):
            notes.append("one side after the other: the card does not hold all of them")
        if "parity" in cell:
            outcome = "agree" if cell["parity"]["passed"] else "DO NOT AGREE"
            notes.append(f"gradients {outcome}: {cell['parity']['summary']}")
        title = f"training step, {cell['batch']} × {cell['context']} tokens, AdamW"
        yield Table(title, ("", "ms", "peak GiB", "loss of 2nd step", "rewritten is"), tuple(rows), tuple(notes))


def _row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    peak = f"{figures['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in figures else "–"
    compared = ratio_text(figures["ours"]) if "ours" in figures else ""
    return TITLES[name], narrow(figures["step_ms"]), peak, f"{figures['losses'][-1]:.5f}", compared


def exit_code(record: Mapping[str, Any]) -> int:
    """0, or 1 where ours failed, is certainly slower than the original, or its gradients differ."""
    for cell in record["cells"]:
        ours, theirs = (cell["sides"].get(name, {}) for name in (OURS, ORIGINAL))
        slower = theirs.get("ours", {"high": 1.0})["high"] < 1.0
        if "error" in ours or slower or not cell.get("parity", {}).get("passed", False):
            return 1
    return 0
