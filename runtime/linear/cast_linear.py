"""Subclasses of `nn.Linear` that cast their weight to the dtype of the input: where it has that dtype, `nn.Linear`.

`F.linear(x, self.weight.to(x.dtype))` keeps weights in fp32 and multiplies in the dtype of the activations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

_Kind = TypeVar("_Kind", bound=type[nn.Linear])
_casting: weakref.WeakKeyDictionary[type[nn.Module], tuple[Any, bool]] = weakref.WeakKeyDictionary()
"""The classes that a file marks, each with the `forward` that it had then, and whether that adds the bias."""


def casts_weight(*, bias: bool) -> Callable[[_Kind], _Kind]:
    """Mark a class whose `forward` is `F.linear(x, self.weight.to(x.dtype))`, with the bias cast and added or not."""

    def mark(kind: _Kind) -> _Kind:
        _casting[kind] = kind.forward, bias
        return kind

    return mark


def is_linear_for(input: Tensor, projection: nn.Module) -> bool:
    """Whether a projection of a marked class computes what an `nn.Linear` of its parameters would, for this input."""
    forward, adds_bias = _casting.get(type(projection), (None, False))
    if forward is None or type(projection).forward is not forward:
        return False
    weight, bias = (projection._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or weight.dtype != input.dtype:
        return False
    return bias is None or (adds_bias and bias.dtype == input.dtype)
