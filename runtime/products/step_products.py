"""Products of a decode step that no rule has rewritten: another library's layers, models of other files.

A step is captured once, so that looking at every call costs nothing later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .linear import product

OFFERS: dict[str, dict[str, str]] = {}


class StepProducts(TorchFunctionMode):
    """Takes `F.linear` of few rows at the speed of memory, whoever calls it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or what stands for it in a step."""
        given = kwargs or {}
        if func is F.linear and (taken := product(*args, **given)) is not None:
            return taken
        return func(*args, **given)
