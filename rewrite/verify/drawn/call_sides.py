"""Both models of a class, with the package's loop switched on, in the states that drawn calls find them in."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from ..generation.call_sequences import embed_larger
from ..generation.loop_checks import LOOP, Package, loop_pair
from ..judging.compare import NotRun
from ..judging.fp32_free_reference import unrounded
from ..models.configs import Variant
from ..models.counting import uncounted
from ..models.model_pair import Pair, Workbench
from .call_arguments import Arguments, Side, arguments_of
from .call_outcomes import Outcome, outcome
from .call_strategies import ASSISTED, DRAFTS
from .drawn_calls import DrawnCall

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 140_000
"""A vocabulary of which half has numbers beyond 16 bits."""
ROOMS = {"generate.call_graphs": ("FIRST_ROOM", 3), "decode.graph_cache": ("ROUNDING", 8)}
"""Where a runtime says how many tokens a first cache has room for, and numbers with which short texts outgrow it."""
Left = list[tuple[str, str]]
"""Why a package's loop stepped aside, by operator and reason."""


@dataclass
class Sides:
    """Pairs of models by kind, each built when first asked for, with the graphs of the calls before."""

    bench: Workbench
    variant: Variant
    dtype: str
    """In which the models compute."""
    wide: bool = False
    """Whether nothing is rounded to fp32: where attention takes fp64's lowest value there, padding is NaN."""
    _pairs: dict[str, Pair] = field(default_factory=dict)

    def new(self, wide: bool = False) -> Sides:
        """The same with new models."""
        return Sides(self.bench, self.variant, self.dtype, self.wide or wide)

    def exactly(self) -> AbstractContextManager[None]:
        """A context in which nothing is rounded to fp32, where that is wanted."""
        return unrounded() if self.wide else contextlib.nullcontext()

    def __post_init__(self) -> None:
        self.package = Package.of(self.bench.subject.rewritten)

    def variant_of(self, kind: str) -> Variant:
        """The configuration of a kind of pair."""
        if kind != "large":
            return self.variant
        changed = self.variant.changed({}, f"{self.variant.name}, a large vocabulary")
        changed.config.get_text_config(decoder=True).vocab_size = LARGE
        return changed

    def pair(self, kind: str = "") -> Pair:
        """A pair of a kind: `repeating` texts, a `large` vocabulary, an `assistant` whose drafts are often right."""
        if kind not in self._pairs:
            pair = loop_pair(self.bench, self.variant_of(kind), self.dtype)
            if kind in MAKE:
                MAKE[kind](pair)
            self._pairs[kind] = pair
        return self._pairs[kind]

    def ask(self, call: DrawnCall) -> tuple[Outcome, Outcome, Left]:
        """What both sides do, and why the rewritten one left its own loop.

        Raises:
            NotRun: the arguments cannot be made of the original.
        """
        kind = kind_of(call)
        models, package, mode = self.pair(kind), self.package, call.given.get("mode")
        with self.exactly():
            asked = self._arguments(call, self._side(call, kind, False))
            package.backend.reset_fallbacks()
            with self._begun(call, models.rewritten):
                arguments = arguments_of(call, self.variant_of(kind), self._side(call, kind, True))
                found = outcome(models.rewritten, arguments, mode, call.seed)
            left = sorted(set(package.backend.fallbacks()))
            plain = without_drafts(call)
            if plain is not call and found.error is None and not any(operator == "generate" for operator, _ in left):
                call, asked = plain, self._arguments(plain, self._side(plain, kind, False))
            with uncounted():
                return outcome(models.original, asked, mode, call.seed), found, left

    def _arguments(self, call: DrawnCall, side: Side) -> Arguments:
        try:
            with uncounted():
                return arguments_of(call, self.variant_of(kind_of(call)), side)
        except Exception as error:  # of foreign code, before what is compared
            raise NotRun(f"{type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _begun(self, call: DrawnCall, model: Any) -> Iterator[None]:
        """Let a cache be small, or the first tokens be chosen without kernels, where the call says so."""
        root = LOOP.sub("", next(base.__module__ for base in type(model).__mro__ if LOOP.search(base.__module__)))
        with contextlib.ExitStack() as stack:
            for module, (name, value) in ROOMS.items() if "room" in call.given else ():
                stack.enter_context(mock.patch.object(importlib.import_module(f"{root}.{module}"), name, value))
            if "begins" in call.given:
                self.package.store.store_of(model).compilations.clear()
                stack.enter_context(mock.patch.object(model, "starts_plainly", True))
            yield

    def _side(self, call: DrawnCall, kind: str, rewritten: bool) -> Side:
        """One side as the call takes it."""
        model = self.pair(kind).rewritten if rewritten else self.pair(kind).original
        assistant = call.given.get("assistant_model")
        if assistant is None:
            return Side(model)
        if assistant == "same":
            return Side(model, model)
        others = self.pair("assistant")
        return Side(model, others.rewritten if rewritten and assistant == "alike" else others.original)


def kind_of(call: DrawnCall) -> str:
    """The kind of models that a call asks."""
    return str(call.given.get("vocabulary") or call.given.get("weights") or "")


def drafts(call: DrawnCall) -> bool:
    """Whether tokens are drafted."""
    return "prompt_lookup_num_tokens" in call.settings or "assistant_model" in call.given


def without_drafts(call: DrawnCall) -> DrawnCall:
    """The call whose answer counts where drafts are taken as transformers' assisted decoding (5.14 to 5.24) does not.

    That has one row, and behind a cache that came back it reads the whole text once more.
    """
    if drafts(call) and (call.given.get("cache") in ("returned", "cropped") or call.rows > 1):
        return call.without(*DRAFTS, *ASSISTED, "assistant_model")
    return call


def _moved(pair: Pair) -> None:
    """Move all weights a little."""
    import torch

    with torch.no_grad():
        for model in (pair.original, pair.rewritten):
            generator = torch.Generator().manual_seed(3)
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(0.05 * parameter.std(correction=0) * noise.to(parameter))


MAKE: dict[str, Callable[[Pair], None]] = {
    "assistant": _moved,
    "repeating": lambda pair: embed_larger(pair, 30.0),
}
