"""The checks of gates 2 to 4 and of latency, in the order in which they run: the cheap and sharp ones first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from rewrite.errors import VerificationError

from .calls.approximate import approximation_checks
from .calls.argument_checks import argument_checks
from .calls.captured_replays import captured_checks
from .calls.compiled import compile_checks
from .calls.parity import exact_checks, low_precision_checks
from .calls.precision import precision_checks, rounding_checks
from .calls.registered import registered_checks
from .calls.single_forward import forward_parity, low_precision_forward
from .configuration.variations import configuration_checks
from .drawn.drawn_comparison import drawn_checks
from .generation.cache_name import lost_cache
from .generation.call_sequences import turn_checks
from .generation.itself import itself_checks, itself_loop_checks
from .generation.loop_checks import SWITCH, loop_checks
from .generation.loop_scenarios import talk_checks
from .generation.step_checks import step_checks
from .generation.texts import generation_checks
from .judging.checks import CheckRun, left_out
from .judging.compare import NotRun
from .judging.verdict import Figure
from .models.configs import small_variants
from .models.model_inputs import TEXT
from .models.model_pair import Workbench, on_original
from .models.real_shapes import wide_variant
from .models.subjects import Subject, Subjects
from .parallel import Part
from .ring_equality import ring_checks
from .secondary_classes import class_alone
from .state.embeddings import embedding_checks
from .state.forms import form_checks
from .state.operator_checks import operator_checks
from .state.runtime import runtime_checks
from .state.training_checks import changing_checks, hook_checks


def parts_of(name: str, bench: Workbench, subjects: Subjects) -> list[Part]:
    """The checks of a gate by its name, in parts that processes of their own may run."""
    if name == "parity":
        parts = _with_text(bench, subjects) if bench.base.inputs == TEXT else _without_text(bench, subjects)
        return [Part(partial(ring_checks, bench)), *parts, Part(partial(itself_checks, bench))]
    if name == "model" and bench.options.weights is not None:
        from .generation.teacher_forcing import teacher_checks

        return [Part(partial(teacher_checks, bench))]
    if name == "generation":
        if bench.goes_on and hasattr(bench.subject.original, "generate"):
            if lost := lost_cache(bench):
                return [Part(lambda: iter([left_out("generate() of the original", lost)]))]
            quick = bench.options.quick
            variants = bench.variants[:1] if quick else bench.variants
            texts = Part(partial(generation_checks, bench, bench.base), shares=2)
            loop = Part(partial(loop_checks, bench, variants), shares=4, early=True)
            parts = [texts, loop, Part(partial(turn_checks, bench, variants[0]), shares=2)]
            if not quick:
                parts.append(Part(partial(step_checks, bench, variants[0])))
        else:
            parts = []
        parts.append(Part(partial(talk_checks, bench)))
        if not bench.options.quick:
            parts.append(Part(partial(drawn_checks, bench)))
        if bench.options.itself:
            parts.append(Part(partial(itself_loop_checks, bench)))
        if not bench.options.quick:
            # here, where fields of the configuration were varied
            parts.append(Part(partial(operator_checks, bench)))
            if bench.base.inputs == TEXT:
                parts.append(Part(partial(form_checks, bench)))
        others = subjects.others if bench.options.others else ()
        return [*parts, *(Part(partial(_talks, bench, other)) for other in others)]
    if name == "latency" and not bench.options.quick:
        from .generation.latency import latency_checks

        return [Part(partial(latency_checks, bench))]
    return []


def _with_text(bench: Workbench, subjects: Subjects) -> list[Part]:
    base, quick = bench.base, bench.options.quick
    parts = [
        *(Part(partial(exact_checks, bench, variant)) for variant in bench.variants),
        *_each_class(bench, subjects, [Part(partial(_asked, bench))], [Part(partial(_changed, bench))]),
        Part(partial(low_precision_checks, bench, base), shares=1 if quick else 3),
        Part(partial(precision_checks, bench, base), shares=1 if quick else 2),
    ]
    if bench.options.device != "cpu" and not quick:
        parts.append(Part(partial(_wide, bench)))
    if not quick:
        parts.append(Part(partial(compile_checks, bench, base), early=True))  # a second process would begin anew
    if bench.rounding is not None:
        parts.append(Part(partial(approximation_checks, bench, base)))
    return parts


def _without_text(bench: Workbench, subjects: Subjects) -> list[Part]:
    """A model that is fed more than text is compared as a whole."""
    return _each_class(bench, subjects, [Part(partial(_whole, bench)), Part(partial(_asked, bench))], [])


def _whole(bench: Workbench) -> Iterator[CheckRun]:
    name = f"{bench.subject.name}: forward"
    yield CheckRun(f"fp64, {name}", partial(forward_parity, bench), essential=True)
    for dtype in bench.low_precisions():
        yield CheckRun(f"{dtype}, {name}, error against fp64", partial(low_precision_forward, bench, dtype))
    yield from rounding_checks(bench, bench.base)
    yield from runtime_checks(bench, bench.variants)


def _each_class(bench: Workbench, subjects: Subjects, asked: list[Part], then: list[Part]) -> list[Part]:
    """What the main class is asked, then other checks of it, its configuration, and the classes beside it.

    In a quick verification these are asked what no class before them was, so they follow it in one part.
    """
    others = [Part(partial(_other, bench, other)) for other in (subjects.others if bench.options.others else ())]
    configuration = Part(partial(configuration_checks, bench, subjects.others), early=True)
    if bench.options.quick:
        return [Part(partial(_one_after_another, [*asked, *others]), early=True), *then, configuration]
    return [*asked, *then, configuration, *others]


def _other(bench: Workbench, other: Subject) -> Iterator[CheckRun]:
    yield CheckRun(f"fp64, {other.name}: forward", partial(_short, bench, other))


def _one_after_another(parts: Sequence[Part]) -> Iterator[CheckRun]:
    for part in parts:
        yield from part.checks()


def _changed(bench: Workbench) -> Iterator[CheckRun]:
    """Models that are trained, changed, hooked and given another attention function."""
    yield from changing_checks(bench, bench.base)
    yield from hook_checks(bench, bench.base)
    yield from registered_checks(bench, bench.base)
    yield from runtime_checks(bench, bench.variants)


def _wide(bench: Workbench) -> Iterator[CheckRun]:
    try:
        variant = wide_variant(bench)
    except NotRun as reason:
        yield left_out("error against fp64, wide", reason)
    else:
        yield from low_precision_checks(bench, variant)


def _asked(bench: Workbench) -> Iterator[CheckRun]:
    """Every argument, and the embeddings; of a large model in a full verification alone."""
    if bench.options.quick and bench.large:
        why = "the smallest model is too large for a quick verification"
        yield left_out("every argument of forward, embeddings", why)
        return
    yield from argument_checks(bench, bench.base)
    yield from embedding_checks(bench)
    yield from captured_checks(bench)


def _talks(bench: Workbench, subject: Subject) -> Iterator[CheckRun]:
    """The decode loop of a class beside the main one, where it has one."""
    if not hasattr(subject.rewritten, SWITCH):
        return
    try:
        variants = small_variants(subject.original, subject.causal, bench.options.config)
    except VerificationError as error:
        yield left_out(f"decode loop of {subject.name}", error)
        return
    other = Workbench(subject, variants[:1], bench.options, bench.rounding, record=bench.record)
    yield from talk_checks(other, f" of {subject.name}")


def _short(bench: Workbench, subject: Subject) -> Mapping[str, Figure]:
    """A class beside the main one: a forward pass, each of its arguments and a checkpoint round trip."""
    variants = on_original(small_variants, subject.original, False, bench.options.config)
    other = Workbench(subject, variants[:1], bench.options, bench.rounding, record=bench.record)
    return class_alone(other)
