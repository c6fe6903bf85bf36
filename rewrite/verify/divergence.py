"""Finds the module where two models part: the first whose inputs agree and whose output does not."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .calls.argument_cases import CASES
from .calls.argument_checks import scenario_of
from .calls.parity import SCENARIOS, run_scenario, setting_for
from .calls.scenarios import Scenario
from .diagnosis import likely
from .judging.compare import Error, Mismatch, NotRun, measure
from .judging.tolerances import bound
from .judging.verdict import Divergence
from .models.configs import Variant
from .models.model_inputs import TEXT, tensors
from .models.model_pair import Pair, Workbench, on_original


class Seen(NamedTuple):
    """What a hook on one module saw over a scenario: its tensor inputs and its tensor outputs, call by call."""

    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


PADDED = "prefill, right padding"
"""The scenario that is nearest to what is computed in a finite ring."""


def first_divergence(bench: Workbench, failed: str) -> Divergence | None:
    """Re-run the scenario that a failed check names, hooking one module at a time.

    One at a time, because fused code steps aside for the modules that are hooked. Where nothing differs that way, all
    modules are hooked at once.
    """
    variant = next((v for v in bench.variants if f", {v.name}" in failed), bench.base)
    scenario = _scenario(variant, failed)
    implementation = "eager" if " eager" in failed else bench.implementations()[0]
    pair = bench.fresh(variant, implementation, "float64")
    setting = setting_for(bench, variant, scenario, 0)
    run = lambda model: run_scenario(model, scenario, setting)
    try:
        order = on_original(_execution_order, pair.original, run)
    except NotRun:  # the failed check is about another configuration
        return None
    names = [name for name in order if _has(pair.rewritten, name)]
    fallback = None
    for name in names:
        culprit, error = _compare(name, _watch(pair.original, name, run), _watch(pair.rewritten, name, run))
        if error is None:
            continue
        found = replace(_divergence(name, pair, error, scenario.name), place=_place(pair.rewritten, name))
        if culprit:
            between, cause = _within(name, pair, order, run, scenario.name)
            return replace(found, between=between, likely=cause)
        fallback = fallback or replace(found, note="its inputs differ already; no module's inputs agree before it")
    return fallback


def _scenario(variant: Variant, failed: str) -> Scenario:
    """The scenario or the case that a failed check names; where it names none, a plain one."""
    plain = CASES[0] if variant.inputs != TEXT else None
    case = next((case for case in CASES if failed.endswith(f": given {case.name}")), plain)
    if case is not None:
        return scenario_of(case, variant, {})
    return next((scenario for scenario in SCENARIOS if failed.endswith(f": {scenario.name}")), SCENARIOS[2])


def _has(model: Any, name: str) -> bool:
    return any(name == other for other, _ in model.named_modules())


def _divergence(name: str, pair: Pair, error: Error, scenario: str) -> Divergence:
    kind = type(pair.original.get_submodule(name)).__name__
    index = error.index
    return Divergence(
        name or "(the whole model)",
        kind,
        error.max,
        bound("fp64 max") * error.scale,
        index,
        error.expected,
        error.found,
        scenario,
    )


def _place(model: Any, name: str) -> str:
    """The file and line where the forward of a module stands; empty where it is no Python."""
    code = getattr(inspect.unwrap(type(model.get_submodule(name)).forward), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def _within(name: str, pair: Pair, order: Sequence[str], run: Callable[[Any], Any], scenario: str) -> tuple[str, str]:
    """Say between which of its own modules a module goes wrong, and what that looks like; both may be empty.

    Everything before the first of its modules that is given something else agrees.
    """
    whole = _watch(pair.original, name, run), _watch(pair.rewritten, name, run)
    both = list(zip(whole[0].outputs, whole[1].outputs, strict=False))
    call = next(at for at, outputs in enumerate(both) if _differs(*outputs))
    prefix = f"{name}." if name else ""
    own = {one[len(prefix) :]: one for one in order if one.startswith(prefix) and one != name}
    inner = {child: _watch(pair.original, path, run) for child, path in own.items() if "." not in child}
    inner = {child: seen for child, seen in inner.items() if len(seen.outputs) == len(whole[0].outputs)}  # once a call
    gives = {child: seen.outputs[call][0] for child, seen in inner.items() if seen.outputs[call]}
    given, before = whole[0].inputs[call], ""
    for child, expected in inner.items():
        found = _watch(pair.rewritten, own[child], run) if _has(pair.rewritten, own[child]) else Seen()
        if len(found.inputs) != len(expected.inputs):
            continue
        if _differs(expected.inputs[call], found.inputs[call]):
            after = f"after {before}, whose output agrees, and " if before else ""
            pairs = zip(expected.inputs[call], found.inputs[call], strict=False)
            return f"{after}before {child}, whose input does not", _cause(pairs, given, gives, scenario)
        if _differs(expected.outputs[call], found.outputs[call]):  # it agreed where it was watched alone
            return "", ""
        before = child
    return (f"after {before}, whose output agrees" if before else ""), _cause(
        zip(*both[call], strict=False), given, gives, scenario
    )


def _differs(expected: list[Any], found: list[Any]) -> bool:
    return _first_error("", expected, found) is not None


def _cause(pairs: Iterable[tuple[Any, Any]], given: list[Any], agreed: dict[str, Any], scenario: str) -> str:
    """What the first tensors that differ look like."""
    for expected, found in pairs:
        if _differs([expected], [found]):
            return likely(expected, found, given, agreed, scenario)
    return ""


def _execution_order(model: Any, run: Callable[[Any], Any]) -> list[str]:
    """Module names in the order in which they first return, so inner modules come before outer ones."""
    order: dict[str, None] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, arguments, output: order.setdefault(name)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(note(name)))
        _quietly(run, model)
    return list(order)


def _watch(model: Any, name: str, run: Callable[[Any], Any]) -> Seen:
    inputs: list[Any] = []
    outputs: list[Any] = []

    def note(module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        inputs.append([tensor.detach().clone() for tensor in tensors((arguments, keywords)).values()])
        outputs.append([tensor.detach().clone() for tensor in tensors(output).values()])

    with model.get_submodule(name).register_forward_hook(note, with_kwargs=True):
        _quietly(run, model)
    return Seen(inputs, outputs)


def _quietly(run: Callable[[Any], Any], model: Any) -> None:
    """Run for the hooks' sake: an exception later in the model does not spoil what they saw."""
    try:
        run(model)
    except Exception:  # the failed check has reported it; here only the modules before it matter
        return


def _compare(name: str, expected: Seen, found: Seen) -> tuple[bool, Error | None]:
    """Whether the inputs agreed up to the first output that differs, and that output's error."""
    for call, (wanted, given) in enumerate(zip(expected.outputs, found.outputs, strict=False)):
        error = _first_error(f"{name}#{call}", wanted, given)
        if error is not None:
            inputs_agree = _first_error(name, expected.inputs[call], found.inputs[call]) is None
            return inputs_agree, error
    return False, None


def _first_error(name: str, expected: list[Any], found: list[Any]) -> Error | None:
    for wanted, given in zip(expected, found, strict=False):
        try:
            error = measure(name, wanted, given)
        except Mismatch:
            return Error(name, float("inf"), float("inf"), (), 0.0, 0.0, 1.0, 1.0)
        if not error.relative_max <= bound("fp64 max"):
            return error
    return None
