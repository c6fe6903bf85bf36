"""What a drawn call may ask for: a strategy for each field of `GenerationConfig` and each argument of `generate`.

Each name has a strategy, or a reason why it is not drawn; a name of a later transformers that has neither is reported
(`unknown`).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PADDINGS = ("no mask", "ones", "left", "left", "right", "holes")
"""What `attention_mask` says of a prompt: nothing, every column, or other columns of each row."""
SPARSE, COMMON = 0.25, 0.3
"""What is left of the share of a name in a sparse call, unless it is as common as that."""
EARLY = 8
"""Tokens of what is said from which values are drawn."""


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
    sparse: bool = False
    """Whether little is asked for at once: one option may hide what another does."""

    def chance(self, share: float) -> bool:
        """Return True in that share of all cases."""
        return self.random.random() < share

    def one(self, *values: Any) -> Any:
        """Return one of some values."""
        return self.random.choice(values)

    def token(self) -> int:
        """Return a token, in most cases one that will be said."""
        return self.tokens(1)[0]

    def tokens(self, count: int, across: bool = False) -> list[int]:
        """Return tokens that follow each other in what is said, from the prompt's last on (`across`) or later."""
        row = self.random.randrange(len(self.heard))
        said = [*self.asked[row][-1:], *self.heard[row][:EARLY]]
        if self.chance(0.1) or len(said) <= count:
            return [self.random.randrange(4, self.vocab) for _ in range(count)]
        start = 0 if across else self.random.randrange(len(said) - count + 1)
        return said[start : start + count]

    def several(self, most: int) -> list[int]:
        """Return different tokens, one at least."""
        return sorted({self.token() for _ in range(self.random.randint(1, most))})

    def text(self) -> str:
        """Return a string of what is said, which may begin inside of a token, and in the prompt."""
        across = self.chance(0.4)
        text = self.text_of(self.tokens(self.one(2, 3, 4) if across else self.one(1, 2), across))
        return text[self.random.randrange(3) : len(text) - self.random.randrange(2)]


Strategy = Callable[[Source], Any]
Strategies = Mapping[str, tuple[float, Strategy]]


def _integer(low: int, high: int) -> Strategy:
    return lambda source: source.random.randint(low, high)


def _of(*values: Any) -> Strategy:
    return lambda source: source.one(*values)


def _words(source: Source) -> list[list[int]]:
    return [source.tokens(source.random.randint(1, 3)) for _ in range(source.random.randint(1, 3))]


def _bias(source: Source) -> dict[tuple[int, ...], float]:
    lengths = (1, 2) if source.chance(0.4) else (1,)
    return {tuple(source.tokens(source.one(*lengths))): source.one(-9.0, -1.5, 2.5, 40.0) for _ in range(2)}


ALWAYS: Strategies = {
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
DRAWS: Strategies = {
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
BEAMS: Strategies = {
    "num_beams": (1.0, _integer(2, 4)),
    "num_return_sequences": (0.4, _integer(1, 3)),
    "early_stopping": (0.5, _of(True, False, "never")),
    "length_penalty": (0.5, _of(0.0, 2.0, -1.0)),
}
DRAFTS: Strategies = {
    "prompt_lookup_num_tokens": (1.0, _integer(1, 10)),
    "max_matching_ngram_size": (0.4, _integer(1, 4)),
}
ASSISTED: Strategies = {
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
ASSISTANTS = ("alike", "same", "other")
"""Which model drafts: another one of the package, the model itself, one of the original's class."""
GIVEN: Strategies = {
    "logits_processor": (0.1, _of("adds", "in place", "counts", "new tokens", "raises")),
    "stopping_criteria": (0.1, _of("at a token", "at a length", "never", "at a token", "raises")),
    "prefix_allowed_tokens_fn": (0.04, _of("even", "by row")),
    "streamer": (0.15, _of("keeps", "keeps", "keeps", "raises")),
    "generation_config": (0.12, _of("object")),
    "as": (0.1, _of("inputs", "inputs_embeds", "int32", "nothing")),
    "mask": (0.08, _of("bool", "int32", "float32")),
    "position_ids": (0.14, _of("counted", "of the mask", "shifted", "far", "by row", "one row")),
    "cache": (0.16, _of("empty", "configured", "returned", "returned", "cropped", "static")),
    "mode": (0.06, _of("training", "inference")),
    "room": (0.3, _of("small")),
    "begins": (0.1, _of("plainly")),
    "decoder_input_ids": (0.3, _integer(1, 4)),
    "decoder_attention_mask": (0.1, _of("ones", "left")),
    "encoder_outputs": (0.06, _of("given")),
}
"""The share of calls that are given something beside fields, and of which kind (`call_arguments.py`)."""


def chosen(strategies: Strategies, source: Source) -> dict[str, Any]:
    """Values of the names that a call sets, each in its share of calls; fewer of them in a `sparse` one."""
    shares = {
        name: share * (SPARSE if source.sparse and share < COMMON else 1) for name, (share, _) in strategies.items()
    }
    return {name: draw(source) for name, (_, draw) in strategies.items() if source.chance(shares[name])}


def unknown() -> list[str]:
    """Fields of the installed `GenerationConfig`, and arguments of its `generate`, of which nothing is known."""
    from transformers import GenerationConfig
    from transformers.generation import GenerationMixin

    known = {*ALWAYS, *DRAWS, *BEAMS, *DRAFTS, *ASSISTED, *GIVEN, *NOT_DRAWN, *OF_PROMPTS}
    known |= {"do_sample", "max_new_tokens", "assistant_model", "negative_prompt_ids"}
    offered = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
    return sorted(offered - known)
