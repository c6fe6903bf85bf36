"""One rounding more, at the start of a step: how far that alone moves a model's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Nudged(TorchFunctionMode):
    """Moves every other number of what embeddings return by one unit in its last place."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        found = func(*args, **(kwargs or {}))
        return _nudged(found) if func is F.embedding else found


def _nudged(embedded: Tensor) -> Tensor:
    every_other = torch.arange(embedded.shape[-1], device=embedded.device) % 2
    return embedded * (1 + every_other * torch.finfo(embedded.dtype).eps).to(embedded.dtype)
