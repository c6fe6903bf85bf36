"""Scenarios with a key-value cache: decode, chunked prefill, poisoned slots, reuse, reordering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_rewrite_runtime.cache.cache_argument import argument_of, given_back

from ..judging.compare import Mismatch, NotRun
from ..models.configs import WINDOW
from ..models.inputs import Batch
from .observed import everything
from .scenarios import Outputs, Scenario, Setting

if TYPE_CHECKING:
    from torch import Tensor

CAPACITY = 64
"""More than is fed: some models put tokens of their own before a prompt (CPM-Ant: 32)."""
POISON = 1e4


_OWN: WeakKeyDictionary[type, type | None] = WeakKeyDictionary()
"""By the class of a model, that of the cache that it makes for itself."""


def new_cache(model: Any, kind: str) -> Any:
    """A fresh cache of transformers' own classes, or of the class that the model makes for itself."""
    from transformers import DynamicCache, StaticCache

    if kind == "dynamic":
        own = own_cache_class(model)
        return DynamicCache(config=model.config.get_text_config(decoder=True)) if own is None else own()
    return StaticCache(config=model.config, max_cache_len=CAPACITY)


def own_cache_class(model: Any) -> type | None:
    """The class, derived from transformers' growing cache, of which a model makes one where it is given none.

    Only of a model to which transformers gives none either.
    """
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is None or supports():
        return None
    if type(model) not in _OWN:
        _OWN[type(model)] = _asked_for(model)
    return _OWN[type(model)]


def _asked_for(model: Any) -> type | None:
    import torch
    from transformers import DynamicCache

    with torch.no_grad():
        made = given_back(model(input_ids=torch.ones(1, 1, dtype=torch.int64, device=model.device), use_cache=True))
    own = isinstance(made, DynamicCache) and type(made) is not DynamicCache
    return type(made) if own else None


def poison(cache: Any, length: int) -> None:
    """Fill the slots that hold no token yet.

    NaN would show in the original too, since it multiplies masked values by zero; a large number with the sign of
    the slot's parity does not cancel, and a mask that is one slot off lets it through.
    """
    for layer in cache.layers:
        keys: Any = getattr(layer, "keys", None)
        values: Any = getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or length >= keys.shape[2]:
            continue
        keys[:, :, length:] = POISON / 10
        values[:, :, length:] = POISON
        indexer: Any = getattr(layer, "indexer_keys", None)
        if indexer is not None:
            indexer[:, length:] = POISON / 10


def _step(model: Any, setting: Setting, ids: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
    arguments: dict[str, Any] = {}
    if mask is not None:
        arguments["attention_mask"] = mask
        if setting.subject.accepts("position_ids"):
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    logits: Tensor = model(input_ids=ids, use_cache=True, **{argument_of(model): cache}, **arguments).logits
    return logits


def feed(model: Any, setting: Setting, batch: Batch, chunks: list[int], cache: Any, poisoned: bool = False) -> Outputs:
    """Feed a prompt in chunks, the last ones usually single tokens, and collect the logits of each chunk.

    Raises:
        Mismatch: a later step overwrote the logits of an earlier one.
    """
    outputs: Outputs = {}
    copies: Outputs = {}
    for number, (start, stop) in enumerate(_spans(chunks)):
        mask = None if batch.mask is None else batch.mask[:, :stop]
        logits = _step(model, setting, batch.input_ids[:, start:stop], cache, mask)
        name = f"step {number}"
        outputs[name] = logits[batch.real[:, start:stop]] if logits.shape[1] == stop - start else logits
        copies[name] = outputs[name].clone()
        if poisoned:
            poison(cache, stop)
    for name, logits in outputs.items():
        if not bool(((logits == copies[name]) | copies[name].isnan()).all()):
            raise Mismatch(f"the logits of {name} were overwritten by a later step")
    return outputs


def _spans(chunks: list[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for chunk in chunks:
        yield start, start + chunk
        start += chunk


def _run(kind: str, rows: int, chunks: list[int], padding: str = "none") -> Callable[[Any, Setting], Outputs]:
    def run(model: Any, setting: Setting) -> Outputs:
        batch = setting.prompt(rows, sum(chunks), padding)
        return feed(model, setting, batch, chunks, new_cache(model, kind), poisoned=kind == "static")

    return run


def _reuse(model: Any, setting: Setting) -> Outputs:
    cache = new_cache(model, "static")
    feed(model, setting, setting.prompt(2, 13), [10, 1, 1, 1], cache)
    cache.reset()
    again = Batch(setting.tokens(1, 2, 7), None, setting.prompt(2, 7).position_ids)
    return feed(model, setting, again, [4, 1, 1, 1], cache)


def _reorder(model: Any, setting: Setting) -> Outputs:
    import torch

    cache = new_cache(model, "dynamic")
    first = feed(model, setting, setting.prompt(3, 8), [7, 1], cache)
    cache.reorder_cache(torch.tensor([2, 0, 0], device=setting.device))
    logits = _step(model, setting, setting.tokens(1, 3, 1), cache, None)
    return {f"before, {name}": value for name, value in first.items()} | {"after": logits}


def _cropped(model: Any, setting: Setting) -> Outputs:
    """Prefill, throw away the cache's last tokens, go on: what assisted generation does."""
    cache = new_cache(model, "dynamic")
    before = feed(model, setting, setting.prompt(1, WINDOW - 1), [WINDOW - 1], cache)
    length = cache.get_seq_length()
    try:
        cache.crop(-2)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise NotRun(f"this cache cannot be cropped: {error}") from error
    if cache.get_seq_length() != length - 2:
        raise NotRun("this cache cannot be cropped")
    return before | {"after": _step(model, setting, setting.tokens(1, 1, 1), cache, None)}


def _cache_contents(model: Any, setting: Setting) -> Outputs:
    from transformers import DynamicCache

    batch = setting.prompt(2, 11)
    cache = new_cache(model, "dynamic")
    feed(model, setting, batch, [9, 1, 1], cache)
    outputs: Outputs = {}
    for number, layer in enumerate(cache.layers):
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            if tensor is not None and tensor.numel():
                outputs[f"{name}[{number}]"] = tensor
    if own_cache_class(model) is not None:
        beside = {name: value for name, value in vars(cache).items() if name not in vars(DynamicCache())}
        outputs |= everything(beside, "beside the layers")
    return outputs


CACHED: tuple[Scenario, ...] = tuple(
    Scenario(name, run, causal_only=True)
    for name, run in (
        ("decode, dynamic cache", _run("dynamic", 1, [WINDOW - 2] + [1] * 6)),
        ("decode, dynamic cache, left padding", _run("dynamic", 3, [WINDOW + 2] + [1] * 4, "left")),
        ("decode, static cache, poisoned", _run("static", 1, [WINDOW - 2] + [1] * 6)),
        ("decode, static cache, poisoned, left padding", _run("static", 3, [WINDOW + 2] + [1] * 4, "left")),
        ("chunked prefill, dynamic cache", _run("dynamic", 2, [7, 5, 9, 1])),
        ("chunked prefill, static cache", _run("static", 2, [7, 5, 9, 1])),
        ("static cache, reset and reused", _reuse),
        ("cache reordered for beams", _reorder),
        ("cache cropped", _cropped),
        ("contents of the cache", _cache_contents),
    )
)
