"""Gate 2, the arguments: every one that `forward` takes is given a value, and everything that comes back compared."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, about
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.inputs import seed_all
from ..models.model_pair import Workbench
from ..models.subjects import Subject
from .argument_cases import Case, cases_for
from .argument_values import LENGTH, Arguments, Call
from .arguments import arguments_of
from .observed import everything, fields_of
from .scenarios import Outputs, Scenario, Setting

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 4
"""Divides the length of every prompt that a chunked model is given."""

ALWAYS = ("the plain arguments", "labels", "labels, a share of each class")
"""What a quick verification asks of every class, also where another was given the same arguments."""


def argument_checks(bench: Workbench, variant: Variant) -> Iterator[CheckRun]:
    """One check per case and attention implementation, and some of a configuration that the case needs."""
    for implementation in bench.implementations()[: 1 if bench.options.quick else None]:
        taken = arguments_of(bench.plain_original(variant, implementation, "float64"))
        bench.record.expect(bench.subject.name, taken)
        for varied, case in _asked_for(bench, variant, taken):
            if case.eager and implementation != bench.implementations()[-1]:
                continue
            name = f"fp64 {implementation}, {varied.name}: given {case.name}"
            yield CheckRun(name, partial(asked, bench, varied, implementation, case))


def _asked_for(bench: Workbench, variant: Variant, taken: tuple[str, ...]) -> Iterator[tuple[Variant, Case]]:
    listening, chunked = listening_variant(variant), chunked_variant(variant, bench.subject)
    for case in cases_for(taken, variant.config.get_text_config()):
        yield (listening if listening and "encoder_hidden_states" in case.gives else variant), case
        if chunked and case.name in ("the plain arguments", "right padding"):
            yield chunked, case


def listening_variant(variant: Variant) -> Variant | None:
    """A decoder that attends to an encoder's states, where the configuration can say that; None otherwise."""
    if getattr(variant.config, "add_cross_attention", None) is not False:
        return None
    return variant.changed({"is_decoder": True, "add_cross_attention": True}, "listening")


def chunked_variant(variant: Variant, subject: Subject) -> Variant | None:
    """A model that feeds its rows forward a few at a time, where the original reads that; None otherwise."""
    name = "chunk_size_feed_forward"
    if name not in inspect.getsource(inspect.getmodule(subject.original) or subject.original):
        return None
    return variant.changed({name: CHUNK}, "chunked")


def asked(bench: Workbench, variant: Variant, implementation: str, case: Case) -> Mapping[str, Figure]:
    """Compare both sides on a case, and note what it gave and what came back."""
    from .parity import exact

    fields: dict[str, bool] = {}
    figures = exact(bench, variant, implementation, scenario_of(case, variant, fields))
    bench.record.gave(bench.subject.name, (*variant.inputs, *case.gives), fields)
    return figures


def scenario_of(case: Case, variant: Variant, fields: dict[str, bool]) -> Scenario:
    """A case as a scenario; `fields` receives those of the results."""

    def run(model: Any, setting: Setting) -> Outputs:
        call = Call(model, setting, variant.inputs, case.length, case.rows)
        return _observed(case, call, fields)

    return Scenario(f"given {case.name}", run, own_pair=case.traces)


def _observed(case: Case, call: Call, fields: dict[str, bool]) -> Outputs:
    """Everything that the calls of a case return, and what is left of the caches it gave."""
    config = call.model.config
    problem = getattr(config, "problem_type", None)
    try:
        return _outputs(case, call, fields)
    finally:
        if hasattr(config, "problem_type"):
            config.problem_type = problem  # the first labels that a classifier is given decide it for good


def _outputs(case: Case, call: Call, fields: dict[str, bool]) -> Outputs:
    arguments = case.make(call)
    result = called(call, arguments)
    fields |= {name: found or fields.get(name, False) for name, found in fields_of(result).items()}
    outputs = _real(everything(result), case, call)
    states = {name: value for name, value in arguments.items() if hasattr(value, "get_seq_length")}
    outputs |= everything(states, "given")
    for step, following in enumerate(case.then(call, arguments, result) if case.then else ()):
        result = called(call, following)
        outputs |= {f"step {step}, {name}": value for name, value in everything(result).items()}
    return {name: value.clone() for name, value in outputs.items()}


def called(call: Call, arguments: Arguments) -> Any:
    """The result of a call that leaves its tensors as they are.

    Raises:
        Mismatch: an argument was changed in place.
    """
    import torch

    keep = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    seed_all(call.setting.seed)
    result = call.model(**arguments)
    for name, value in keep.items():
        if not torch.equal(value, arguments[name]):
            raise Mismatch(f"{name} was changed in place")
    return result


def _real(outputs: Outputs, case: Case, call: Call) -> Outputs:
    """With padding, the rows [tokens, …] that are real of what has a token axis, and all of what is no cache."""
    if not case.padded:
        return outputs
    mask = call.padded(case.padded).bool()
    return {name: rows for name, value in outputs.items() if (rows := _rows(value, mask)) is not None}


def _rows(value: Tensor, mask: Tensor) -> Tensor | None:
    if value.shape[:2] == mask.shape:
        return value[mask]
    return value if value.dim() <= 2 else None


def asked_alone(bench: Workbench) -> dict[str, Figure]:
    """All cases of a class beside the main one, in one check; what the original cannot do is left out.

    Raises:
        Mismatch: a case differs.
    """
    implementation = bench.implementations()[0]
    taken = arguments_of(bench.plain_original(bench.base, implementation, "float64"))
    bench.record.expect(bench.subject.name, taken)
    short = Workbench(
        bench.subject, bench.variants, replace(bench.options, quick=True), bench.rounding, record=bench.record
    )
    done, known = 0, bench.record.given() if bench.options.quick else set()
    for variant, case in _asked_for(bench, bench.base, taken):
        if case.length != LENGTH or (known.issuperset(case.gives) and case.name not in ALWAYS):
            continue  # the main class has the same layers
        with contextlib.suppress(NotRun), about(f"given {case.name}"):  # the verdict lists the argument
            asked(short, variant, implementation, case)
            done += 1
    return {"cases": done}
