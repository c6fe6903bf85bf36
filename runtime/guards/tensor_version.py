"""How often a tensor was written in place, for who keeps what was computed of it."""

from __future__ import annotations

from torch import Tensor


def version_of(tensor: Tensor) -> int | None:
    """Return the count of writes in place; None for a tensor of inference mode, whose writes nobody counts.

    One that was given the memory of an ordinary tensor since, by `.data` or `to`, has no count either, though it says
    that it is none of inference mode.
    """
    if tensor.is_inference():
        return None
    try:
        return tensor._version
    except RuntimeError:
        return None
