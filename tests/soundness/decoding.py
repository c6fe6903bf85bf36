"""Reads a prompt and decodes tokens one by one: a rewritten model by its steps, an original as it stands."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from rewrite.verify.generation.poison import always_steps

PROMPT = 2


def decode(module: ModuleType, model: Any, embeds: torch.Tensor, positions: torch.Tensor, rewritten: bool) -> Any:
    """Return what the model gives for a prompt, then for one token a row at a time; for all at once in training.

    Slots that nothing has written hold NaN: a step that reads them shows it. Where a layer may go without its step,
    and weighs them by a mask's zero, they hold large numbers.
    """
    if model.training:
        return model(embeds, positions)
    runtime = importlib.import_module(f"{module.__package__}.runtime.cache")
    cache = runtime.PreallocatedCache(2, embeds.shape[0], embeds.shape[1] + 2, "cpu")
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
