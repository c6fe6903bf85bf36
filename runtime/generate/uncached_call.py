"""Calls without a cache, as some configurations ask for (`use_cache=False`): the loop keeps one that nobody sees.

transformers' loop reads the whole text anew for every token. A model that computes the same behind a cache needs not
to: that is tried once, on the prompt of a call, for as long as the model is what it is.

B rows, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from ..cache import cache_argument
from ..core import backend
from ..core.rounding_noise import Trace, Yardstick
from ..decode.eligibility import Call, with_cache
from ..decode.recurrent_state import restoring
from ..decode.validation import LOGITS

TRIED = 2
"""Tokens that are compared: the first is of the prompt alone."""


def with_hidden_cache(model: Any, call: Call) -> Call:
    """Return a call with a cache where it goes without one, and `call` itself where it has one or none can be made."""
    given = any(call.inputs.get(name) is not None for name in cache_argument.NAMES)
    config = call.config
    other = config.cache_implementation not in (None, "dynamic") or config.is_assistant  # nothing is made in vain
    if config.use_cache or given or other or "use_cache" not in call.model_kwargs:
        return call
    config = copy.copy(call.config)
    config.use_cache = True
    inputs = {**call.model_kwargs, "use_cache": True}
    model._prepare_cache_for_generation(
        config, inputs, None, len(call.input_ids), call.input_ids.shape[1] + call.steps
    )
    inputs = with_cache(model, inputs)
    if all(inputs.get(name) is None for name in cache_argument.NAMES):
        return call
    return replace(call, config=config, model_kwargs=inputs, without=call)


def computes_alike(model: Any, call: Call) -> bool:
    """Return whether a model gives the same logits behind a cache, up to the order of sums.

    Args:
        model: out of its modes.
        call: with a hidden cache, which stays empty.
    """
    assert call.without is not None
    without = call.without
    with backend.plainly():
        wanted = _logits(model, without)
        tokens = wanted[LOGITS].view(TRIED, len(call.input_ids), -1).argmax(-1)
        yardstick = Yardstick(_logits(model, without, tokens), lambda: _logits(model, without, tokens))
        found = _logits(model, call, tokens)
    return yardstick.judge(found).holds


def _logits(model: Any, call: Call, tokens: Tensor | None = None) -> Trace:
    """Return the logits `[TRIED · B, V]` of a call's first tokens by transformers' own loop.

    Args:
        model: that generates.
        call: its arguments; its cache is left as it is.
        tokens: `[TRIED, B]` that are chosen; None for the likeliest.
    """
    config = copy.copy(call.config)
    config.do_sample, config.output_logits, config.return_dict_in_generate = False, True, True
    config.output_scores = config.output_attentions = config.output_hidden_states = False
    start = call.input_ids.shape[1]
    inputs = dict(call.model_kwargs)
    if (cache := call.inputs.get(call.cache_name)) is not None:
        inputs[call.cache_name] = copy.deepcopy(cache)
    with restoring(model, call.inputs, always=True):
        found = GenerationMixin._sample(
            model,
            call.input_ids,
            logits_processor=LogitsProcessorList([] if tokens is None else [_Chosen(tokens, start)]),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(start + TRIED)]),
            generation_config=config,
            **inputs,
        )
    return {LOGITS: torch.cat(found.logits).float()}


class _Chosen(LogitsProcessor):
    """Lets tokens `[n, B]` behind column `start` be chosen."""

    def __init__(self, tokens: Tensor, start: int):
        self._tokens, self._start = tokens, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[B, V]` of which a row's token has the largest."""
        chosen = self._tokens[input_ids.shape[1] - self._start]
        return torch.zeros_like(scores).scatter_(1, chosen[:, None], 1.0)
