"""A mask of as many ones as there are keys, made by a model that this package did not rewrite.

Models that are given no mask make one of their own, `torch.ones(B, past + 1)`. In a step the number of keys is a
tensor on the device, and a size must be known to the host: such a mask has a column for every slot instead. What is
beyond the position is masked in any case, by the position itself, and a step is compared with the model's ordinary one
before it is trusted. A rewritten file says the same with `key_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

OFFERS: dict[str, dict[str, str]] = {}


class AllKeys(TorchFunctionMode):
    """Gives `torch.ones(B, n)` a column for each of `capacity` slots where `n` is a tensor, while a step runs."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        given = dict(kwargs or {})
        if func is torch.ones:
            size = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
            if len(size) == 2 and isinstance(size[1], Tensor) and not isinstance(size[0], Tensor):
                return torch.ones(size[0], self.capacity, **given)
        return func(*args, **given)
