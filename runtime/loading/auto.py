"""Makes transformers' Auto classes and sub-model construction use the classes of a rewritten file."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto


def register(module: ModuleType) -> list[str]:
    """Make every Auto class that would build a model of the original file build the one in `module` instead.

    This changes the Auto classes of the running process, which importing a package never does: call it on purpose.

    Returns:
        The Auto classes that were changed, as `AutoModelForCausalLM → LlamaForCausalLM`.
    """
    changed = []
    models = models_of(module)
    configs = {model.config_class for model in models if model.config_class is not None}
    own = {model.__name__: model for model in models}
    for auto in _auto_classes():
        for config in sorted(configs & set(auto._model_mapping.keys()), key=lambda c: c.__name__):
            original = auto._model_mapping[config]
            if not isinstance(original, tuple) and original.__name__ in own:
                auto.register(config, own[original.__name__], exist_ok=True)
                if auto._model_mapping[config] is original:  # as 5.17, which leaves configurations of its own alone
                    auto._model_mapping._extra_content[config] = own[original.__name__]
                changed.append(f"{auto.__name__} → {original.__name__}")
    return changed


def from_config(auto: Any, /, config: Any, *, module: str, **kwargs: Any) -> PreTrainedModel:
    """Build `auto.from_config(config)`, with the class of `module` where that file has the one the Auto class picks.

    A modeling file that builds a sub-model through an Auto class would otherwise get the original's class.
    """
    mapping = auto._model_mapping
    if type(config) in mapping:
        own = getattr(sys.modules.get(module), getattr(mapping[type(config)], "__name__", ""), None)
        if own is not None and own.__module__ == module:
            return own._from_config(config, **kwargs)
    return auto.from_config(config, **kwargs)


def models_of(module: ModuleType) -> list[Any]:
    """Return the model classes that a modeling file defines."""
    classes = (value for value in vars(module).values() if isinstance(value, type))
    return [kind for kind in classes if issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__]


def _auto_classes() -> list[Any]:
    names = [name for name in modeling_auto.__all__ if name.startswith("AutoModel")]
    return [auto for name in names if getattr(auto := getattr(transformers, name), "_model_mapping", None) is not None]
