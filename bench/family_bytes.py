"""The bytes that a decode step of the original has to move, seen by watching one.

A parameter counts if an operation of the second forward pass of `generate()` takes it, an embedding's look-up aside:
so an encoder, a vision tower and the projections of a cross-attention whose keys are kept count nothing, and a tied
head counts once. Of experts it is the share that a token is routed to. Keys and values count once, read; states twice,
read and written. Of latent attention it is the latents: what is expanded from them need not be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_rewrite_runtime.cache.cache_argument import NAMES
from rewrite.measure.limits import experts

CACHES = (*NAMES, "state")
LOOKUPS = ("aten::embedding", "aten::index_select", "aten::gather")
STATES = ("conv_states", "recurrent_states")


@dataclass(frozen=True)
class Moved:
    """Bytes of a step."""

    weights: float
    keys_and_values: float
    states: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.keys_and_values + self.states


class _Reads(TorchDispatchMode):
    """Collects the addresses that operations take."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] not in LOOKUPS:
            self.starts |= {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


class _SecondPass:
    """Watches the second forward pass of a model."""

    def __init__(self) -> None:
        self.passes, self.reads, self.cache = 0, _Reads(), None

    def before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.passes += 1
        if self.passes == 2:
            self.cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
            self.moved = kept_bytes(self.cache, model.config)
            self.reads.__enter__()

    def after(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.passes == 2:
            self.reads.__exit__(None, None, None)


def moved(model: Any, arguments: dict[str, Any]) -> Moved:
    """The bytes of the first step after a prompt."""
    watch = _SecondPass()
    hooks = [
        model.register_forward_pre_hook(watch.before, with_kwargs=True),
        model.register_forward_hook(watch.after, with_kwargs=True),
    ]
    try:
        with torch.no_grad():
            model.generate(**arguments, max_new_tokens=3, do_sample=False, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Moved(weights_read(model, watch.reads.starts), *watch.moved)


def weights_read(model: Any, starts: set[int]) -> float:
    """Bytes of the parameters of which some operation took a part."""
    count, active = experts(model.config.get_text_config(decoder=True))
    total, places = 0.0, sorted(starts)
    tensors = torch.tensor(places)
    for name, parameter in model.named_parameters():
        first = int(torch.searchsorted(tensors, parameter.data_ptr()))
        if first == len(places) or places[first] >= parameter.data_ptr() + parameter.nbytes:
            continue
        routed = count > 1 and parameter.shape[0] == count and (parameter.dim() > 2 or ".experts." in name)
        total += parameter.nbytes * (active / count if routed else 1.0)
    return total


def kept_bytes(cache: Any, config: Any) -> tuple[float, float]:
    """Bytes of keys and values that a step reads, and of states that it reads and writes."""
    if cache is None:
        return 0.0, 0.0
    if not hasattr(cache, "layers") and not hasattr(cache, "self_attention_cache"):
        return 0.0, 2.0 * sum(leaf.nbytes for leaf in tree_leaves(cache) if isinstance(leaf, Tensor))
    layers = list(_layers(cache))
    keys = [layer for layer in layers if isinstance(getattr(layer, "keys", None), Tensor)]
    states = [held for layer in layers for name in STATES for held in tree_leaves(getattr(layer, name, None))]
    read = sum(_read(layer, config.get_text_config(decoder=True)) for layer in keys)
    return float(read), 2.0 * sum(state.nbytes for state in states if isinstance(state, Tensor))


def _read(layer: Any, config: Any) -> int:
    rank, rotated = getattr(config, "kv_lora_rank", None), getattr(config, "qk_rope_head_dim", None)
    if rank and rotated:
        batch, _, length, _ = layer.keys.shape
        return int(batch * length * (rank + rotated) * layer.keys.element_size())
    return int(layer.keys.nbytes + layer.values.nbytes)


def _layers(cache: Any) -> Iterator[Any]:
    for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        yield from getattr(part, "layers", ())
