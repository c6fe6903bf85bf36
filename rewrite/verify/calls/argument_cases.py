"""The calls that give each argument of a `forward` a value away from neutral."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_rewrite_runtime.cache.cache_argument import NAMES, argument_of, given_back, keeps_states_alone

from . import argument_values
from .argument_values import DECODER_IDS, IDS, Arguments, Call, Value


@dataclass(frozen=True)
class Case:
    """A call that gives `gives` beside the plain arguments; `real` outputs alone are compared where it pads.

    `traces`: the call leaves something on the model, which therefore is not shared. `eager`: only eager attention
    knows what is asked for. `length`: of its prompts. `then` yields the calls that
    follow, made from the first call's arguments and result. `fits` tells by the arguments that are
    taken and the configuration whether the case means anything.
    """

    name: str
    gives: tuple[str, ...]
    make: Callable[[Call], Arguments]
    padded: str = ""
    traces: bool = False
    eager: bool = False
    length: int = argument_values.LENGTH
    rows: int = argument_values.ROWS
    then: Callable[[Call, Arguments, Any], Iterator[Arguments]] | None = None
    fits: Callable[[tuple[str, ...], Any], bool] = lambda taken, config: True


LONG = 70
"""More queries than grouped attention folds into one row."""


def _beside(**values: Value) -> Callable[[Call], Arguments]:
    return lambda call: {**call.plain, **{name: value(call) for name, value in values.items()}}


def _always(value: Any) -> Value:
    return lambda call: value


def _mask(heads: bool, boolean: bool = False, rows: int | None = None) -> Value:
    def make(call: Call) -> Any:
        seen = call.seen(call.heads if heads else 1, rows)
        return seen if boolean else argument_values.additive(seen, call.model.dtype)

    return make


def _several_kinds(taken: tuple[str, ...], config: Any) -> bool:
    return len(set(getattr(config, "layer_types", None) or ())) > 1


def _no_text(taken: tuple[str, ...], config: Any) -> bool:
    """Whether the labels are no tokens."""
    return "logits_to_keep" not in taken


def _kinds(call: Call) -> Arguments:
    """A dict of masks, which models with several kinds of layers take."""
    kinds = call.model.config.get_text_config().layer_types
    masks = {kind: call.seen() if "linear" not in kind else None for kind in kinds}
    return {**call.plain, "attention_mask": masks}


def _embeds(ids: str) -> Callable[[Call], Arguments]:
    return lambda call: (
        argument_values.without(call.plain, [ids]) | {argument_values.EMBEDDED[ids]: call.embedded(ids)}
    )


def _padded(side: str) -> Callable[[Call], Arguments]:
    def make(call: Call) -> Arguments:
        arguments: Arguments = {**call.plain, "attention_mask": call.padded(side)}
        if side == "left" and call.setting.subject.accepts("position_ids"):
            arguments["position_ids"] = argument_values.as_batch(call).position_ids
        return arguments

    return make


def _with_labels(name: str, value: Value) -> Callable[[Call], Arguments]:
    return lambda call: {**call.plain, "labels": argument_values.labels(call), name: value(call)}


def _another_ignored(call: Call) -> Arguments:
    """One of the labels is ignored, and no other."""
    found = argument_values.labels(call)
    ignored = int(found[found >= 0][0])
    return {**call.plain, "labels": found.masked_fill(found < 0, ignored), "ignore_index": ignored}


def _regression(call: Call) -> Arguments:
    call.model.config.problem_type = "regression"
    return {**call.plain, "labels": argument_values.several_labels(call)}


def _shifted(call: Call) -> Any:
    return argument_values.labels(call).flip(-1)


def _next_sentence(call: Call) -> Arguments:
    return {
        **call.plain,
        "labels": argument_values.labels(call),
        "next_sentence_label": call.integers(2, call.rows, salt=8),
    }


def _span(call: Call) -> Arguments:
    starts, ends = (call.integers(call.length, call.rows, salt=salt) for salt in (9, 10))
    if call.rows > 1:
        starts[-1], ends[0], ends[-1] = call.length + 2, call.length - 1, 0  # outside, the last token, the first
    return {**call.plain, "start_positions": starts, "end_positions": ends}


def _types(call: Call) -> Any:
    count = getattr(call.model.config, "type_vocab_size", None) or 2
    return call.integers(int(count), call.rows, call.length, salt=12)


def _heard(call: Call) -> Any:
    config = call.model.config
    width = int(getattr(config, "encoder_hidden_size", None) or getattr(config, "hidden_size", 0) or 64)
    return call.random(call.rows, 9, width, salt=13)


def _heard_mask(call: Call) -> Any:
    mask = call.integers(1, call.rows, 9) + 1
    mask[:, 6:] = 0
    return mask


def _encoded(call: Call) -> Arguments:
    """What the encoder made, given back as a tuple; its own input is left out."""
    hidden = call.model.get_encoder()(**argument_values.without(call.plain, [DECODER_IDS]))[0]
    changed = hidden.detach() * 0.7
    return {DECODER_IDS: call.plain[DECODER_IDS], "encoder_outputs": (changed,)}


def _encoded_whole(call: Call) -> Arguments:
    """The same with the encoder's hidden states and attention weights, which come back beside the decoder's own."""
    found = _encoded(call)
    (hidden,) = found["encoder_outputs"]
    length = hidden.shape[-2]
    weights = call.random(call.rows, call.heads, length, length, salt=14)
    return {**found, "encoder_outputs": (hidden, (hidden * 0.5, hidden), (weights,))}


def _indices(call: Call) -> Any:
    import torch

    return torch.tensor([1, 4, 5, call.length - 1], device=call.setting.device)


def _unlabelled(call: Call) -> Arguments:
    """Labels alone: the decoder's prompt is made from them."""
    return argument_values.without(call.plain, [DECODER_IDS]) | {"labels": argument_values.labels(call)}


def _packed(call: Call) -> Arguments:
    beside = {"position_ids": argument_values.restarted(call), "use_cache": False}
    named = {name: value for name, value in beside.items() if call.setting.subject.accepts(name)}
    return {**call.plain, **argument_values.packed(call), **named}


def _new_cache(call: Call) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache

    config = call.model.config.get_text_config(decoder=True)
    if DECODER_IDS in call.plain:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def _given_cache(call: Call) -> Arguments:
    return {**call.plain, argument_of(call.model): _new_cache(call)}


def _again(call: Call, before: Arguments, result: Any) -> Iterator[Arguments]:
    """Two tokens more, one after the other, and three at once, where the model takes several."""
    state, cache = argument_of(call.model), given_back(result)
    ids = DECODER_IDS if DECODER_IDS in before else IDS
    for step, count in enumerate((1, 1) if keeps_states_alone(cache) else (1, 1, 3)):
        new = call.setting.tokens(20 + step, call.rows, count)
        yield {**argument_values.without(before, [ids]), ids: new, state: cache, "use_cache": True}


def _again_embedded(call: Call, before: Arguments, result: Any) -> Iterator[Arguments]:
    for step in range(2):
        width = call.embedded().shape[-1]
        new = call.random(call.rows, 1, width, salt=30 + step) * 2 * width**-0.5
        yield {"inputs_embeds": new, argument_of(call.model): given_back(result), "use_cache": True}


def _again_padded(call: Call, before: Arguments, result: Any) -> Iterator[Arguments]:
    mask = call.padded("left")
    for arguments in _again(call, before, result):
        count = arguments[DECODER_IDS if DECODER_IDS in before else IDS].shape[1]
        if DECODER_IDS not in before:  # there it is the encoder's
            mask = _longer(mask, count)
        own = {"position_ids": (mask.cumsum(1) - 1)[:, -count:]} if "position_ids" in before else {}
        yield {**arguments, **own, "attention_mask": mask}


def _longer(mask: Any, count: int) -> Any:
    import torch

    return torch.cat([mask, mask.new_ones(mask.shape[0], count)], 1)


CACHE = NAMES[1]
"""In `gives`, the cache by whichever name the model takes it."""
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
CASES: tuple[Case, ...] = (
    Case("the plain arguments", (), lambda call: dict(call.plain)),
    Case("right padding", ("attention_mask",), _padded("right"), padded="right"),
    Case("left padding", ("attention_mask",), _padded("left"), padded="left"),
    Case("a mask of booleans", ("attention_mask",), lambda call: {
        **call.plain, "attention_mask": call.padded("right").bool()}, padded="right"),
    Case("4-D mask", ("attention_mask",), _beside(attention_mask=_mask(False))),
    Case("4-D mask of each head", ("attention_mask",), _beside(attention_mask=_mask(True))),
    Case("4-D mask of booleans", ("attention_mask",), _beside(attention_mask=_mask(False, True))),
    Case("4-D mask of one row for all", ("attention_mask",), _beside(attention_mask=_mask(False, rows=1))),
    Case("4-D mask of each head, one row", ("attention_mask",), _beside(attention_mask=_mask(True)), rows=1),
    Case("a mask of each kind of layer", ("attention_mask",), _kinds, fits=_several_kinds),
    Case("left padding, many tokens", ("attention_mask",), _padded("left"), padded="left", length=LONG),
    Case("4-D mask of each head, many tokens", ("attention_mask",), _beside(attention_mask=_mask(True)), length=LONG),
    Case("positions with gaps", ("position_ids",), _beside(
        position_ids=lambda call: argument_values.restarted(call).sort(1).values * 2 + 3)),
    Case("positions that begin again", ("position_ids", "use_cache"), _beside(
        position_ids=argument_values.restarted, use_cache=_always(False))),
    Case("packed sequences", PACKING, _packed),
    Case("inputs_embeds", ("inputs_embeds",), _embeds(IDS)),
    Case("decoder_inputs_embeds", ("decoder_inputs_embeds",), _embeds(DECODER_IDS)),
    Case("token types", ("token_type_ids",), _beside(token_type_ids=_types)),
    Case("decoder's mask, left padding", ("decoder_attention_mask",), _beside(
        decoder_attention_mask=lambda call: call.padded("left")), padded="left"),
    Case("encoder_outputs", ("encoder_outputs",), _encoded),
    Case("encoder_outputs with what it passed through", ("encoder_outputs",), _encoded_whole, traces=True),
    Case("encoder_outputs with its hidden states", ("encoder_outputs",), lambda call: {
        **_encoded(call), "encoder_outputs": _encoded_whole(call)["encoder_outputs"][:2]}, traces=True),
    Case("encoder states", ("encoder_hidden_states",), _beside(encoder_hidden_states=_heard)),
    Case("encoder states with a mask", ("encoder_hidden_states", "encoder_attention_mask"), _beside(
        encoder_hidden_states=_heard, encoder_attention_mask=_heard_mask)),
    Case("encoder states, the cache that came back", ("encoder_hidden_states", "use_cache"), _beside(
        encoder_hidden_states=_heard, use_cache=_always(True)), then=_again),
    Case("without a cache", ("use_cache",), _beside(use_cache=_always(False))),
    Case("with a cache", ("use_cache",), _beside(use_cache=_always(True))),
    Case("a new cache", (CACHE,), _given_cache),
    Case("the cache that came back", (CACHE, "use_cache"), _beside(use_cache=_always(True)), then=_again),
    Case("the cache that came back, embeddings", (CACHE, "use_cache", "inputs_embeds"), lambda call: {
        **_embeds(IDS)(call), "use_cache": True}, then=_again_embedded),
    Case("the cache that came back, left padding", (CACHE, "use_cache", "attention_mask"), lambda call: {
        **_padded("left")(call), "use_cache": True}, padded="left", then=_again_padded, length=LONG),
    Case("the cache that came back by another name", ("cache_params", "use_cache"), _beside(
        use_cache=_always(True)), then=_again),
    Case("not causal", ("is_causal",), _beside(is_causal=_always(False))),
    Case("logits_to_keep, a number", ("logits_to_keep",), _beside(logits_to_keep=_always(3))),
    Case("logits_to_keep, a tensor", ("logits_to_keep",), _beside(logits_to_keep=_indices)),
    Case("labels", ("labels",), _beside(labels=argument_values.labels)),
    Case("labels alone", ("labels", DECODER_IDS), _unlabelled),
    Case("labels, a share of each class", ("labels",), _beside(labels=argument_values.several_labels), fits=_no_text),
    Case("labels to regress to", ("labels",), _regression, fits=_no_text),
    Case("labels, right padding", ("labels", "attention_mask"), _beside(
        labels=argument_values.labels, attention_mask=lambda call: call.padded("right")), padded="right"),
    Case("num_items_in_batch", ("labels", "num_items_in_batch"), _with_labels("num_items_in_batch", _always(7))),
    Case("num_items_in_batch alone", ("num_items_in_batch",), _beside(num_items_in_batch=_always(7))),
    Case("ignore_index", ("labels", "ignore_index"), _another_ignored),
    Case("shift_labels", ("labels", "shift_labels"), _with_labels("shift_labels", _shifted)),
    Case("next sentence", ("labels", "next_sentence_label"), _next_sentence, rows=3),
    Case("start and end", ("start_positions", "end_positions"), _span),
    Case("start and end, one row", ("start_positions", "end_positions"), _span, rows=1),
    Case("start and end, num_items_in_batch", ("start_positions", "end_positions", "num_items_in_batch"),
         lambda call: {**_span(call), "num_items_in_batch": 7}),
    Case("tuple", ("return_dict",), _beside(return_dict=_always(False))),
    Case("hidden states", ("output_hidden_states",), _beside(output_hidden_states=_always(True)), traces=True),
    Case("attention weights", ("output_attentions",), _beside(
        output_attentions=_always(True)), traces=True, eager=True),
    Case("router's logits", ("output_router_logits",), _beside(output_router_logits=_always(True)), traces=True),
    Case("router's logits and loss, padding", ("output_router_logits", "labels", "attention_mask"), _beside(
        output_router_logits=_always(True), labels=argument_values.labels,
        attention_mask=lambda call: call.padded("right")),
        padded="right", traces=True),
    Case("router's loss of many tokens", ("output_router_logits", "labels"), _beside(
        output_router_logits=_always(True), labels=argument_values.labels), rows=150),
)  # fmt: skip


def cases_for(taken: tuple[str, ...], config: Any = None) -> Iterator[Case]:
    """The cases for a model that takes these arguments, and one that turns on every other switch."""
    known = {name for case in CASES for name in case.gives} | {*NAMES}
    for case in CASES:
        if CACHE in case.gives and CACHE not in taken:
            case = replace(case, gives=tuple(NAMES[0] if name == CACHE else name for name in case.gives))
        if set(case.gives) <= set(taken) and case.fits(taken, config):
            yield case
    for name in taken:
        if name not in known and re.match(r"(use|output|return|is|do)_", name):
            yield Case(name, (name,), _beside(**{name: _always(True)}), traces=True)
