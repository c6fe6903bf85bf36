"""Which layers of a decode graph's cache keep keys and values in 8 bits: those that a method for one token reads."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

from ..cache.fp8_layer import Fp8Layer
from ..cache.layers import PreallocatedLayer
from ..cache.preallocated import PreallocatedCache
from ..core import backend
from ..guards.code_names import ATTENDS, code_of, names_in


def keep_in_8_bits(cache: PreallocatedCache, model: nn.Module, but: str = "") -> None:
    """Put layers of 8 bits into an empty cache where `decode_attention` reads them; count why where none is.

    Others keep the model's dtype: latents, states, keys of an indexer, layers whose attention has no method for one
    token.

    Args:
        cache: of a decode graph, to which nothing was written.
        model: whose layers say by `layer_idx` which of the cache is theirs.
        but: why no layer may be, of a kind of call; "" where they may.
    """
    plain = {number for number, layer in enumerate(cache.layers) if type(layer) is PreallocatedLayer}
    numbers = set() if but else plain & set(_numbers(model))
    for number in numbers:
        cache.layers[number] = Fp8Layer(cache)
    if not numbers:
        backend.count_fallback("fp8_cache", but or "no_method_for_one_token", model)
    elif len(numbers) < len(cache.layers):
        backend.count_fallback("fp8_cache", "some_layers", model)


def layers_in_8_bits(cache: PreallocatedCache) -> str:
    """Return how many layers of a cache are in 8 bits, for `explain`; "" for none."""
    found = [layer for layer in cache.layers if isinstance(layer, Fp8Layer)]
    return f", {len(found)} of {len(cache.layers)} layers in 8 bits" if found else ""


def _numbers(model: nn.Module) -> Iterator[int]:
    """Yield the numbers of layers whose attention is `decode_attention`."""
    for module in model.modules():
        number: Any = getattr(module, "layer_idx", None)
        if isinstance(number, int) and any(map(_attends, _methods(type(module)))):
            yield number


def _methods(kind: type[nn.Module]) -> Iterator[CodeType]:
    for name in dir(kind):
        if name == "forward" or name.startswith("decode"):
            code = code_of(getattr(kind, name))
            if code is not None:
                yield code


def _attends(code: CodeType) -> bool:
    return names_in(code, "decode_attention") or names_in(code, ATTENDS)
