"""Changes of models as wholes: what their methods do, and what users do to them by hand."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from .change import SCALE, Change, called, patched
from .families import Side

_OUTSIDE = ("push", "save", "load", "from_", "compile", "register_", "use_", "kernelize", "warn", "hub", "delete_")


def changes(side: Side) -> Iterator[Change]:
    """Yield every method of a model that can be called without arguments, what users write by hand, and threads."""
    yield Change("thread", "another one", lambda side: patched(side, "thread", True))
    if side.device == "cuda":
        yield Change("stream", "another one", lambda _: torch.cuda.stream(torch.cuda.Stream()))
    for name in sorted(dir(PreTrainedModel)):
        method = inspect.getattr_static(PreTrainedModel, name)
        if name.startswith(("_", *_OUTSIDE)) or not inspect.isfunction(method):
            continue
        needed = [p for p in [*inspect.signature(method).parameters.values()][1:] if p.default is p.empty]
        if all(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in needed):
            yield Change("model, method", f"{name}()", lambda side, n=name: _method(side, n))
    for name, made in _BY_HAND.items():
        yield Change("model, by hand", name, made)


_UNDONE = {"train": "eval", "half": "float", "double": "float", "bfloat16": "float"}
_UNDONE |= {"gradient_checkpointing_enable": "gradient_checkpointing_disable"}
_UNDONE |= {"enable_input_require_grads": "disable_input_require_grads"}


@contextlib.contextmanager
def _method(side: Side, name: str) -> Iterator[None]:
    held = copy.deepcopy(side.model.state_dict())
    torch.manual_seed(5)
    getattr(side.model, name)()
    try:
        yield
    finally:
        if name in _UNDONE:
            getattr(side.model, _UNDONE[name])()
        side.model.load_state_dict(held)


@contextlib.contextmanager
def _other_weights(side: Side, **options: Any) -> Iterator[None]:
    held = copy.deepcopy(side.model.state_dict())
    side.model.load_state_dict({name: value.clone() * SCALE for name, value in held.items()}, **options)
    try:
        yield
    finally:
        side.model.load_state_dict(held, **options)


@contextlib.contextmanager
def _another_model(side: Side, make: Callable[[Any], Any]) -> Iterator[None]:
    before = side.model
    side.model = side.callee = make(before)
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(SCALE)
    try:
        yield
    finally:
        side.model = side.callee = before


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: Any) -> Any:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@contextlib.contextmanager
def _layers(side: Side, other: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    layers = side.layers
    held = list(layers)
    new = other(held)
    del layers[:]
    layers.extend(new)
    try:
        yield
    finally:
        del layers[:]
        layers.extend(held)


@contextlib.contextmanager
def _embeddings(side: Side, which: str) -> Iterator[None]:
    before = getattr(side.model, f"get_{which}_embeddings")()
    other = copy.deepcopy(before)
    with torch.no_grad():
        other.weight.mul_(SCALE).add_(0.05)
    getattr(side.model, f"set_{which}_embeddings")(other)
    try:
        yield
    finally:
        getattr(side.model, f"set_{which}_embeddings")(before)


@contextlib.contextmanager
def _attention(side: Side, name: str) -> Iterator[None]:
    before = side.model.config._attn_implementation
    side.model.set_attn_implementation(name)
    try:
        yield
    finally:
        side.model.set_attn_implementation(before)


def _resized(side: Side) -> Any:
    resize = side.model.resize_token_embeddings
    torch.manual_seed(4)
    return called(lambda: resize(230), lambda: resize(211))


_BY_HAND: dict[str, Callable[[Side], Any]] = {
    "load_state_dict": _other_weights,
    "load_state_dict(assign=True)": lambda side: _other_weights(side, assign=True),
    "deepcopy": lambda side: _another_model(side, copy.deepcopy),
    "pickle": lambda side: _another_model(side, _pickled),
    "torch.save": lambda side: _another_model(side, _saved),
    "fewer layers": lambda side: _layers(side, lambda layers: layers[:1]),
    "layers reversed": lambda side: _layers(side, lambda layers: layers[::-1]),
    "a layer twice": lambda side: _layers(side, lambda layers: [layers[0]] * len(layers)),
    "a new layer": lambda side: _layers(side, lambda layers: [layers[0], copy.deepcopy(layers[0])]),
    "set_input_embeddings": lambda side: _embeddings(side, "input"),
    "set_output_embeddings": lambda side: _embeddings(side, "output"),
    "resize_token_embeddings": _resized,
    "set_attn_implementation('eager')": lambda side: _attention(side, "eager"),
    "device meta": lambda side: called(lambda: side.model.to("meta"), int),
    "another configuration": lambda side: patched(side.model, "config", _other_config(side.model.config)),
    "wrapped in a module": lambda side: patched(side, "callee", _Wrapped(side.model)),
}


def _other_config(config: Any) -> Any:
    other = copy.deepcopy(config)
    other.is_causal = False
    return other


class _Wrapped:
    """Something around a model that passes on what is asked."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model(*arguments, **keywords)

    def generate(self, **keywords: Any) -> Any:
        return self.model.generate(**keywords)
