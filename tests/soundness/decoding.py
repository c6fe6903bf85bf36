"""Reads a prompt and decodes tokens one by one: a rewritten model by its steps, an original as it stands.

Or has a model generate texts: a rewritten one by its loop, where a step is run once and told again (`told_again`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from told_again import replays

from rewrite.measure.runtime_part import runtime_part
from rewrite.verify.generation.poison import always_steps

PROMPT = 2


def decode(module: ModuleType, model: Any, embeds: torch.Tensor, positions: torch.Tensor, rewritten: bool) -> Any:
    """Return what the model gives for a prompt, then for one token a row at a time; for all at once in training.

    Slots that nothing has written hold NaN: a step that reads them shows it. Where a layer may go without its step,
    and weighs them by a mask's zero, they hold large numbers.
    """
    if model.training:
        return model(embeds, positions)
    preallocated = runtime_part(str(module.__package__), "cache/preallocated")
    cache = preallocated.PreallocatedCache(2, embeds.shape[0], embeds.shape[1] + 2, "cpu")
    layer_class = type(model.model.layers[0])
    stepping = rewritten and hasattr(layer_class, "decode")
    unwritten = float("nan") if stepping and always_steps(layer_class) else 1e4
    results = [model(embeds[:, :PROMPT], positions[:, :PROMPT], past_key_values=cache)]
    for layer in cache.attention_layers:
        if layer.keys is not None and layer.values is not None:
            layer.keys[:, :, PROMPT:] = unwritten
            layer.values[:, :, PROMPT:] = unwritten
    for number in range(PROMPT, embeds.shape[1]):
        token = slice(number, number + 1)
        if stepping:
            cache.position.fill_(number)
            with cache.step():
                results.append(model(embeds[:, token], positions[:, token], past_key_values=cache))
            cache.grow(1)
        else:
            results.append(model(embeds[:, token], positions[:, token], past_key_values=cache))
    return results


class NotTaken(RuntimeError):
    """The loop did not run where it should."""


def talk(
    module: ModuleType,
    model: Any,
    ids: torch.Tensor,
    rewritten: bool,
    reasons: Sequence[str] = (),
    any_reason: bool = False,
) -> Any:
    """Return tokens and logits of two texts that a model writes, one after the other; its logits alone in training.

    Raises:
        NotTaken: if the rewritten model's loop refuses for another reason than one of these, or for none.
    """
    if model.training:
        return model(ids).logits
    if not rewritten:
        return _texts(model, ids)
    backend = runtime_part(str(module.__package__), "core/backend")
    loop = runtime_part(str(module.__package__), "generate/generation").GraphGeneration
    program = runtime_part(str(module.__package__), "decode/step_graph").Program
    backend.reset_fallbacks()
    with patch.object(loop, "_step_without_graph", True), patch.object(program, "replay", replays):
        found = _texts(model, ids)
    refused = {reason for operator, reason in backend.fallbacks() if operator == "generate"}
    if isinstance(model, loop) and refused != {*reasons} and not any_reason:
        raise NotTaken(f"{refused or 'nothing'} instead of {reasons or 'nothing'}")
    return found


def _texts(model: Any, ids: torch.Tensor) -> list[Any]:
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    outputs = [model.generate(prompt, **settings) for prompt in (ids, ids[:, 1:])]
    return [(output.sequences, output.logits) for output in outputs]
