"""What a drawn call gives `generate()` of one model: tensors, caches, fields and what is the caller's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_rewrite_runtime.cache.cache_argument import asked_with, given_back

from ..calls.caches import own_cache_class
from ..generation.prompts import is_text
from ..models.configs import Variant
from ..models.inputs import tokens
from ..models.model_inputs import make, vocabulary
from .call_strategies import ASSISTED
from .caller_objects import Seen, objects_of
from .drawn_calls import DrawnCall, Prompt

if TYPE_CHECKING:
    from torch import Tensor

FOLLOW_UP, CROPPED, ROOM = 3, 2, 40
"""Tokens said behind a cache that came back, those it may be cropped by first, and the room of a static one."""
FAR = 300
"""More positions than a first cache of a short text has slots."""
LETTERS = "abcdefg"
STATIC = "abcdef"
"""What `StopStringCriteria` puts in front of each word to learn its text."""


@dataclass(frozen=True)
class Side:
    """A model, and another one that drafts for it."""

    model: Any
    assistant: Any = None


def text_of(row: Sequence[int]) -> str:
    """The text of some tokens: three letters or more each, so that a string may begin and end inside of tokens."""
    return "".join(map(_word, row))


def _word(token: int) -> str:
    letters = "" if token < len(LETTERS) ** 3 else _word(token // len(LETTERS) ** 3)
    return letters + "".join(LETTERS[token // len(LETTERS) ** place % len(LETTERS)] for place in range(3))


@functools.cache
def tokenizer_of(vocab: int) -> Any:
    """A tokenizer of that many words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {text_of([token]): token for token in range(vocab - 1)} | {STATIC: vocab - 1}
    text = Tokenizer(models.WordLevel(words, unk_token=text_of([2])))
    text.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=text, unk_token=text_of([2]), pad_token=text_of([0]))


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
    seen, model, given = Seen(), side.model, call.given
    inputs = {name: _on(model, value) for name, value in _inputs_of(call, variant, model).items()}
    keywords = {"pad_token_id": 0, **copy.deepcopy(dict(call.settings)), **objects_of(call, seen)}
    if "stop_strings" in keywords:
        keywords["tokenizer"] = tokenizer_of(vocabulary(model.config))
    if "assistant_model" in given:
        keywords["assistant_model"] = side.assistant
        for name in ASSISTED.keys() & keywords.keys():
            setattr(side.assistant.generation_config, name, keywords[name])
    positional: tuple[Any, ...] = ()
    if given.get("as") == "inputs":
        positional = (inputs.pop(next(iter(inputs))),)
    if given.get("generation_config") == "object":
        keywords = _in_an_object(call, keywords)
    return Arguments({**inputs, **keywords}, positional, {**inputs, "the first": positional}, seen)


def _inputs_of(call: DrawnCall, variant: Variant, model: Any) -> dict[str, Any]:
    """What goes to the model, apart from how it is said."""
    import torch

    given, inputs = call.given, dict[str, Any](prompt_of(variant, model, call.prompt))
    if "cache" in given:
        inputs |= _with_cache(call, model, inputs)
    if "position_ids" in given:
        inputs["position_ids"] = _positions(given["position_ids"], inputs)
    if "decoder_input_ids" in given:
        rows, length = call.prompt.rows, given["decoder_input_ids"]
        begun = tokens(call.seed + 1, vocabulary(model.config), rows, length, "cpu")
        inputs.setdefault("decoder_input_ids", begun)  # behind a cache it is there
        if "decoder_attention_mask" in given:
            kind = given["decoder_attention_mask"]
            inputs["decoder_attention_mask"] = _begun_mask(kind, inputs["decoder_input_ids"])
    if "encoder_outputs" in given:
        inputs["encoder_outputs"] = _encoded(model, inputs)
    if "negative_prompt_ids" in given:
        inputs["negative_prompt_ids"] = inputs["input_ids"].flip(1)
    if "mask" in given and "attention_mask" in inputs:
        inputs["attention_mask"] = inputs["attention_mask"].to(getattr(torch, given["mask"]))
    return _said_as(given.get("as"), model, inputs)


def _on(model: Any, value: Any) -> Any:
    return value.to(model.device) if hasattr(value, "to") else value


def _said_as(kind: str | None, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Say tokens as numbers of another size, by their embeddings, or not at all."""
    if kind not in ("int32", "nothing", "inputs_embeds") or "input_ids" not in inputs:
        return inputs
    ids = inputs["input_ids"]
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    if kind == "int32":
        return {"input_ids": ids.int(), **rest}
    if kind == "nothing":
        return {name: value for name, value in rest.items() if name != "attention_mask"}
    if model.config.is_encoder_decoder:
        return inputs
    return {**rest, "inputs_embeds": model.get_input_embeddings()(ids.to(model.device)).detach()}


def _in_an_object(call: DrawnCall, keywords: dict[str, Any]) -> dict[str, Any]:
    """The same with the fields in a `GenerationConfig`."""
    from transformers import GenerationConfig

    names = {"pad_token_id", *call.settings}
    config = GenerationConfig(**{name: keywords[name] for name in keywords if name in names})
    rest = {name: value for name, value in keywords.items() if name not in names}
    return {**rest, "generation_config": config}


def _with_cache(call: DrawnCall, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A cache, and the tokens behind what it holds."""
    import torch

    kind, encodes = call.given["cache"], model.config.is_encoder_decoder
    if kind in ("empty", "configured", "static"):
        return {asked_with(model): _new_cache(kind, model)}
    first = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    cache, ids = given_back(first), first.sequences
    if kind == "cropped":
        cache.crop(-CROPPED)
    more = tokens(call.seed + 7, vocabulary(model.config), len(ids), FOLLOW_UP, "cpu")
    made = {asked_with(model): cache, "decoder_input_ids" if encodes else "input_ids": torch.cat([ids, more], 1)}
    if "attention_mask" in inputs and not encodes:
        mask, length = inputs["attention_mask"], ids.shape[1] + FOLLOW_UP
        made["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), length - mask.shape[1])], 1)
    return made


def _new_cache(kind: str, model: Any) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    config = model.config.get_text_config(decoder=True)
    own = own_cache_class(model) or DynamicCache
    made = StaticCache(config, ROOM) if kind == "static" else own(config=config) if kind == "configured" else own()
    return EncoderDecoderCache(made, DynamicCache()) if model.config.is_encoder_decoder else made


def _positions(kind: str, inputs: Mapping[str, Any]) -> Tensor:
    import torch

    ids = inputs["input_ids"]
    rows, length = ids.shape
    counted = torch.arange(length)[None].expand(rows, -1)
    if kind == "of the mask":
        mask = inputs.get("attention_mask", torch.ones_like(ids))
        return (mask.cumsum(1) - 1).clamp(min=0)
    if kind in ("shifted", "far"):
        return counted + (FAR if kind == "far" else 3)
    if kind == "by row":
        return counted + 2 * torch.arange(rows)[:, None]
    return counted[:1].clone() if kind == "one row" else counted.clone()


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
