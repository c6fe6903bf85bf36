"""Calls of `generate()` drawn by seed: plain values by name, so that one can be printed, repeated and made smaller."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .call_strategies import ALWAYS, ASSISTANTS, ASSISTED, BEAMS, DRAFTS, DRAWS, GIVEN, PADDINGS, Source, chosen

MOST_NEW = 12
KINDS = ("plain", "beams", "looked up", "assisted")
SHARES, REPEATING_SHARES = (0.74, 0.1, 0.1, 0.06), (0.3, 0.1, 0.4, 0.2)
"""How many calls are of each kind, and how many of those whose texts repeat themselves, as drafts need."""


@dataclass(frozen=True)
class Prompt:
    """Rows of random tokens; where it `repeats`, the second half of each row is its first."""

    seed: int
    rows: int
    length: int
    padding: str = "no mask"
    repeats: bool = False


@dataclass(frozen=True)
class DrawnCall:
    """A prompt, fields of `GenerationConfig` by name, and kinds of what `generate()` is given beside them."""

    prompt: Prompt
    settings: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.prompt}, {dict(self.settings)}, {dict(self.given)}"

    @property
    def seed(self) -> int:
        """What torch's generator is seeded with."""
        return self.prompt.seed

    @property
    def rows(self) -> int:
        """How many texts are generated at once, beams aside."""
        return self.prompt.rows * int(self.settings.get("num_return_sequences", 1))

    def without(self, *names: str) -> DrawnCall:
        """The call without some of its names."""
        settings, given = (
            {name: value for name, value in part.items() if name not in names} for part in (self.settings, self.given)
        )
        return replace(self, settings=settings, given=given)

    def smaller(self) -> Iterator[DrawnCall]:
        """Yield calls that ask for less: without one name, then with less of a prompt, then with smaller values."""
        yield from (self.without(name) for name in (*self.given, *self.settings))
        for changed in _less_of(self.prompt):
            yield replace(self, prompt=changed)
        for name, value in self.settings.items():
            for less in _less(value):
                yield replace(self, settings={**self.settings, name: less})


def _less_of(prompt: Prompt) -> Iterator[Prompt]:
    if prompt.repeats:
        yield replace(prompt, repeats=False)
    if prompt.padding != "no mask":
        yield replace(prompt, padding="no mask")
    if prompt.rows > 1:
        yield replace(prompt, rows=prompt.rows - 1)
    if prompt.length > 1:
        yield replace(prompt, length=prompt.length - 1)


def _less(value: Any) -> Iterator[Any]:
    if isinstance(value, list) and len(value) > 1:
        yield from ([*value[:number], *value[number + 1 :]] for number in range(len(value)))
    elif isinstance(value, int) and not isinstance(value, bool) and value > 1:
        yield value - 1


def drawn_prompt(name: str) -> tuple[Prompt, dict[str, str]]:
    """The prompt of the call of that name, and of which kind the models are."""
    numbers = random.Random(f"prompt {name}")
    rows, length = numbers.choice((1, 1, 2, 3, 4)), numbers.choice((1, 2, 4, 7, 9, 9, 13))
    padding = numbers.choice(PADDINGS if rows > 1 else PADDINGS[:2] * 3 + PADDINGS)
    world = {"vocabulary": "large"} if numbers.random() < 0.08 else {}
    world = {"weights": "repeating"} if not world and numbers.random() < 0.2 else world
    return Prompt(numbers.randrange(1 << 16), rows, length, padding, numbers.random() < 0.25), world


def drawn_call(prompt: Prompt, world: Mapping[str, str], source: Source) -> DrawnCall:
    """A call behind a prompt; mostly one that transformers accepts."""
    source.sparse = source.chance(0.6)
    kind = source.random.choices(KINDS, REPEATING_SHARES if "weights" in world else SHARES)[0]
    settings: dict[str, Any] = {"max_new_tokens": source.one(1, 3, 8, *3 * (MOST_NEW,))}
    given = {**world, **chosen(GIVEN, source)}
    draws = source.chance(0.35)
    if draws or source.chance(0.05):
        settings |= {"do_sample": True} if draws else {}
        settings |= chosen(DRAWS, source)
    settings |= chosen(ALWAYS, source)
    if not draws or kind != "plain":
        settings.pop("num_return_sequences", None)
    if kind == "beams":
        _search(settings, given, source)
    elif kind != "plain":
        settings |= chosen(DRAFTS if kind == "looked up" else ASSISTED, source)
        given |= {"assistant_model": source.one(*ASSISTANTS)} if kind == "assisted" else {}
        prompt = replace(prompt, rows=1) if source.chance(0.5) else prompt
        if draws and source.chance(0.8):
            settings["top_k"] = 1  # other draws are not the same
    _repair(settings, given, source)
    return DrawnCall(prompt, settings, _of_one_kind(given, source))


def _search(settings: dict[str, Any], given: dict[str, Any], source: Source) -> None:
    """Search with beams, in most calls with as many as there are texts to return, and without a streamer."""
    settings |= chosen(BEAMS, source)
    if source.chance(0.95):
        given.pop("streamer", None)
        if "num_return_sequences" in settings:
            settings["num_return_sequences"] = min(settings["num_beams"], settings["num_return_sequences"])


def _repair(settings: dict[str, Any], given: dict[str, Any], source: Source) -> None:
    """Leave out, in most calls, what transformers raises for or does not look at."""
    if "eos_token_id" not in settings and source.chance(0.9):
        settings.pop("exponential_decay_length_penalty", None)
    if "max_length" in settings and source.chance(0.8):
        settings.pop("max_new_tokens")
    if "guidance_scale" in settings and source.chance(0.5):
        given["negative_prompt_ids"] = "tokens"
    if given.get("as") == "nothing":
        settings.setdefault("bos_token_id", source.token())


def _of_one_kind(given: dict[str, Any], source: Source) -> dict[str, Any]:
    """Leave out what does not go with the model."""
    names = ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs")
    left_out = {"position_ids"} if source.encodes else {*names}
    return {name: value for name, value in given.items() if name not in left_out}
