"""Gate 2: each field of the configuration that the model reads, away from what it is in the small configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun, finite, near_exact
from ..judging.fp32_free_reference import unrounded
from ..judging.verdict import ConfigField, Figure
from ..models.configs import Variant, small_variants
from ..models.model_inputs import TEXT, kinds_of
from ..models.model_pair import Workbench, build, on_original
from ..models.subjects import Subject
from .reader import fields_read
from .runs import Observed, Runs
from .values import Choices, Variation, changed, choices

APART = ("output_", "return_", "use_cache", "bidirectional", "causal", "is_decoder")
"""Parts of the names of what says what is returned, and of what lets a token see those after it."""

ABSENT = "None"
TURNING = ("dynamic", "longrope")
"""Types of rotary embedding whose frequencies depend on the length of the text."""

UNSEEN = "no output, gradient or initial weight of the original depends on it here"


@dataclass
class Configurations:
    """Runs the original with one field changed after another, and compares where that shows."""

    bench: Workbench
    known: frozenset[str] = frozenset()
    """Fields that another class of the file was judged by."""

    found: list[ConfigField] = field(default_factory=list)
    _runs: Runs = field(init=False)
    _bases: dict[bool, Observed] = field(default_factory=dict)
    _changed: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._runs = Runs(self.bench)

    def checks(self) -> Iterator[CheckRun]:
        """Yield a check for every value that shows in the original; `found` gets the fields, varied or not."""
        wanted = self.choices()
        try:
            if wanted:
                self._settle()
        except NotRun as reason:
            self.found += [_unvaried(one, [str(reason)]) for one in wanted]
            return
        if self.bench.options.quick:
            yield from self._together(wanted)
            return
        alone: list[Variation] = []
        stepped: list[Variation] = []
        hidden: list[tuple[Choices, list[str]]] = []
        for one in wanted:
            shown: list[Variation] = []
            problems: list[str] = []
            for variation, observed in self._shown(one, (), problems):
                shown.append(variation)
                stepped += [variation] if _taken_another_way(variation) else []
                yield self._check(observed)
            if shown:
                self.found.append(ConfigField(one.field, tuple(variation.text for variation in shown)))
                alone.append(shown[0])
            else:
                hidden.append((one, problems))
        yield from self._with_others(hidden, alone)
        self._leave_for_steps(stepped)

    def choices(self) -> list[Choices]:
        """The choices for each field that a model of this class reads and no other class was judged by."""
        base, original = self.bench.base, self.bench.subject.original
        try:
            model = on_original(build, original, base, "eager", "float32", "cpu")
        except NotRun:
            model = None
        found = choices(base.config, fields_read(original, model), self._runs.token(), _parts(base.config, base))
        return [one for one in found if one.field not in self.known]

    def _settle(self) -> None:
        """Find the precision in which the original runs and is finite."""
        for self._runs.dtype in ("float64", "float32"):
            try:
                base = self._base(False)
            except NotRun as error:
                reason = str(error)
                continue
            if finite(base.outputs):
                return
            reason = "the original's outputs are not finite"
            self._bases.clear()
        raise NotRun(reason)

    def _base(self, trains: bool) -> Observed:
        if trains not in self._bases:
            plain = Variation("", "", {}, trains)
            self._bases[trains] = self._runs.original((plain,), self._bases[False].weights if trains else None)
        return self._bases[trains]

    def _shown(
        self, one: Choices, others: tuple[Variation, ...], problems: list[str]
    ) -> Iterator[tuple[Variation, Observed]]:
        """Yield the variations that show in the original, beside the `others` that both have, and what it computes."""
        seen = False
        for variation in one.variations:
            if seen and not variation.always:
                continue
            try:
                base = self._combined(others, variation.trains) if others else self._base(variation.trains)
                observed = self._runs.original((*others, variation), base.weights)
            except NotRun as reason:
                problems.append(f"{variation.text}: {reason}")
                continue
            if not observed.differs(base):
                problems.append(UNSEEN)
                continue
            if not finite(observed.outputs):
                problems.append(f"{variation.text}: the original's outputs are not finite")
                continue
            seen = True
            for way in variation.changes:
                self._changed.setdefault(way, []).append(variation.name)
            yield variation, observed

    def _with_others(self, hidden: Sequence[tuple[Choices, list[str]]], alone: list[Variation]) -> Iterator[CheckRun]:
        """What shows beside other fields that are away from neutral: a coefficient of a loss that is off."""
        together = self._together_with((), alone)
        if len(together) > 1:
            yield self._check(self._combined(together, False))
        self._hand_on(together)
        for one, problems in hidden:
            shown = list(self._shown(one, together, list(problems))) if together and UNSEEN in problems else []
            for variation, observed in shown:
                yield self._check(observed, f"{variation.name}, with others")
            if shown:
                self.found.append(ConfigField(one.field, tuple(variation.text for variation, _ in shown)))
            elif one.field in self._changed:
                self.found.append(ConfigField(one.field, tuple(f"with {name}" for name in self._changed[one.field])))
            else:
                self.found.append(_unvaried(one, problems))

    def _together(self, found: list[Choices]) -> Iterator[CheckRun]:
        """All fields at once, those left out with which the original does not run; and again with other types of RoPE.

        A type other than the default takes its frequencies from elsewhere, where nothing of the default's own shows.
        """
        firsts = [one.variations[0] for one in found if one.variations]
        types = [variation for variation in firsts if variation.field.endswith("rope_type")]
        plain = [variation for variation in firsts if variation not in types]
        together = self._together_with((), plain)
        again = self._together_with((), [*types, *plain]) if types else ()
        used = {variation.field: variation.text for variation in (*together, *again)}
        for one in found:
            if one.field in used:
                self.found.append(ConfigField(one.field, (used[one.field],)))
            else:
                self.found.append(_unvaried(one, ["the original does not run with it beside the others"]))
        if together:
            yield self._check(self._combined(together, False))
        if again:
            yield self._check(self._combined(again, False), f"{len(again)} fields at once, another type of RoPE")
        self._hand_on(together)

    def _hand_on(self, together: tuple[Variation, ...]) -> None:
        """Leave the fields that go together to the gate of generation, without those that `APART` speaks of."""
        kept = tuple(one for one in together if not any(part in one.field for part in APART))
        if kept:
            self.bench.varied = Variant("fields varied", changed(self.bench.base.config, kept), self.bench.base.inputs)

    def _leave_for_steps(self, found: Sequence[Variation]) -> None:
        """Leave to the gate of generation what a step takes another way with: all that is absent, and each type."""
        absent = self._together_with((), [one for one in found if one.text == ABSENT])
        groups = [absent, *((one,) for one in found if one.text != ABSENT)]
        config, inputs = self.bench.base.config, self.bench.base.inputs
        self.bench.stepped = tuple(
            Variant(", ".join(one.name for one in group), changed(config, group), inputs) for group in groups if group
        )

    def _together_with(self, before: tuple[Variation, ...], added: Sequence[Variation]) -> tuple[Variation, ...]:
        """As many of `added` as go together, halved until what is left out is found."""
        if not added:
            return before
        try:
            self._combined((*before, *added), False)
            return (*before, *added)
        except NotRun:
            if len(added) == 1:
                return before
        half = len(added) // 2
        return self._together_with(self._together_with(before, added[:half]), added[half:])

    def _combined(self, variations: tuple[Variation, ...], trains: bool) -> Observed:
        if trains:
            variations = (*variations, Variation("", "", {}, True))
        return self._runs.original(variations, None)

    def _check(self, expected: Observed, said: str = "") -> CheckRun:
        plain = [variation.name for variation in expected.variations if variation.field]
        said = said or (plain[0] if len(plain) == 1 else f"{len(plain)} fields at once")
        kind = f"configuration, {self.bench.subject.name}" if self.known else "configuration"
        run = partial(self._compare if len(plain) == 1 else self._compare_and_name, expected)
        return CheckRun(f"{kind}: {said}", run)

    def _compare_and_name(self, expected: Observed) -> Mapping[str, Figure]:
        """Compare several fields at once; where they differ, say which of them does so alone."""
        try:
            return self._compare(expected)
        except Mismatch as mismatch:
            for variation in expected.variations:
                if variation.field and self._differs_alone(variation):
                    raise Mismatch(f"with {variation.name} alone, too: {mismatch}", mismatch.figures) from mismatch
            raise

    def _differs_alone(self, variation: Variation) -> bool:
        try:
            self._compare(self._runs.original((variation,), self._base(False).weights))
        except Mismatch:
            return True
        except NotRun:
            pass
        return False

    def _compare(self, expected: Observed) -> Mapping[str, Figure]:
        found = self._runs.observed(self.bench.subject.rewritten, expected.variations, expected.weights, expected)
        maximum = "fp64 max" if self._runs.dtype == "float64" else "fp32 max"
        try:
            near_exact(expected.initial, found.initial, maximum)
            truth = self._without_roundings(expected)
            figures = near_exact(expected.outputs, found.outputs, maximum, lambda: truth().outputs)
            if expected.gradients:
                exact = (lambda: truth().gradients) if maximum == "fp64 max" else None
                compared = near_exact(expected.gradients, found.gradients, "gradient max", exact)
                figures |= {f"gradients {name}": value for name, value in compared.items()}
        except Mismatch:
            if expected.differs(self._runs.original(expected.variations, expected.weights)):
                raise NotRun("the original computes something else each time") from None
            raise
        return figures

    def _without_roundings(self, expected: Observed) -> Callable[[], Observed]:
        def run() -> Observed:
            with unrounded():
                return self._runs.original(expected.variations, expected.weights)

        return run


def configuration_checks(bench: Workbench, others: Sequence[Subject] = ()) -> Iterator[CheckRun]:
    """Yield a check per value of a field of the configuration; `bench.fields` says what was varied, and what not.

    Of the `others`, the classes beside the main one, each is asked for the fields that no class before it reads, and
    one that is fed something else also for those that showed nothing.
    """
    if not bench.options.configuration or bench.rounding is not None:
        return
    main = Configurations(bench)
    try:
        yield from main.checks()
    finally:
        bench.fields += main.found
    for other in others if not bench.options.quick else ():
        if other.config_class is bench.subject.config_class:
            yield from _elsewhere(bench, other)


def _elsewhere(bench: Workbench, subject: Subject) -> Iterator[CheckRun]:
    """The checks on the fields that only a class beside the main one reads."""
    known = {one.name for one in bench.fields}
    if kinds_of(subject.original)[:1] != kinds_of(bench.subject.original)[:1]:
        known = {one.name for one in bench.fields if one.values}
    read = choices(bench.base.config, fields_read(subject.original), 0, _parts(bench.base.config, bench.base))
    left = [one for one in read if one.field not in known]
    if not left:
        return
    try:
        variants = on_original(small_variants, subject.original, False, bench.options.config)
    except NotRun as reason:
        found = [_unvaried(one, [f"{subject.name}: {reason}"]) for one in left]
    else:
        there = Configurations(Workbench(subject, variants[:1], bench.options), frozenset(known))
        yield from there.checks()
        found = there.found
    before = {one.name for one in bench.fields}
    varied = {one.name for one in found if one.values}
    bench.fields[:] = [one for one in bench.fields if one.name not in varied]
    bench.fields += [one for one in found if one.values or one.name not in before]


def _taken_another_way(variation: Variation) -> bool:
    """Whether a step may compute something else with it, where a prompt does, too."""
    if variation.field.endswith("rope_type"):
        return variation.text in TURNING
    return variation.text == ABSENT and not variation.field.endswith("token_id") and not variation.trains


def _unvaried(one: Choices, problems: Sequence[str]) -> ConfigField:
    return ConfigField(one.field, (), one.reason or "; ".join(dict.fromkeys(problems)))


def _parts(config: Any, variant: Variant) -> tuple[str, ...]:
    """The parts of a model of models that its inputs reach: of text, that of the language model."""
    names = [name for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None]
    if variant.inputs == TEXT:
        names = [name for name in names if getattr(config, name) is config.get_text_config()]
    return tuple(names)
