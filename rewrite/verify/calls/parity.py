"""Gate 2: every scenario in fp64 against the original, and in low precision against the original's own error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import NotRun, Observations, Triple, about, finite, join, near_exact, same_names
from ..judging.fp32_free_reference import unrounded
from ..judging.low_precision_bound import Runs, compare_draws
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.model_pair import Pair, Workbench, on_original
from .caches import CACHED
from .scenarios import FORWARD, Scenario, Setting

SCENARIOS = FORWARD + CACHED


def run_scenario(model: Any, scenario: Scenario, setting: Setting) -> Observations:
    """Run a scenario on one model, without gradients."""
    import torch

    with torch.no_grad():
        return scenario.run(model, setting)


def setting_for(bench: Workbench, variant: Variant, scenario: Scenario, trial: int) -> Setting:
    """The scenario's inputs: fresh for each trial, and for each seed of the verifier."""
    seed = bench.seed_for(variant.name, scenario.name, trial)
    return Setting(bench.subject, variant.vocab_size, bench.options.device, seed)


def applicable(bench: Workbench, scenario: Scenario, implementation: str) -> None:
    """Raise `NotRun` where the scenario makes no sense for this class."""
    for argument in scenario.needs:
        if not bench.subject.accepts(argument):
            raise NotRun(f"{bench.subject.name}.forward takes no {argument}")
    if scenario.causal_only and not bench.subject.writes:
        raise NotRun(f"{bench.subject.name} is not a causal language model")
    if scenario.eager_only and implementation != "eager":
        raise NotRun("only eager attention returns its weights")


def exact_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """One check per scenario and attention implementation, both sides in fp64."""
    for implementation in bench.implementations():
        for scenario in SCENARIOS:
            if (scenario.eager_only and implementation != "eager") or _is_repeat(bench, scenario, implementation):
                continue
            name = f"fp64 {implementation}, {variant.name}: {scenario.name}"
            yield CheckRun(
                name, partial(exact, bench, variant, implementation, scenario), essential=scenario.essential
            )


def _is_repeat(bench: Workbench, scenario: Scenario, implementation: str) -> bool:
    """In quick mode, scenarios without attention in them run under one implementation."""
    first = bench.implementations()[0]
    once = ("tuple output", "outputs survive the next call", "logits_to_keep", "inputs_embeds", "labels and loss")
    return bench.options.quick and implementation != first and scenario.name in once


def exact(bench: Workbench, variant: Variant, implementation: str, scenario: Scenario) -> dict[str, Figure]:
    """Compare both sides on a scenario in fp64, or in fp32 where the original has no finite fp64 run.

    Raises:
        Mismatch: an output differs by more than its bound.
        NotRun: the scenario makes no sense for this class, or the original does not run it.
    """
    applicable(bench, scenario, implementation)
    try:
        expected, found = _both(bench, variant, implementation, scenario, "float64")
        if finite(expected):
            truth = partial(_unrounded, bench, variant, implementation, scenario)
            more = partial(_drawn, bench, variant, implementation, scenario)
            return near_exact(expected, found, unrounded=truth, more=more)
        why = "the original's fp64 is not finite"
    except NotRun as reason:
        why = f"not in fp64: {reason}"
    expected, found = _both(bench, variant, implementation, scenario, "float32")
    if not finite(expected):
        raise NotRun("the original's output is not finite in fp64 nor in fp32")
    return near_exact(expected, found, "fp32 max") | {"in": f"fp32, {why}"}


def _both(
    bench: Workbench, variant: Variant, implementation: str, scenario: Scenario, dtype: str, number: int = 0
) -> tuple[Observations, Observations]:
    """Both sides' runs on the inputs of that number, of the trials together."""
    pair = pair_for(bench, variant, implementation, dtype, scenario)
    expected, found = [], []
    for trial in _trials(bench, number):
        setting = setting_for(bench, variant, scenario, trial)
        expected.append(on_original(run_scenario, pair.original, scenario, setting))
        found.append(run_scenario(pair.rewritten, scenario, setting))
    _require_not_flat(expected)
    return join(expected), join(found)


def _trials(bench: Workbench, number: int) -> range:
    count = 1 if bench.options.quick else bench.options.seeds
    return range(number * count, (number + 1) * count)


def _unrounded(
    bench: Workbench, variant: Variant, implementation: str, scenario: Scenario, number: int = 0
) -> Observations:
    """The original's runs of `_both` in fp64, without what it rounds to fp32 inside."""
    pair = pair_for(bench, variant, implementation, "float64", scenario)
    with unrounded():
        settings = [setting_for(bench, variant, scenario, trial) for trial in _trials(bench, number)]
        return join([on_original(run_scenario, pair.original, scenario, setting) for setting in settings])


def _drawn(bench: Workbench, variant: Variant, implementation: str, scenario: Scenario, number: int) -> Triple:
    """Both sides in fp64, and the original without its roundings, on the inputs of that number."""
    expected, found = _both(bench, variant, implementation, scenario, "float64", number)
    return _unrounded(bench, variant, implementation, scenario, number), expected, found


def _require_not_flat(runs: list[Observations]) -> None:
    """An output that does not vary proves nothing: refuse to call it equal."""
    for observations in runs:
        for name, tensor in observations.items():
            if name == "logits" and tensor.numel() > 1 and float(tensor.double().std()) < 1e-3:
                raise NotRun(f"the original's {name} hardly vary, so equality would prove nothing")


def low_precision_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """One check per dtype and implementation: all scenarios against the fp64 run of the original."""
    for implementation in bench.implementations():
        for dtype in bench.low_precisions():
            name = f"{dtype} {implementation}, {variant.name}: error against fp64"
            yield CheckRun(name, _low(bench, variant, implementation, dtype))
    if not bench.options.quick:
        yield CheckRun(f"autocast, {variant.name}: error against fp64", partial(_autocast, bench, variant))


def _autocast(bench: Workbench, variant: Variant) -> dict[str, Figure]:
    """An fp32 model under autocast to the low precision."""
    import torch

    implementation, variant = bench.implementations()[0], variant.without_choice
    exact, low = (bench.pair(variant, implementation, dtype) for dtype in ("float64", "float32"))
    kind, precision = bench.options.device.partition(":")[0], getattr(torch, bench.options.dtype)
    scenario = next(s for s in SCENARIOS if s.name == "prefill, batch 3, beyond the window")

    def run(model: Any, setting: Setting) -> Observations:
        with torch.autocast(kind, precision):
            return run_scenario(model, scenario, setting)

    def draw(number: int) -> Runs:
        setting = setting_for(bench, variant, scenario, -2 - number)
        truth = on_original(run_scenario, exact.original, scenario, setting)
        return Runs(truth, on_original(run, low.original, setting), run(low.rewritten, setting))

    return compare_draws(draw, torch.finfo(precision).eps, variant.routed)


def _low(bench: Workbench, variant: Variant, implementation: str, dtype: str) -> Any:
    import torch

    eps = torch.finfo(getattr(torch, dtype)).eps
    real_shape = variant not in bench.variants
    variant = variant.without_choice

    def draw(number: int) -> Runs:
        truth: dict[str, Any] = {}
        original, rewritten = dict(truth), dict(truth)
        for scenario in SCENARIOS:
            setting = setting_for(bench, variant, scenario, -1 - number)
            try:
                applicable(bench, scenario, implementation)
                if scenario.own_pair and real_shape:
                    continue  # building a model of a real shape anew took 10 s a time (16 cores, H100)
                exact = pair_for(bench, variant, implementation, "float64", scenario)
                low = pair_for(bench, variant, implementation, dtype, scenario)
                expected = on_original(run_scenario, exact.original, scenario, setting)
                own = on_original(run_scenario, low.original, scenario, setting)
                if not finite(expected) and finite(own):
                    expected = _truth_in_fp32(bench, variant, implementation, dtype, scenario, setting)
            except NotRun:
                continue  # the fp64 check of this scenario reports the reason
            with about(scenario.name):
                new = run_scenario(low.rewritten, scenario, setting)
            same_names(own, new)
            for side, outputs in ((truth, expected), (original, own), (rewritten, new)):
                side |= {f"{scenario.name}: {name}": value for name, value in outputs.items()}
        if not truth:
            raise NotRun("no scenario runs on the original in this dtype")
        return Runs(truth, original, rewritten)

    return partial(compare_draws, draw, eps, variant.routed)


def pair_for(bench: Workbench, variant: Variant, implementation: str, dtype: str, scenario: Scenario) -> Pair:
    """The shared models, or fresh ones for a scenario that leaves traces."""
    build = bench.fresh if scenario.own_pair else bench.pair
    return build(variant, implementation, dtype)


def _truth_in_fp32(
    bench: Workbench, variant: Variant, implementation: str, dtype: str, scenario: Scenario, setting: Setting
) -> Observations:
    """fp32 is exact enough a yardstick for 16-bit types where fp64 gives NaN; for fp32 itself there is none."""
    if dtype == "float32":
        raise NotRun("the original's fp64 run is not finite")
    return on_original(run_scenario, bench.pair(variant, implementation, "float32").original, scenario, setting)
