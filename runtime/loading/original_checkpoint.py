"""Loading and saving checkpoints exactly as the original class does."""

from __future__ import annotations

import contextvars
import copy
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig


class Adopter:
    """Base of what has kernels for weights as they are published; it looks at every quantised model loaded."""

    @staticmethod
    def adopt(model: nn.Module) -> None:
        """Take over the layers of a loaded model that it computes."""
        raise NotImplementedError


class Loader:
    """Base of layers that are loaded in their published form, where transformers would change it."""

    method: ClassVar[str]
    """Of quantisation, as `config.json` names it."""

    @classmethod
    def wanted(cls, quantization: dict[str, Any]) -> bool:
        """Return whether this machine has a use for that form, as a checkpoint's configuration describes it."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, model: nn.Module, quantization: dict[str, Any], dtype: torch.dtype) -> bool:
        """Give a model without weights the layers of a checkpoint; return whether it has such layers.

        `dtype` is that of the checkpoint's other tensors.
        """
        raise NotImplementedError

    @staticmethod
    def finish(model: nn.Module) -> None:
        """Do what is to be done once the weights are there."""


_LOADERS = dict.fromkeys(("gptq", "awq", "compressed-tensors"), "..integer.integer_checkpoints")
"""Files that have a loader, by its method; each is imported when a checkpoint asks for it."""


_preparing: contextvars.ContextVar[tuple[type, type[Loader], dict[str, Any], torch.dtype] | None]
_preparing = contextvars.ContextVar("preparing", default=None)
_ELSEWHERE = ("quantization_config", "gguf_file", "state_dict", "tp_plan", "tp_size", "device_mesh", "ep_plan")
"""Arguments of `from_pretrained` with which transformers' own way is taken."""
_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")


class OriginalCheckpoint:
    """Base of rewritten `PreTrainedModel` classes.

    transformers converts a checkpoint's layout (stacked experts, renamed keys) only for classes that it takes for its
    own, those whose module lies in `transformers`; a copied class would load other tensors than the original without
    an error. This says that the class is the original's, layout for layout.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: checkpoints are laid out as the original's."""
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as the original class does; quantised layers for which there are kernels get them."""
        load = super().from_pretrained  # type: ignore[misc]
        if (found := _published(cls, pretrained_model_name_or_path, kwargs)) is not None:
            loaded = _load(cls, load, found, pretrained_model_name_or_path, args)
        else:
            loaded = load(pretrained_model_name_or_path, *args, **kwargs)
        _adopt(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def post_init(self) -> None:
        """Do what transformers does once a model is built; layers of a published form are then put in."""
        super().post_init()  # type: ignore[misc]
        preparing = _preparing.get()
        if preparing is not None and type(self) is preparing[0]:
            _, loader, quantization, dtype = preparing
            loader.prepare(self, quantization, dtype)  # type: ignore[arg-type]


def _adopt(model: Any) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        for adopter in Adopter.__subclasses__():
            adopter.adopt(model)


def _load(
    model_class: type,
    load: Callable[..., Any],
    found: tuple[type[Loader], PreTrainedConfig, dict[str, Any]],
    name: Any,
    arguments: tuple[Any, ...],
) -> Any:
    """Load a checkpoint past transformers' way with its quantisation, which layers of `found` have themselves."""
    loader, config, rest = found
    quantization = config.quantization_config
    config = copy.deepcopy(config)
    del config.quantization_config
    dtype = getattr(torch, str(config.dtype).removeprefix("torch.")) if config.dtype else torch.float16
    token = _preparing.set((model_class, loader, quantization, dtype))
    try:
        loaded = load(name, *arguments, config=config, **rest)
    finally:
        _preparing.reset(token)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    loader.finish(model)
    model.config.quantization_config = quantization
    return loaded


def _published(
    model_class: Any, name: Any, kwargs: dict[str, Any]
) -> tuple[type[Loader], PreTrainedConfig, dict[str, Any]] | None:
    """Return who loads a checkpoint in its published form, its configuration, and the other arguments."""
    if (
        not (Loader.__subclasses__() or _asks_for_integers())
        or name is None
        or any(kwargs.get(key) is not None for key in _ELSEWHERE)
    ):
        return None
    config = kwargs.get("config")
    rest = {key: value for key, value in kwargs.items() if key != "config"}
    if not isinstance(config, PreTrainedConfig):
        place = name if config is None else config
        hub = {key: value for key, value in rest.items() if key in _HUB}
        try:
            written, _ = PreTrainedConfig.get_config_dict(place, **hub)
        except OSError:  # an adapter's folder, or none: for transformers to say
            return None
        if _loader_of(written.get("quantization_config")) is None:
            return None
        config, rest = model_class.config_class.from_pretrained(place, return_unused_kwargs=True, **rest)
        rest |= hub
    loader = _loader_of(getattr(config, "quantization_config", None))
    return None if loader is None else (loader, config, rest)


def _loader_of(quantization: Any) -> type[Loader] | None:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method in _LOADERS:
        if not _asks_for_integers():
            return None
        importlib.import_module(_LOADERS[method], __package__)
    known = (kind for kind in _kinds(Loader) if getattr(kind, "method", None) == method)
    return next((kind for kind in known if kind.wanted(quantization)), None)


def _asks_for_integers() -> bool:
    """Return whether `REWRITE_INTEGERS=1` asks for the loaders of `_LOADERS`.

    Their kernels were compared on an H200, but the captured loop of `generate()` has not run with them there since its
    prompts follow what they move.
    """
    return os.environ.get("REWRITE_INTEGERS") == "1"


def _kinds(of: type[Loader]) -> Iterator[type[Loader]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)
