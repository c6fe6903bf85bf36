"""What a drawn call gives `generate()` of one model: tensors, caches, and objects that write down what they are given."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import asked_with, given_back

from ..calls.caches import own_cache_class
from ..models.configs import Variant
from ..models.inputs import tokens
from ..models.model_inputs import make, vocabulary
from .drawn_calls import DrawnCall, Prompt
from .prompts import is_text

if TYPE_CHECKING:
    from torch import Tensor

FOLLOW_UP = 3
"""Tokens that are said behind a cache that came back."""
STATIC = "abcdef"
"""What `StopStringCriteria` puts in front of each word to learn its text."""
LATE = 2
"""How many times a caller's object is asked until it raises."""


class Raised(Exception):
    """What a caller's own object raises."""


@dataclass
class Seen:
    """What the caller's objects were given, in order."""

    words: list[Any] = field(default_factory=list)

    def note(self, what: str, *values: Any) -> None:
        """Write something down, tensors as lists."""
        self.words.append((what, *(value.tolist() if hasattr(value, "tolist") else value for value in values)))


@dataclass(frozen=True)
class Side:
    """A model, and another one that drafts for it."""

    model: Any
    assistant: Any = None


def text_of(row: Sequence[int]) -> str:
    """The text of some tokens: three letters each, so that a string may begin and end inside of tokens."""
    return "".join(_word(token) for token in row)


def _word(token: int) -> str:
    return "".join(chr(ord("a") + token // 7**place % 7) for place in range(3)) + ("z" * (token // 343))


@functools.cache
def tokenizer_of(vocab: int) -> Any:
    """A tokenizer of that many words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {_word(token): token for token in range(vocab - 1)} | {STATIC: vocab - 1}
    text = Tokenizer(models.WordLevel(words, unk_token=_word(2)))
    text.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=text, unk_token=_word(2), pad_token=_word(0))


def prompt_of(variant: Variant, model: Any, prompt: Prompt) -> dict[str, Tensor]:
    """The tensors of a prompt: `input_ids` and a mask `[B, n]`, or what an encoder of something else takes."""
    import torch

    if not is_text(variant.inputs):
        kind = tuple(name for name in variant.inputs if not name.startswith("decoder_"))
        return dict(make(kind, model.config, prompt.rows, prompt.seed, model.dtype))
    ids = tokens(prompt.seed, vocabulary(model.config), prompt.rows, prompt.length, "cpu")
    half = prompt.length // 2
    if prompt.repeats and half:
        ids = torch.cat([ids[:, :half], ids[:, :half], ids[:, 2 * half :]], 1)
    if prompt.padding == "no mask":
        return {"input_ids": ids}
    mask = mask_of(prompt)
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


def mask_of(prompt: Prompt) -> Tensor:
    """A mask `[B, n]`; each row has another number of columns that are none."""
    import torch

    order = torch.arange(prompt.length).expand(prompt.rows, -1)
    last = prompt.length - 1
    pads = torch.tensor([[min(row * 2 + prompt.seed % 2, last)] for row in range(prompt.rows)])
    if prompt.padding == "left":
        return (order >= pads).long()
    if prompt.padding == "right":
        return (order <= last - pads).long()
    if prompt.padding == "holes":
        return ((order + pads) % 3 != 1).long().index_fill_(1, torch.tensor([last]), 1)
    return torch.ones(prompt.rows, prompt.length, dtype=torch.int64)


@dataclass
class Arguments:
    """What one side is asked with, and what its caller's objects saw."""

    keywords: dict[str, Any]
    positional: tuple[Any, ...]
    tensors: dict[str, Any]
    """Those among them that hold tensors."""
    seen: Seen


def arguments_of(call: DrawnCall, variant: Variant, side: Side) -> Arguments:
    """The arguments of a drawn call for one side. A cache that is returned is that of a call before."""
    import torch

    seen, model, given = Seen(), side.model, call.given
    inputs: dict[str, Any] = prompt_of(variant, model, call.prompt)
    keywords = {"pad_token_id": 0, **copy.deepcopy(dict(call.settings))}
    if "prompt_lookup_num_tokens" in keywords or "assistant_model" in given or "stop_strings" in keywords:
        keywords |= {"tokenizer": tokenizer_of(vocabulary(model.config))} if "stop_strings" in keywords else {}
    _say_cache(call, side, inputs)
    if "position_ids" in given:
        inputs["position_ids"] = _positions(given["position_ids"], inputs)
    if "decoder_input_ids" in given:
        inputs["decoder_input_ids"] = _begun(call, model)
        if "decoder_attention_mask" in given:
            inputs["decoder_attention_mask"] = _begun_mask(given["decoder_attention_mask"], inputs["decoder_input_ids"])
    if "encoder_outputs" in given:
        inputs["encoder_outputs"] = _encoded(model, inputs)
    if "negative_prompt_ids" in given:
        inputs["negative_prompt_ids"] = inputs["input_ids"].flip(1)
    keywords |= _objects(call, seen)
    if "assistant_model" in given:
        keywords["assistant_model"] = side.assistant
        for name in [name for name in keywords if "assistant" in name and name != "assistant_model"]:
            setattr(side.assistant.generation_config, name, keywords[name])
    if "mask" in given and "attention_mask" in inputs:
        inputs["attention_mask"] = inputs["attention_mask"].to(getattr(torch, given["mask"]))
    positional: tuple[Any, ...] = ()
    if given.get("as") in ("int32", "nothing") and "input_ids" in inputs:
        ids = inputs.pop("input_ids")
        inputs = {"input_ids": ids.int(), **inputs} if given["as"] == "int32" else inputs
    elif given.get("as") == "inputs":
        positional = (inputs.pop(next(iter(inputs))),)
    elif given.get("as") == "inputs_embeds" and "input_ids" in inputs and not model.config.is_encoder_decoder:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    if given.get("generation_config") == "object":
        keywords = _in_an_object(call, keywords)
    return Arguments({**inputs, **keywords}, positional, {**inputs, "the first": positional}, seen)


def _in_an_object(call: DrawnCall, keywords: dict[str, Any]) -> dict[str, Any]:
    """The same with the fields in a `GenerationConfig`."""
    from transformers import GenerationConfig

    names = {"pad_token_id", *call.settings}
    config = GenerationConfig(**{name: keywords[name] for name in keywords if name in names})
    rest = {name: value for name, value in keywords.items() if name not in names}
    return {**rest, "generation_config": config}


def _say_cache(call: DrawnCall, side: Side, inputs: dict[str, Any]) -> None:
    """Put a cache among the inputs, and behind what it holds some tokens more."""
    import torch
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    kind, model = call.given.get("cache"), side.model
    if kind is None:
        return
    config = model.config.get_text_config(decoder=True)
    own = own_cache_class(model) or DynamicCache
    if kind in ("empty", "configured", "static"):
        made = StaticCache(config, 40) if kind == "static" else own(config=config) if kind == "configured" else own()
        both = model.config.is_encoder_decoder
        inputs[asked_with(model)] = EncoderDecoderCache(made, DynamicCache()) if both else made
        return
    with torch.no_grad():
        first = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, pad_token_id=0
        )
    cache, ids = given_back(first), first.sequences
    if kind == "cropped" and cache is not None and hasattr(cache, "crop"):
        cache.crop(-2)
    inputs[asked_with(model)] = cache
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    more = tokens(call.prompt.seed + 7, vocabulary(model.config), len(ids), FOLLOW_UP, "cpu")
    inputs[name] = torch.cat([ids, more], 1)
    if "attention_mask" in inputs and not model.config.is_encoder_decoder:
        mask = inputs["attention_mask"]
        inputs["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), inputs[name].shape[1] - mask.shape[1])], 1)


def _positions(kind: str, inputs: Mapping[str, Any]) -> Tensor:
    import torch

    ids = inputs["input_ids"]
    rows, length = ids.shape
    counted = torch.arange(length)[None].expand(rows, -1)
    if kind == "of the mask":
        mask = inputs.get("attention_mask", torch.ones_like(ids))
        return (mask.cumsum(1) - 1).clamp(min=0)
    if kind == "shifted":
        return counted + 3
    if kind == "by row":
        return counted + 2 * torch.arange(rows)[:, None]
    return counted[:1].clone() if kind == "one row" else counted.clone()


def _begun(call: DrawnCall, model: Any) -> Tensor:
    return tokens(call.prompt.seed + 1, vocabulary(model.config), call.prompt.rows, call.given["decoder_input_ids"], "cpu")


def _begun_mask(kind: str, ids: Tensor) -> Tensor:
    import torch

    mask = torch.ones_like(ids)
    if kind == "left" and ids.shape[1] > 1:
        mask[0, 0] = 0
    return mask


def _encoded(model: Any, inputs: Mapping[str, Any]) -> Any:
    import torch

    named = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    with torch.no_grad():
        return model.get_encoder()(**{k: v for k, v in named.items() if k not in ("cache", "past_key_values")})


def _objects(call: DrawnCall, seen: Seen) -> dict[str, Any]:
    """The caller's own processors, criteria, streamers and functions."""
    made: dict[str, Any] = {}
    kind = call.given.get("logits_processor")
    if kind is not None:
        made["logits_processor"] = [functools.partial(PROCESSORS[kind], seen)]
    kind = call.given.get("stopping_criteria")
    if kind is not None:
        made["stopping_criteria"] = [functools.partial(CRITERIA[kind], seen)]
    kind = call.given.get("prefix_allowed_tokens_fn")
    if kind is not None:
        made["prefix_allowed_tokens_fn"] = functools.partial(ALLOWED[kind], seen)
    if "streamer" in call.given:
        made["streamer"] = Streamer(seen, call.given["streamer"] == "raises")
    return made


class Streamer:
    """Writes down what it is given, and may raise at the third time."""

    def __init__(self, seen: Seen, raises: bool) -> None:
        self._seen, self._raises, self._times = seen, raises, 0

    def put(self, value: Tensor) -> None:
        """Take tokens."""
        self._seen.note("put", value)
        self._times += 1
        if self._raises and self._times > LATE:
            raise Raised("of a streamer")

    def end(self) -> None:
        """Take note of the end."""
        self._seen.note("end")


def _adds(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    """Prefer every third token, counted from the last one."""
    import torch

    seen.note("processor", ids, tuple(scores.shape), str(scores.dtype))
    order = torch.arange(scores.shape[1])[None] - ids[:, -1:]
    return scores + 2.0 * (order % 3 == 0)


def _in_place(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    """Make the last token of each row unlikely, in the tensor that was given."""
    seen.note("processor", ids, tuple(scores.shape))
    return scores.scatter_add_(1, ids[:, -1:], scores.new_full((len(ids), 1), -5.0))


def _counts(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    seen.note("processor", tuple(ids.shape), scores.argmax(1))
    return scores


def _raises(seen: Seen, ids: Tensor, scores: Tensor) -> Tensor:
    seen.note("processor", ids)
    if len([word for word in seen.words if word[0] == "processor"]) > LATE:
        raise Raised("of a processor")
    return scores


PROCESSORS: Mapping[str, Callable[..., Tensor]] = {
    "adds": _adds, "in place": _in_place, "counts": _counts, "raises": _raises,
}  # fmt: skip


def _at_a_token(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    seen.note("criterion", ids, None if scores is None else len(scores))
    return ids[:, -1] % 4 == 1


def _at_a_length(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    import torch

    seen.note("criterion", ids)
    return torch.full((len(ids),), ids.shape[1] > 9)


def _never(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    seen.note("criterion", ids)
    return ids[:, 0] < 0


def _raises_late(seen: Seen, ids: Tensor, scores: Any, **_: Any) -> Tensor:
    seen.note("criterion", ids)
    if len([word for word in seen.words if word[0] == "criterion"]) > LATE:
        raise Raised("of a criterion")
    return ids[:, 0] < 0


CRITERIA: Mapping[str, Callable[..., Tensor]] = {
    "at a token": _at_a_token, "at a length": _at_a_length, "never": _never, "raises": _raises_late,
}  # fmt: skip


def _even(seen: Seen, row: int, ids: Tensor) -> list[int]:
    seen.note("allowed", row, ids)
    return list(range(4, 60, 2))


def _by_row(seen: Seen, row: int, ids: Tensor) -> list[int]:
    seen.note("allowed", row, ids)
    return list(range(4 + row, 60, 3))


ALLOWED: Mapping[str, Callable[..., list[int]]] = {"even": _even, "by row": _by_row}
