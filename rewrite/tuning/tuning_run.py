"""Tunes a package: builds a small stack of its layers, searches, and writes down what was found."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_rewrite_runtime.launching import card_tables
from rewrite.benchmark.benchmark_models import build, lock_of
from rewrite.console.progress_steps import Step
from rewrite.errors import NeedsGpu, NothingToTune
from rewrite.measure.presets import config_for
from rewrite.verify.models import loaded_sides
from rewrite.verify.models.subjects import find_subjects

from . import results
from .candidates import Entry, Limits, candidates
from .search import Bench, Change, search

LAYERS = 4
"""Enough that the weights of a layer have left the L2 cache when its turn comes again, and that the step is short."""


@dataclass(frozen=True)
class Plan:
    """One run. `shape` is a preset of `benchmark.presets.SHAPES`, or None with a checkpoint in `weights`.

    Of the checkpoint only the configuration is read: times do not depend on the values of weights.
    """

    package: Path
    shape: str | None = "1b"
    weights: str | None = None
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1,)
    context: int = 512
    seconds: float = 75.0
    """For the search at each batch size."""
    ship: bool = False
    """Whether the package gets what is found, not the user's folder."""

    @property
    def tables(self) -> Path:
        """The folder that gets what is found."""
        return self.package if self.ship else card_tables.folder()


@dataclass(frozen=True)
class Outcome:
    """What was found at each batch size, on which chip, and where it was written."""

    chip: str
    changes: dict[int, list[Change]]
    path: Path


def tune(plan: Plan, progress: Callable[[str], None] = lambda message: None) -> Outcome:
    """Search at each batch size; what one has found is written before the next begins.

    Raises:
        NeedsGpu: there is no GPU, or no triton.
        NothingToTune: the package has no kernels with tables, or its step cannot be captured.
        RewriteError: the package cannot be loaded or built.
    """
    lock_of(plan.package)
    require_gpu()
    import torch

    from .tuned_steps import Steps

    progress("building the model")
    model = small_model(plan)
    properties = torch.cuda.get_device_properties(model.device)
    chip, options = properties.name, functools.partial(candidates, limits=Limits.of(properties))
    changes = {}
    path = plan.tables / card_tables.TUNED
    for number, batch in enumerate(plan.batches):
        said = _Placed(progress, f"batch {batch}", number, len(plan.batches))
        started = time.perf_counter()
        steps = Steps(model, batch, plan.context)
        said("compiling")
        steps.compile_ahead(rounds(steps, options))
        left = plan.seconds - (time.perf_counter() - started)
        changes[batch] = search(steps, options, left, said)
        if not changes[batch]:
            raise NothingToTune(type(model).__name__, "no kernel of its step has a table, or the time was too short")
        path = results.write(plan.tables, chip, changes[batch])
        steps.tables.forget()
        steps.decode.release()
    return Outcome(chip, changes, path)


@dataclass(frozen=True)
class _Placed:
    """Says what is tuned at one batch size, with how many sizes were before it."""

    progress: Callable[[str], None]
    size: str
    done: int
    total: int

    def __call__(self, message: str) -> None:
        self.progress(Step(f"{self.size}: {message}", self.done, self.total))


def require_gpu() -> None:
    """Check that there is something to tune on.

    Raises:
        NeedsGpu: there is no GPU, or no triton.
    """
    import torch

    if not torch.cuda.is_available():
        raise NeedsGpu("torch sees none")
    if importlib.util.find_spec("triton") is None:
        raise NeedsGpu("triton is not installed")


def small_model(plan: Plan) -> Any:
    """The package's causal model with random weights and `LAYERS` layers."""
    module = loaded_sides.load(loaded_sides.locate(plan.package))
    main = find_subjects(module, module).main
    if not main.causal:
        raise NothingToTune(main.name, "it does not generate")
    if plan.weights is None:
        assert plan.shape is not None
        config = config_for(main.config_class, plan.shape, num_hidden_layers=LAYERS)
    else:
        config = main.config_class.from_pretrained(plan.weights)
        config.num_hidden_layers = min(LAYERS, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return build(main.rewritten, config, plan.dtype, "cuda")


def rounds(bench: Bench, options_of: Callable[[str, Entry], Sequence[Entry]] = candidates) -> list[dict[str, Any]]:
    """Tables that together hold every candidate: the first of each name, the second of each name, and so on."""
    used = bench.in_use({})
    options = [[(name, option) for option in options_of(name, entry)] for name, (entry, _) in used.items()]
    return [{}, *(dict(filter(None, column)) for column in itertools.zip_longest(*options))]


def title(plan: Plan, chip: str, batch: int) -> str:
    """The heading of a table of changes."""
    return f"{plan.shape or Path(str(plan.weights)).name} · batch {batch} · context {plan.context} · {chip}"
