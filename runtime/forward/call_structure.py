"""Arguments and outputs of a forward as a form and its tensors: what a graph depends on, and what goes in and out.

A form is equal for two values that one graph can stand for: the same classes and fields, the same numbers and strings,
tensors of the same shape, strides and dtype. Whatever is of another class is not understood, and its call is left to
the model's own forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

_HOST = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_SEQUENCES = frozenset({tuple, list})
_MAPPINGS = frozenset({dict, OrderedDict})
_PLAIN = frozenset({Tensor, nn.Parameter})


class NotUnderstood(TypeError):
    """A value of a class that no graph can stand for."""

    def __init__(self, value: object):
        super().__init__(type(value).__name__)


def _of_tensor(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype


def form_of(value: Any, tensors: list[Tensor], described: Callable[[Tensor], Hashable] = _of_tensor) -> Hashable:
    """Return what a graph depends on in `value`, and append its tensors in their order.

    Args:
        value: arguments or outputs.
        tensors: is appended to.
        described: what it depends on in a tensor.

    Raises:
        NotUnderstood: if a part of it is of an unknown class, or a tensor is no plain strided one.
    """
    kind = type(value)
    if kind in _PLAIN:
        if value.layout is not torch.strided or value.is_quantized or value.is_neg() or value.is_conj():
            raise NotUnderstood(value)
        tensors.append(value)
        return described(value)
    if kind in _HOST:
        return kind, value
    if kind in _SEQUENCES:
        return kind, *[form_of(part, tensors, described) for part in value]
    if kind in _MAPPINGS or isinstance(value, ModelOutput):
        return kind, *[(name, form_of(part, tensors, described)) for name, part in value.items()]
    if isinstance(value, Enum):
        return value
    raise NotUnderstood(value)


def with_tensors(value: Any, instead: Callable[[Tensor], Tensor]) -> Any:
    """Return `value`, which has a form, built anew with other tensors."""
    kind = type(value)
    if kind in _PLAIN:
        return instead(value)
    if kind in _SEQUENCES:
        return kind([with_tensors(part, instead) for part in value])
    if kind in _MAPPINGS:
        return kind((name, with_tensors(part, instead)) for name, part in value.items())
    if isinstance(value, ModelOutput):
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        return kind(**{name: with_tensors(part, instead) for name, part in given.items()})
    return value


def is_rebuilt(value: Any) -> bool:
    """Return whether an output built anew is what it was: all of its parts come through its class's constructor."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    again = with_tensors(value, lambda tensor: tensor)
    same = form_of(value, before) == form_of(again, after)
    return (
        same
        and all(one is other for one, other in zip(before, after, strict=True))
        and _attributes_equal(value, again)
    )


def _attributes_equal(value: Any, again: Any) -> bool:
    """Return whether no output has an attribute that is none of its fields."""
    if isinstance(value, ModelOutput):
        if vars(value).keys() != vars(again).keys():
            return False
        return all(_attributes_equal(part, again[name]) for name, part in value.items())
    if type(value) in _SEQUENCES:
        return all(_attributes_equal(part, other) for part, other in zip(value, again, strict=True))
    if type(value) in _MAPPINGS:
        return all(_attributes_equal(part, again[name]) for name, part in value.items())
    return True
