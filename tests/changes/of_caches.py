"""Changes of caches: every class of transformers' in every state that a call may find one in."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import cache_utils

from .calls import prompt
from .change import SCALE, Change, entry
from .families import Side

Act = Callable[[Any, Side], object]


def _continued(cache: Any, side: Side) -> None:
    side.model.generate(input_ids=prompt(side)[:, :5], past_key_values=cache, max_new_tokens=3, do_sample=False)


_ACTS: dict[str, tuple[Act, ...]] = {
    "new": (),
    "continued": (_continued,),
    "cropped": (_continued, lambda cache, _: cache.crop(-2)),
    "recording": (lambda cache, _: cache.activate_past_recording(), _continued, lambda cache, _: cache.crop(-3)),
    "reordered": (_continued, lambda cache, side: cache.reorder_cache(torch.tensor([1, 0], device=side.device))),
    "reset": (_continued, lambda cache, _: cache.reset()),
    "written in place": (_continued, lambda cache, _: cache.layers[0].keys.mul_(SCALE)),
    "copied": (_continued, lambda cache, _: copy.deepcopy(cache)),
    "with an attribute": (lambda cache, _: setattr(cache, "mine", 1), _continued),
    "layers of a subclass": (_continued, lambda cache, _: setattr(cache.layers[0], "__class__", _longer(cache))),
}


def _longer(cache: Any) -> type:
    kind = type(cache.layers[0])

    class Mine(kind):  # type: ignore[misc, valid-type]
        def update(self, *arguments: Any, **keywords: Any) -> Any:
            keys, values = super().update(*arguments, **keywords)
            return keys, values * SCALE

    return Mine


def changes(side: Side) -> Iterator[Change]:
    """Yield every class of transformers' caches in every state that a call may find one in."""
    if not side.family.generates:
        return
    classes = [kind for _, kind in inspect.getmembers(cache_utils, inspect.isclass)]
    kinds = dict.fromkeys(kind for kind in classes if issubclass(kind, cache_utils.Cache))  # some have two names
    for kind in sorted(kinds.keys() - {cache_utils.Cache}, key=lambda kind: kind.__name__):
        for how, given in _FORMS.items():
            for state, acts in _ACTS.items():
                name = f"{kind.__name__}{how}, {state}"
                yield Change("cache", name, lambda side, a=(kind, given, acts): _given_cache(side, *a))


_FORMS: dict[str, Callable[[Side], dict[str, Any]]] = {
    "()": lambda _: {},
    "(config)": lambda side: {"config": _text(side), "max_cache_len": 40},
    "(config, offloading)": lambda side: {"config": _text(side), "max_cache_len": 40, "offloading": True},
}


def _text(side: Side) -> Any:
    return side.model.config.get_text_config(decoder=True)


@contextlib.contextmanager
def _given_cache(side: Side, kind: type, given: Callable[[Side], dict[str, Any]], acts: tuple[Act, ...]) -> Any:
    """Give every call a cache of a class, in a state."""
    names = inspect.signature(kind).parameters
    keywords = {name: value for name, value in given(side).items() if name in names}

    def made() -> Any:
        if issubclass(kind, cache_utils.EncoderDecoderCache):
            cache = kind(*(cache_utils.DynamicCache(**keywords) for _ in range(2)))
        else:
            cache = kind(**keywords)
        for act in acts:
            act(cache, side)
        return cache

    with entry(side.keywords, "past_key_values", made):
        yield
