"""Everything that a model returned as tensors by the way to them: nested tuples, and what caches hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 8


def everything(value: Any, name: str = "output") -> dict[str, Tensor]:
    """Every tensor in a result, and every number as a tensor.

    Objects that are no containers, as caches and their layers are, are opened; their class is part of the name, so
    that another class is another output.
    """
    import torch

    found: dict[str, Tensor] = {}
    for path, leaf in _leaves(value, name, DEPTH):
        found[path] = leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)
    return found


def _leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, (torch.Tensor, bool, int, float)):
        yield name, value
    elif value is not None and depth:
        for key, part in _parts(value):
            yield from _leaves(part, f"{name}.{key}", depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, Mapping):
        yield from ((f"{key}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{number}", part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        kind = type(value).__name__
        yield from ((f"{kind}.{key}", part) for key, part in sorted(vars(value).items()) if key != "config")


def fields_of(result: Any) -> dict[str, bool]:
    """The fields that a result's class declares, and whether this one has each."""
    if not dataclasses.is_dataclass(result):
        return {}
    return {field.name: getattr(result, field.name, None) is not None for field in dataclasses.fields(result)}
