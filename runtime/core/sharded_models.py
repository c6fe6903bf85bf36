"""Models that transformers has dealt to several ranks, and what of them is so at the moment."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


class Local:
    """What stands in for the `forward` of a module while it holds a rank's own part (`tensor_parallel/forwards.py`).

    Each call makes them anew, and they are the same ones.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = object.__hash__


def is_local(module: nn.Module) -> bool:
    """Return whether a module's `forward` is one of these."""
    return isinstance(module.__dict__.get("forward"), Local)


def is_dealt(model: nn.Module) -> bool:
    """Return whether transformers has dealt a model to several ranks."""
    return bool(getattr(model, "_tp_size", None)) and dist.is_available() and dist.is_initialized()


def is_split(model: nn.Module) -> bool:
    """Return whether parameters of a model are tensors of several ranks, as they are outside of `local`."""
    if not is_dealt(model):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
