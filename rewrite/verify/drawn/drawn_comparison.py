"""Asks both sides of a package the same drawn calls, and makes smaller what differs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..generation.loop_checks import SWITCH, fused
from ..judging.checks import CheckRun
from ..judging.compare import Mismatch, NotRun
from ..judging.verdict import Figure
from ..models.configs import Variant
from ..models.model_inputs import vocabulary
from ..models.model_pair import Workbench, on_original
from .call_arguments import Side, arguments_of, prompt_of, text_of
from .call_outcomes import Outcome, difference, streamed_singly
from .call_sides import Left, Sides, drafts, kind_of
from .call_strategies import Source
from .drawn_calls import MOST_NEW, DrawnCall, Prompt, drawn_call, drawn_prompt

BEFORE = 6
"""Calls before one that differs that are tried with it, where it does not differ alone."""
CHECKED, TRIED = 10, 20
"""Calls of a class in a verification, about 4 s on two slow cores, and smaller ones tried of one that differs."""


def drawn_checks(bench: Workbench, of: str = "") -> Iterator[CheckRun]:
    """The check of a class that has a decode loop: a few calls, other ones for each class and seed."""
    if hasattr(bench.subject.rewritten, SWITCH) and bench.options.device == "cpu":
        yield CheckRun(f"decode loop{of}, calls drawn by seed", partial(_a_few, bench))


def _a_few(bench: Workbench) -> Mapping[str, Figure]:
    comparison = Comparison(bench, bench.base, TRIED)
    first = CHECKED * bench.options.seed
    for found in comparison.differences(range(first, first + CHECKED)):
        raise Mismatch(f"generate() of {found}")
    figures = comparison.figures
    if not figures.calls:
        raise NotRun(f"the original takes none of the calls: {dict(figures.not_asked)}")
    return {"calls": figures.calls, "by the original's loop": figures.refused.total()}


@dataclass(frozen=True)
class Difference:
    """A call that differs, made as small as it goes, the calls that have to come before it, and in what it differs."""

    call: DrawnCall
    what: str
    before: tuple[DrawnCall, ...] = ()

    def __str__(self) -> str:
        return "".join([f"{self.call}: {self.what}", *(f"; after {call}" for call in self.before)])


@dataclass
class Figures:
    """How many calls were compared, and what of.

    `raised` counts calls for which the original raises, `refused` those left to the original's loop, `host` those in
    which the host chose tokens over replayed steps, by reason; `not_asked` calls whose arguments cannot be made, and
    `rounded` those that differ by roundings to fp32 alone.
    """

    calls: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    not_asked: Counter[str] = field(default_factory=Counter)
    rounded: int = 0

    def count(self, expected: Outcome, left: Left) -> None:
        """Count a call: a reason once, of several generations in it the last."""
        self.calls += 1
        if expected.error is not None:
            self.raised[expected.error[0]] += 1
            return
        for operator, reasons in (("generate", self.refused), ("tokens", self.host)):
            reasons.update([reason for name, reason in left if name == operator][-1:])


class Comparison:
    """Drawn calls of one class of a package, one after another on the same models until one differs."""

    def __init__(self, bench: Workbench, variant: Variant, tried: int):
        self.bench, self.figures = bench, Figures()
        self.tried = tried
        """Smaller calls that are tried of one that differs, at most."""
        self.sides = _first_that_talks(bench, variant)

    def differences(self, seeds: Iterable[int], of: Callable[[DrawnCall], bool] = bool) -> Iterator[Difference]:
        """Compare the calls of these numbers that are `of` a kind; yield those that differ, made smaller."""
        before: list[DrawnCall] = []
        for seed in seeds:
            call = self.draw(seed)
            if not of(call):
                continue
            what = self._compared(call, self.sides, self.figures)
            if what is not None:
                smallest = self._smallest(call, what, before)
                self.sides, before = self.sides.new(), []
                if smallest is None:
                    self.figures.rounded += 1
                else:
                    yield smallest
            before = [*before, call][-BEFORE:]

    def draw(self, seed: int) -> DrawnCall:
        """The call with that number, another one for each class."""
        name = f"{self.bench.subject.name} {seed}"
        prompt, world = drawn_prompt(name)
        kind = kind_of(DrawnCall(prompt, {}, world))
        model, heard = self.sides.pair(kind).original, self._hear(prompt, kind)
        asked = prompt_of(self.sides.variant_of(kind), model, prompt).get("input_ids")
        rows = [[]] * len(heard) if asked is None else asked.tolist()
        numbers, encodes = random.Random(f"call {name}"), bool(model.config.is_encoder_decoder)
        return drawn_call(prompt, world, Source(numbers, vocabulary(model.config), rows, heard, text_of, encodes))

    def _hear(self, prompt: Prompt, kind: str) -> list[list[int]]:
        """What the original says behind a prompt by itself; of what it does not take, nothing in particular."""
        ask, model = DrawnCall(prompt, {"max_new_tokens": MOST_NEW}), self.sides.pair(kind).original
        try:
            arguments = arguments_of(ask, self.sides.variant_of(kind), Side(model))
            with self.sides.exactly():
                tokens = on_original(model.generate, **arguments.keywords)
        except NotRun:
            return [[]] * prompt.rows
        return [row[-MOST_NEW:] for row in tokens.tolist()]

    def _compared(self, call: DrawnCall, sides: Sides, figures: Figures | None = None) -> str | None:
        """In words what differs; None where nothing does."""
        try:
            expected, found, left = sides.ask(call)
        except NotRun as reason:
            if figures is not None:
                figures.not_asked[str(reason).split(":")[0]] += 1
            return None
        if figures is not None:
            figures.count(expected, left)
        if ("generate", "step_differs") in left and fused(sides.pair().rewritten):
            return "the package leaves its own step aside, which computes something else"
        if drafts(call):
            expected, found = streamed_singly(expected), streamed_singly(found)
            if expected.error is not None and expected.error == found.error:  # with other tokens at a time
                return None
            if call.settings.get("do_sample"):  # of the same distribution, and not the same draws
                if call.settings.get("top_k") != 1:
                    return None if (expected.error, expected.kind) == (found.error, found.kind) else "another kind"
                found = replace(found, random=expected.random)
        return difference(expected, found, "fp64 max" if sides.dtype == "float64" else "fp32 max")

    def _smallest(self, call: DrawnCall, what: str, before: list[DrawnCall]) -> Difference | None:
        """Make a call that differs smaller, on new models each time; None where roundings to fp32 alone differ."""
        needed: tuple[DrawnCall, ...] = ()
        if self._differs(call) is None:
            needed = tuple(before)
            if self._differs(call, needed) is None:
                return Difference(call, f"{what}, after more than {BEFORE} calls")
            for number in reversed(range(len(needed))):
                fewer = (*needed[:number], *needed[number + 1 :])
                if self._differs(call, fewer) is not None:
                    needed = fewer
        if self._rounds(call, needed):
            return None
        tried, smaller = 0, call.smaller()
        while tried < self.tried and (one := next(smaller, None)) is not None:
            tried += 1
            if (now := self._differs(one, needed)) is not None and not self._rounds(one, needed):
                call, what, smaller = one, now, one.smaller()
        return Difference(call, what, needed)

    def _rounds(self, call: DrawnCall, before: tuple[DrawnCall, ...]) -> bool:
        """Whether both sides do the same where nothing is rounded to fp32."""
        if self.sides.wide or self.sides.dtype != "float64":
            return False
        return self._differs(call, before, wide=True) is None

    def _differs(self, call: DrawnCall, before: tuple[DrawnCall, ...] = (), wide: bool = False) -> str | None:
        sides = self.sides.new(wide)
        for one in before:
            self._compared(one, sides)
        return self._compared(call, sides)


def _first_that_talks(bench: Workbench, variant: Variant) -> Sides:
    """Models in the largest precision in which the original generates behind padding.

    Raises:
        NotRun: in none.
    """
    problem: Any = None
    for dtype, wide in (("float64", False), ("float64", True), ("float32", False)):
        sides = Sides(bench, variant, dtype, wide)
        settings = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
        found = sides.ask(DrawnCall(Prompt(1, 2, 9, "left"), settings))[0]
        logits = [value for name, value in found.values.items() if ".logits." in name]
        if found.error is None and all(bool(value.isfinite().all()) for value in logits):
            return sides
        problem = found.error or "its logits are not finite"
    raise NotRun(f"the original does not generate: {problem}")
