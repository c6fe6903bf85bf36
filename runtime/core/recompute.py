"""What a tensor was made of, for who would rather compute it again for a gradient than keep it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Compute = Callable[[Tensor, Tensor | None], Tensor]


class Made(NamedTuple):
    """Something that is a function of a tensor that is kept anyway, and of a weight."""

    source: Tensor
    weight: Tensor | None
    again: Compute
    """Returns the same bits again."""
    reference: Compute
    """The same in torch's operators, which can be differentiated."""


class _Recipe(NamedTuple):
    source: weakref.ref[Tensor]
    versions: tuple[int, int]
    weight: Tensor | None
    again: Compute
    reference: Compute


_NAME = "_rewrite_made"


def remember(made: Tensor, source: Tensor, weight: Tensor | None, again: Compute, reference: Compute) -> None:
    """Note at a tensor what it is made of; the source is not kept alive by it."""
    recipe = _Recipe(weakref.ref(source), (made._version, source._version), weight, again, reference)
    setattr(made, _NAME, recipe)


def origin(tensor: Tensor) -> Made | None:
    """Return what a tensor is made of; None where nobody noted it, or it or its source changed since or is gone."""
    recipe: _Recipe | None = getattr(tensor, _NAME, None)
    source = None if recipe is None else recipe.source()
    if recipe is None or source is None or (tensor._version, source._version) != recipe.versions:
        return None
    return Made(source, recipe.weight, recipe.again, recipe.reference)
