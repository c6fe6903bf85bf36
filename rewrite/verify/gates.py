"""The checks of gates 2 to 4 and of latency, in the order in which they run: the cheap and sharp ones first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from rewrite.errors import VerificationError

from .alone import class_alone
from .calls.approximate import approximation_checks
from .calls.asking import argument_checks
from .calls.compiled import compile_checks
from .calls.forward import forward_parity
from .calls.parity import exact_checks, low_precision_checks
from .calls.precision import precision_checks
from .calls.registered import registered_checks
from .configuration.variations import configuration_checks
from .generation.loop import SWITCH, loop_checks
from .generation.talk import talk_checks
from .generation.texts import generation_checks
from .judging.checks import CheckRun
from .judging.compare import NotRun
from .judging.verdict import Figure
from .models.configs import small_variants
from .models.model_inputs import TEXT
from .models.shapes import wide_variant
from .models.subjects import Subject, Subjects
from .models.workbench import Workbench, on_original
from .state.embeddings import embedding_checks
from .state.training import changing_checks, hook_checks


def later_checks(name: str, bench: Workbench, subjects: Subjects) -> Iterator[CheckRun]:
    """The checks of a gate by its name."""
    if name == "parity":
        yield from parity_checks(bench, subjects)
    elif name == "model":
        if bench.options.weights is not None:
            from .generation.teacher import teacher_checks

            yield from teacher_checks(bench)
    elif name == "generation":
        if bench.subject.writes and bench.base.inputs == TEXT and hasattr(bench.subject.original, "generate"):
            yield from generation_checks(bench, bench.base)
            yield from loop_checks(bench, bench.variants[:1] if bench.options.quick else bench.variants)
        yield from talk_checks(bench)
        for other in subjects.others if bench.options.others else ():
            yield from _talks(bench, other)
    elif not bench.options.quick:
        from .generation.latency import latency_checks

        yield from latency_checks(bench)


def parity_checks(bench: Workbench, subjects: Subjects) -> Iterator[CheckRun]:
    """Gate 2; a model that is fed more than text is compared as a whole."""
    if bench.base.inputs != TEXT:
        yield CheckRun(f"fp64, {bench.subject.name}: forward", partial(forward_parity, bench), essential=True)
        yield from _asked(bench)
        yield from configuration_checks(bench, subjects.others)
        for other in subjects.others if bench.options.others else ():
            yield CheckRun(f"fp64, {other.name}: forward", partial(_short, bench, other))
        return
    for variant in bench.variants:
        yield from exact_checks(bench, variant)
    yield from _asked(bench)
    yield from changing_checks(bench, bench.base)
    yield from hook_checks(bench, bench.base)
    yield from registered_checks(bench, bench.base)
    yield from configuration_checks(bench, subjects.others)
    for other in subjects.others if bench.options.others else ():
        yield CheckRun(f"fp64, {other.name}: forward", partial(_short, bench, other))
    yield from low_precision_checks(bench, bench.base)
    yield from precision_checks(bench, bench.base)
    if bench.options.device != "cpu" and not bench.options.quick:
        yield from low_precision_checks(bench, wide_variant(bench))
    yield from compile_checks(bench, bench.base)
    yield from approximation_checks(bench, bench.base)


def _asked(bench: Workbench) -> Iterator[CheckRun]:
    """Every argument, and the embeddings; of a large model in a full verification alone."""
    if bench.options.quick and bench.large:
        yield CheckRun("every argument of forward, embeddings", _too_large)
        return
    yield from argument_checks(bench, bench.base)
    yield from embedding_checks(bench)


def _talks(bench: Workbench, subject: Subject) -> Iterator[CheckRun]:
    """The decode loop of a class beside the main one, where it has one."""
    if not hasattr(subject.rewritten, SWITCH):
        return
    try:
        variants = small_variants(subject.original, subject.causal, bench.options.config)
    except VerificationError as error:
        yield CheckRun(f"decode loop of {subject.name}", partial(_not_built, error))
        return
    other = Workbench(subject, variants[:1], bench.options, bench.rounding, record=bench.record)
    yield from talk_checks(other, f" of {subject.name}")


def _not_built(error: VerificationError) -> Mapping[str, Figure]:
    raise NotRun(str(error))


def _too_large() -> Mapping[str, Figure]:
    raise NotRun("the smallest model is too large for a quick verification")


def _short(bench: Workbench, subject: Subject) -> Mapping[str, Figure]:
    """A class beside the main one: a forward pass, each of its arguments and a checkpoint round trip."""
    variants = on_original(small_variants, subject.original, False, bench.options.config)
    other = Workbench(subject, variants[:1], bench.options, bench.rounding, record=bench.record)
    return class_alone(other)
