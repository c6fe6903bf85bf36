"""The checks of gates 2 to 4 and of latency, in the order in which they run: the cheap and sharp ones first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from .checks import CheckRun
from .compare import NotRun, near_exact
from .compiled import compile_checks
from .configs import small_variants
from .generation import generation_checks
from .parity import exact_checks, low_precision_checks
from .scenarios import Setting, call, main_output, real
from .shapes import wide_variant
from .subjects import Subject, Subjects
from .training import changing_checks, hook_checks
from .verdict import Figure
from .workbench import Workbench, on_original


def later_checks(name: str, bench: Workbench, subjects: Subjects) -> Iterator[CheckRun]:
    """The checks of a gate by its name."""
    if name == "parity":
        yield from parity_checks(bench, subjects)
    elif name == "model":
        if bench.options.weights is not None:
            from .teacher import teacher_checks

            yield from teacher_checks(bench)
    elif name == "generation":
        if bench.subject.causal and hasattr(bench.subject.original, "generate"):
            yield from generation_checks(bench, bench.base)
    elif not bench.options.quick:
        from .latency import latency_checks

        yield from latency_checks(bench)


def parity_checks(bench: Workbench, subjects: Subjects) -> Iterator[CheckRun]:
    """Gate 2."""
    for variant in bench.variants:
        yield from exact_checks(bench, variant)
    yield from changing_checks(bench, bench.base)
    yield from hook_checks(bench, bench.base)
    for other in subjects.others:
        yield CheckRun(f"fp64, {other.name}: forward", partial(_short, bench, other))
    yield from low_precision_checks(bench, bench.base)
    if bench.options.device != "cpu" and not bench.options.quick:
        yield from low_precision_checks(bench, wide_variant(bench))
    yield from compile_checks(bench, bench.base)


def _short(bench: Workbench, subject: Subject) -> Mapping[str, Figure]:
    """One padded and one plain forward of a class beside the main one."""
    import torch

    variants = on_original(small_variants, subject.original, False, bench.options.config)
    other = Workbench(subject, variants[:1], bench.options)
    pair = other.fresh(other.base, other.implementations()[0], "float64")
    setting = Setting(subject, other.base.vocab_size, bench.options.device, bench.seed_for(subject.name))

    def run(model: object) -> dict[str, torch.Tensor]:
        outputs = {}
        with torch.no_grad():
            for padding in ("none", "right"):
                inputs = setting.prompt(2, 11, padding)
                outputs[padding] = real(main_output(call(model, setting, inputs)), inputs)
        return outputs

    expected = on_original(run, pair.original)
    if not expected:
        raise NotRun("no output")
    return near_exact(expected, run(pair.rewritten))
