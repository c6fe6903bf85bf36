"""States of fixed size beside keys and values: convolution windows and recurrent states, at fixed addresses.

A step overwrites them in place. Unlike keys and values they cannot be cut back to an earlier token: who runs a step
to try it keeps copies, `held`, and puts them back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from .layers import OtherContents

_KINDS = ("conv", "recurrent")
LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""transformers' layer of states; the first releases have none, and models keep their states in caches of their own."""


def is_stateful(layer: object) -> bool:
    """Return whether a cache's layer holds states of fixed size, alone or beside keys and values."""
    return LAYER is not None and isinstance(layer, LAYER)


def tensors(layers: Iterable[Any]) -> list[Tensor]:
    """Return every state of these layers that was written."""
    return [
        held
        for layer in layers
        if is_stateful(layer)
        for kind in _KINDS
        for held in getattr(layer, f"{kind}_states").values()
        if held is not None
    ]


@contextlib.contextmanager
def held(layers: Iterable[Any]) -> Iterator[None]:
    """Put every state back as it was before."""
    written = tensors(layers)
    copies = [state.clone() for state in written]
    try:
        yield
    finally:
        if written:
            torch._foreach_copy_(written, copies)


def forget(layer: Any) -> None:
    """Zero the states of a layer; the next update is the first."""
    for state in tensors([layer]):
        state.zero_()
    layer.has_previous_state = dict.fromkeys(range(layer.number_of_states), False)


def free(layer: Any) -> None:
    """Give the memory of a layer's states back."""
    layer.has_previous_state = dict.fromkeys(range(layer.number_of_states), False)
    for kind in _KINDS:
        setattr(layer, f"{kind}_states", dict.fromkeys(range(layer.number_of_states)))
        setattr(layer, f"is_{kind}_states_initialized", dict.fromkeys(range(layer.number_of_states), False))


def copy(source: Any, target: Any) -> None:
    """Make one layer hold what another one does, in memory of its own.

    Raises:
        OtherContents: if it has states of another form.
    """
    for kind in _KINDS:
        into = getattr(target, f"{kind}_states")
        for index, state in getattr(source, f"{kind}_states").items():
            if state is None:
                continue
            if into[index] is None:
                target.lazy_initialization(**{f"{kind}_states": state}, state_idx=index)
            if (into[index].shape, into[index].dtype) != (state.shape, state.dtype):
                raise OtherContents(len(state))
            into[index].copy_(state)
    target.has_previous_state = dict(source.has_previous_state)
