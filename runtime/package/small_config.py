"""The smallest configuration of a model that still has what the large one has: grouped heads, a window, experts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from .small_fields import PROFILES, small_fields

MOST_PARAMETERS = 20_000_000


class NoSmallModel(RuntimeError):
    """None of the small configurations makes a model that runs."""

    def __init__(self, model: str, why: str):
        super().__init__(f"no small {model} could be made ({why}): give a checkpoint, selftest('FOLDER')")


def small_config(model_class: type[PreTrainedModel]) -> Any:
    """Return a small configuration with which `model_class` can be built and run.

    Raises:
        NoSmallModel: if there is none.
    """
    why = "it has no configuration class"
    for config in _candidates(model_class):
        if isinstance(config, str):
            why = config
        elif (problem := _problem(model_class, config)) is None:
            return config
        else:
            why = problem
    raise NoSmallModel(model_class.__name__, why)


def _candidates(model_class: type[PreTrainedModel]) -> Iterator[Any]:
    """Yield configurations, and in words why one could not be made."""
    config_class: Any = model_class.config_class
    if config_class is None:
        return
    whole = config_class()
    fields = small_fields(whole.to_dict())
    for name in getattr(config_class, "sub_configs", {}):
        if (part := getattr(whole, name, None)) is not None:
            fields[name] = type(part)(**small_fields(part.to_dict()))
    for profile in PROFILES:
        changed = {name: value for name, value in profile.items() if name in fields or name == "rotary_dim"}
        if changed or not profile:
            try:
                yield config_class(**{**fields, **changed})
            except Exception as error:  # configurations raise what they like; the next one is tried
                yield f"{type(error).__name__}: {error}"


def _problem(model_class: type[PreTrainedModel], config: Any) -> str | None:
    try:
        with torch.device("meta"):
            skeleton = model_class._from_config(copy.deepcopy(config))
        parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        if parameters > MOST_PARAMETERS:
            return f"it still has {parameters:,} parameters"
        with torch.no_grad():
            model_class._from_config(copy.deepcopy(config)).eval()(torch.arange(3, 9)[None])
    except Exception as error:  # models raise what they like on sizes that they do not support
        return f"{type(error).__name__}: {error}"
    return None
