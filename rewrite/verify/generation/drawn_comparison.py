"""Asks both sides of a package the same drawn calls, and makes smaller what differs."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from ..judging.compare import NotRun
from ..judging.fp32_free_reference import unrounded
from ..models.configs import Variant
from ..models.model_inputs import vocabulary
from ..models.model_pair import Workbench, on_original
from .drawn_calls import DrawnCall, Prompt, Source, drawn_call, drawn_prompt
from .drawn_inputs import Side, arguments_of, prompt_of, text_of
from .drawn_outcomes import Outcome, difference, streamed_singly
from .drawn_sides import Left, Sides, drafts, kind_of
from .loop_checks import fused

BEFORE = 6
"""Calls before one that differs that are tried with it, where it does not differ alone."""
LEAST = 400
"""Calls that are tried to make one smaller, at most."""


@dataclass(frozen=True)
class Difference:
    """A call that differs, made as small as it goes, the calls that have to come before it, and in what it differs."""

    call: DrawnCall
    what: str
    before: tuple[DrawnCall, ...] = ()

    def __str__(self) -> str:
        after = "".join(f"\n    after {call}" for call in self.before)
        return f"{self.what}\n    {self.call}{after}"


@dataclass
class Figures:
    """How many calls were compared; for which the package's loop stepped aside, raised, or left tokens to the host."""

    calls: int = 0
    raised: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    host: Counter[str] = field(default_factory=Counter)
    not_asked: Counter[str] = field(default_factory=Counter)
    rounded: int = 0
    """Calls that differ by what is rounded to fp32 alone."""

    def count(self, expected: Outcome, left: Left) -> None:
        """Count a call."""
        self.calls += 1
        if expected.error is not None:
            self.raised[": ".join(expected.error).split("\n")[0][:90]] += 1
        else:
            self.refused.update({reason for operator, reason in left if operator == "generate"})
            self.host.update({reason for operator, reason in left if operator == "tokens"})


class Comparison:
    """Drawn calls of one class of a package, one after another on one pair of models."""

    def __init__(self, bench: Workbench, variant: Variant):
        self.bench, self.variant, self.figures = bench, variant, Figures()
        self.sides = self._first_that_talks()

    def _first_that_talks(self) -> Sides:
        problem: NotRun | None = None
        for dtype, wide in (("float64", False), ("float64", True), ("float32", False)):
            sides = Sides(self.bench, self.variant, dtype, wide)
            settings = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
            found = sides.ask(DrawnCall(Prompt(1, 2, 9, "left"), settings))[0]
            logits = [value for name, value in found.values.items() if ".logits." in name]
            if found.error is None and all(bool(value.isfinite().all()) for value in logits):
                return sides
            problem = NotRun(": ".join(found.error or ("", "the original's logits are not finite")))
        raise problem or NotRun("the original does not generate")

    def _new(self) -> Sides:
        return replace(self.sides, _pairs={})

    @property
    def maximum(self) -> str:
        """The name of the bound."""
        return "fp64 max" if self.sides.dtype == "float64" else "fp32 max"

    def draw(self, seed: int) -> DrawnCall:
        """The call with that number, another one for each class."""
        name = f"{self.bench.subject.name} {seed}"
        prompt, world = drawn_prompt(name)
        kind = kind_of(DrawnCall(prompt, {}, world))
        model = self.sides.pair(kind).original
        asked = prompt_of(self.sides.variant_of(kind), model, prompt).get("input_ids")
        heard = self._hear(prompt, kind)
        rows = [[]] * len(heard) if asked is None else asked.tolist()
        encodes = bool(model.config.is_encoder_decoder)
        source = Source(random.Random(f"call {name}"), vocabulary(model.config), rows, heard, text_of, encodes)
        return drawn_call(prompt, world, source)

    def _hear(self, prompt: Prompt, kind: str) -> list[list[int]]:
        """What the original says behind a prompt by itself; of what it does not take, nothing in particular."""
        ask = DrawnCall(prompt, {"max_new_tokens": 12, "do_sample": False})
        model = self.sides.pair(kind).original
        try:
            arguments = arguments_of(ask, self.sides.variant_of(kind), Side(model))
            with unrounded() if self.sides.wide else contextlib.nullcontext():
                tokens = on_original(model.generate, **arguments.keywords)
        except NotRun:
            return [[]] * prompt.rows
        return [row[-12:] for row in tokens.tolist()]

    def run(self, seeds: range, tell: Any = None) -> list[Difference]:
        """Compare the calls of these numbers; return those that differ, made smaller."""
        found, before = [], []
        for seed in seeds:
            call = self.draw(seed)
            what = self.compare(call)
            if what is not None:
                smallest = self.smallest(call, what, before)
                self.figures.rounded += smallest is None
                found += [smallest] if smallest is not None else []
                if smallest is not None and tell is not None:
                    tell(seed, smallest)
                self.sides = self._new()
            before = [*before, call][-BEFORE:]
        return found

    def compare(self, call: DrawnCall, sides: Sides | None = None) -> str | None:
        """In words what differs; None where nothing does. Without sides those at hand, and the call is counted."""
        try:
            expected, found, left = (sides or self.sides).ask(call)
        except NotRun as reason:
            if sides is None:
                self.figures.not_asked[str(reason)] += 1
            return None
        if sides is None:
            self.figures.count(expected, left)
        if ("generate", "step_differs") in left and fused((sides or self.sides).pair().rewritten):
            return "the package leaves its own step aside, which computes something else (step_differs)"
        if not drafts(call):
            return difference(expected, found, self.maximum)
        if call.settings.get("do_sample"):  # of the same distribution, and not the same draws
            if call.settings.get("top_k") != 1:
                return None if (expected.error, expected.kind) == (found.error, found.kind) else "another kind"
            found = replace(found, random=expected.random)
        return difference(streamed_singly(expected), streamed_singly(found), self.maximum)

    def smallest(self, call: DrawnCall, what: str, before: list[DrawnCall]) -> Difference | None:
        """Make a call that differs smaller, on new models each time; None where roundings to fp32 alone differ."""
        needed: tuple[DrawnCall, ...] = ()
        if self._differs(call) is None:
            needed = tuple(before)
            if self._differs(call, needed) is None:
                return Difference(call, f"{what}, after more than {BEFORE} calls", needed)
            for number in reversed(range(len(needed))):
                fewer = (*needed[:number], *needed[number + 1 :])
                if self._differs(call, fewer) is not None:
                    needed = fewer
        if self._rounds(call, needed):
            return None
        tried, changed = 0, True
        while changed and tried < LEAST:
            changed = False
            for smaller in call.smaller():
                tried += 1
                if (now := self._differs(smaller, needed)) is not None and not self._rounds(smaller, needed):
                    call, what, changed = smaller, now, True
                    break
        return Difference(call, what, needed)

    def _rounds(self, call: DrawnCall, before: tuple[DrawnCall, ...]) -> bool:
        """Whether both sides do the same where nothing is rounded to fp32."""
        if self.sides.wide or self.sides.dtype != "float64":
            return False
        return self._differs(call, before, replace(self.sides, wide=True, _pairs={})) is None

    def _differs(
        self, call: DrawnCall, before: tuple[DrawnCall, ...] = (), sides: Sides | None = None
    ) -> str | None:
        sides = sides or self._new()
        for one in before:
            self.compare(one, sides)
        return self.compare(call, sides)
