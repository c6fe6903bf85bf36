"""Calls of `generate()` drawn by seed from what `GenerationConfig` and the signature of `generate` offer.

A call is plain values by name, so that it can be printed, repeated and made smaller by leaving names out. Each name has
a strategy, or a reason why it is not drawn; a name of a later transformers that has neither is reported (`unknown`).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

PADDINGS = ("no mask", "ones", "left", "right", "holes")
"""What `attention_mask` says of a prompt: nothing, every column, or of each row other columns."""
MOST_NEW = 12


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


@dataclass
class Source:
    """Where values are drawn from.

    `asked` and `heard` are the rows of a prompt and of what the original says behind it by itself: an end token, a
    word to ban or a string to stop at matters where it is among these.
    """

    random: random.Random
    vocab: int
    asked: Sequence[Sequence[int]]
    heard: Sequence[Sequence[int]]
    text_of: Callable[[Sequence[int]], str]
    encodes: bool = False

    def chance(self, share: float) -> bool:
        """Return True in that share of all cases."""
        return self.random.random() < share

    def one(self, *values: Any) -> Any:
        """Return one of some values."""
        return self.random.choice(values)

    def token(self) -> int:
        """Return a token, in most cases one that will be said."""
        return self.tokens(1)[0]

    def tokens(self, count: int) -> list[int]:
        """Return tokens that follow each other in what is said, or behind the end of the prompt; or any."""
        row = self.random.randrange(len(self.heard))
        said = [*self.asked[row][-2:], *self.heard[row]] if self.chance(0.3) else list(self.heard[row])
        if self.chance(0.15) or len(said) < count:
            return [self.random.randrange(4, self.vocab) for _ in range(count)]
        start = self.random.randrange(len(said) - count + 1)
        return said[start : start + count]

    def several(self, most: int) -> list[int]:
        """Return different tokens, one at least."""
        return sorted({self.token() for _ in range(self.random.randint(1, most))})

    def text(self) -> str:
        """Return a string of what is said, which may begin inside of a token, and in the prompt."""
        text = self.text_of(self.tokens(self.random.randint(1, 3)))
        begin = self.random.randrange(min(3, len(text)))
        return text[begin : len(text) - self.random.randrange(2)] or text


Strategy = Callable[[Source], Any]



def _integer(low: int, high: int) -> Strategy:
    return lambda source: source.random.randint(low, high)


def _of(*values: Any) -> Strategy:
    return lambda source: source.one(*values)


def _words(source: Source) -> list[list[int]]:
    return [source.tokens(source.random.randint(1, 3)) for _ in range(source.random.randint(1, 3))]


def _bias(source: Source) -> dict[tuple[int, ...], float]:
    lengths = (1, 2) if source.chance(0.4) else (1,)
    return {tuple(source.tokens(source.one(*lengths))): source.one(-9.0, -1.5, 2.5, 40.0) for _ in range(2)}


ALWAYS: Mapping[str, tuple[float, Strategy]] = {
    "eos_token_id": (0.4, lambda source: source.token() if source.chance(0.6) else source.several(3)),
    "pad_token_id": (0.9, lambda source: 0 if source.chance(0.7) else source.token()),
    "bos_token_id": (0.1, Source.token),
    "decoder_start_token_id": (0.1, Source.token),
    "min_new_tokens": (0.12, _integer(0, 9)),
    "min_length": (0.08, _integer(0, 22)),
    "max_length": (0.05, _integer(4, 26)),
    "stop_strings": (0.1, lambda source: source.text() if source.chance(0.5) else [source.text(), source.text()]),
    "return_dict_in_generate": (0.65, _of(True, True, True, False)),
    "output_scores": (0.35, _of(True, True, False)),
    "output_logits": (0.35, _of(True, True, False)),
    "output_attentions": (0.03, _of(True)),
    "output_hidden_states": (0.04, _of(True)),
    "use_cache": (0.05, _of(False, True)),
    "cache_implementation": (0.04, _of("dynamic", "static", "offloaded")),
    "max_cache_len": (0.01, _integer(8, 40)),
    "repetition_penalty": (0.15, _of(1.0, 1.3, 3.0, 0.7)),
    "encoder_repetition_penalty": (0.06, _of(1.5, 0.6)),
    "no_repeat_ngram_size": (0.14, _integer(1, 3)),
    "encoder_no_repeat_ngram_size": (0.06, _integer(1, 2)),
    "bad_words_ids": (0.14, _words),
    "sequence_bias": (0.1, _bias),
    "renormalize_logits": (0.08, _of(True)),
    "remove_invalid_values": (0.08, _of(True)),
    "forced_bos_token_id": (0.05, Source.token),
    "forced_eos_token_id": (0.08, lambda source: source.one(source.token(), source.several(2))),
    "exponential_decay_length_penalty": (0.06, lambda source: (source.random.randint(0, 5), source.one(1.1, 2.0))),
    "suppress_tokens": (0.08, lambda source: source.several(4)),
    "begin_suppress_tokens": (0.08, lambda source: source.several(4)),
    "guidance_scale": (0.04, _of(1.5, 0.5)),
    "watermarking_config": (0.03, lambda source: {"greenlist_ratio": 0.5, "bias": 2.0, "context_width": 1}),
    "num_return_sequences": (0.06, _integer(1, 3)),
    "disable_compile": (0.1, _of(True, False)),
    "prefill_chunk_size": (0.03, _integer(2, 5)),
    "low_memory": (0.01, _of(True)),
    "token_healing": (0.01, _of(True)),
}
"""The share of calls that set a field, and to what, whatever else is asked for."""
DRAWS: Mapping[str, tuple[float, Strategy]] = {
    "temperature": (0.5, _of(0.2, 0.8, 1.0, 2.5)),
    "top_k": (0.5, _of(0, 1, 3, 20, 500)),
    "top_p": (0.4, _of(0.3, 0.9, 1.0)),
    "min_p": (0.2, _of(0.02, 0.3)),
    "top_h": (0.05, _of(0.4)),
    "typical_p": (0.15, _of(0.4, 0.9)),
    "epsilon_cutoff": (0.1, _of(3e-4, 2e-2)),
    "eta_cutoff": (0.1, _of(3e-4, 2e-2)),
}
"""The same of calls that draw tokens; one in twenty others sets one of them as well."""
BEAMS: Mapping[str, tuple[float, Strategy]] = {
    "num_beams": (1.0, _integer(2, 4)),
    "num_return_sequences": (0.4, _integer(1, 3)),
    "early_stopping": (0.5, _of(True, False, "never")),
    "length_penalty": (0.5, _of(0.0, 2.0, -1.0)),
}
DRAFTS: Mapping[str, tuple[float, Strategy]] = {
    "prompt_lookup_num_tokens": (1.0, _integer(1, 10)),
    "max_matching_ngram_size": (0.4, _integer(1, 4)),
}
ASSISTED: Mapping[str, tuple[float, Strategy]] = {
    "num_assistant_tokens": (0.6, _integer(1, 6)),
    "num_assistant_tokens_schedule": (0.5, _of("constant", "heuristic", "heuristic_transient")),
    "assistant_confidence_threshold": (0.5, _of(0.0, 0.4)),
}
NOT_DRAWN: Mapping[str, str] = {
    "max_time": "ends a text by a clock",
    "is_assistant": "transformers sets it",
    "compile_config": "compiles the original",
    "cache_config": "of caches that are quantised by other libraries",
    "continuous_batching_config": "of `generate_batch`",
    "use_mtp": "of models with draft heads",
    "assistant_early_exit": "of models that are trained to leave their layers early",
    "assistant_lookbehind": "of an assistant with another tokenizer",
    "target_lookbehind": "of an assistant with another tokenizer",
    "assistant_ensemble_weight": "of an assistant with another tokenizer",
    "speculation_type": "of an assistant with another tokenizer",
    "penalty_alpha": "transformers leaves it to code from the hub",
    "dola_layers": "transformers leaves it to code from the hub",
    "diversity_penalty": "transformers leaves it to code from the hub",
    "num_beam_groups": "transformers leaves it to code from the hub",
    "constraints": "transformers leaves it to code from the hub",
    "force_words_ids": "transformers leaves it to code from the hub",
    "transformers_version": "says nothing to the loop",
    "_from_model_config": "says nothing to the loop",
    "synced_gpus": "of several processes",
    "custom_generate": "replaces the loop",
}
"""Why a field or an argument is left alone."""
OF_PROMPTS = frozenset({"self", "inputs", "kwargs", "negative_prompt_attention_mask"})
"""Arguments that follow from a prompt."""
GIVEN: Mapping[str, tuple[float, Strategy]] = {
    "logits_processor": (0.1, _of("adds", "in place", "counts", "counts", "raises")),
    "stopping_criteria": (0.1, _of("at a token", "at a length", "never", "at a token", "raises")),
    "prefix_allowed_tokens_fn": (0.04, _of("even", "by row")),
    "streamer": (0.15, _of("keeps", "keeps", "keeps", "raises")),
    "generation_config": (0.12, _of("object")),
    "negative_prompt_ids": (0.0, _of("tokens")),
    "assistant_model": (0.0, _of("alike", "same", "other")),
    "as": (0.1, _of("inputs", "inputs_embeds", "int32", "nothing")),
    "mask": (0.08, _of("bool", "int32", "float32")),
    "position_ids": (0.14, _of("counted", "of the mask", "shifted", "by row", "one row")),
    "cache": (0.16, _of("empty", "configured", "returned", "returned", "cropped", "static")),
    "mode": (0.06, _of("training", "inference")),
    "room": (0.3, _of("small")),
    "begins": (0.1, _of("plainly")),
    "decoder_input_ids": (0.3, _integer(1, 4)),
    "decoder_attention_mask": (0.1, _of("ones", "left")),
    "encoder_outputs": (0.06, _of("given")),
}
"""The share of calls that are given something beside fields, and of which kind (`drawn_inputs.py`)."""


def unknown(model: Any) -> list[str]:
    """Fields of the installed `GenerationConfig`, and arguments of a model's `generate`, of which nothing is known."""
    from transformers import GenerationConfig
    from transformers.generation import GenerationMixin

    known = {*ALWAYS, *DRAWS, *BEAMS, *DRAFTS, *ASSISTED, *GIVEN, *NOT_DRAWN, *OF_PROMPTS}
    known |= {"do_sample", "max_new_tokens"}
    offered = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
    return sorted(offered - known)


def drawn_prompt(name: str) -> tuple[Prompt, dict[str, str]]:
    """The prompt of the call of that name, and of which kind the models are."""
    numbers = random.Random(f"prompt {name}")
    rows, length = numbers.choice((1, 1, 2, 3, 4)), numbers.choice((1, 2, 4, 7, 9, 9, 13))
    padding = numbers.choice(PADDINGS if rows > 1 else PADDINGS[:2] * 3 + PADDINGS)
    world = {"vocabulary": "large"} if numbers.random() < 0.03 else {}
    world = {"weights": "repeating"} if not world and numbers.random() < 0.2 else world
    return Prompt(numbers.randrange(1 << 16), rows, length, padding, numbers.random() < 0.25), world


def drawn_call(prompt: Prompt, world: Mapping[str, str], source: Source) -> DrawnCall:
    """A call behind a prompt; mostly one that transformers accepts. Texts that repeat themselves are often drafted."""
    shares = (0.66, 0.14, 0.12, 0.08) if "weights" not in world else (0.3, 0.1, 0.4, 0.2)
    kind = source.random.choices(("plain", "beams", "lookup", "assisted"), shares)[0]
    settings: dict[str, Any] = {"max_new_tokens": source.one(1, 2, 5, 8, MOST_NEW, MOST_NEW)}
    given = {**world, **_chosen(GIVEN, source)}
    if source.chance(0.35):
        settings |= {"do_sample": True, **_chosen(DRAWS, source)}
    elif source.chance(0.05):
        settings |= _chosen(DRAWS, source)
    settings |= _chosen(ALWAYS, source)
    if not settings.get("do_sample") or kind != "plain":
        settings.pop("num_return_sequences", None)
    if kind == "beams":
        settings |= _chosen(BEAMS, source)
        if source.chance(0.95):
            given.pop("streamer", None)
            beams = settings["num_beams"]
            settings |= {"num_return_sequences": min(beams, settings["num_return_sequences"])} if (
                "num_return_sequences" in settings
            ) else {}
    elif kind == "lookup":
        settings |= _chosen(DRAFTS, source)
    elif kind == "assisted":
        settings |= _chosen(ASSISTED, source)
        given["assistant_model"] = GIVEN["assistant_model"][1](source)
    if kind in ("assisted", "lookup") and source.chance(0.5):
        prompt = replace(prompt, rows=1)
    if kind in ("lookup", "assisted") and settings.get("do_sample") and source.chance(0.8):
        settings["top_k"] = 1  # other draws are not the same
    if "eos_token_id" not in settings and source.chance(0.9):
        settings.pop("exponential_decay_length_penalty", None)  # raises without
    if "max_length" in settings and source.chance(0.8):
        settings.pop("max_new_tokens")
    if settings.get("guidance_scale") and source.chance(0.5):
        given["negative_prompt_ids"] = "tokens"
    return DrawnCall(prompt, settings, _of_one_kind(given, source))


def _of_one_kind(given: dict[str, Any], source: Source) -> dict[str, Any]:
    """Leave out what does not go with the model."""
    names = ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs")
    left_out = {"position_ids"} if source.encodes else {*names}
    return {name: value for name, value in given.items() if name not in left_out}


def _chosen(strategies: Mapping[str, tuple[float, Strategy]], source: Source) -> dict[str, Any]:
    return {name: draw(source) for name, (share, draw) in strategies.items() if source.chance(share)}
