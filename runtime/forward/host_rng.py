"""Random numbers that a forward draws on the host and that nothing reads: a replay draws them again.

Speech encoders of transformers before 5.24 draw one for every layer, to skip it in training, and ask whether they are
in training afterwards. Where no function is given what was drawn, nothing can depend on it, but what is drawn
next does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..lazy.lazy_mode import tensors_of


class Draws(TorchFunctionMode):
    """Watches a forward; `again` does what it did to torch's generator of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.are_read = False
        """Whether anything was given a number that was drawn."""
        self._calls: list[tuple[Sequence[Any], dict[str, Any]]] = []
        self._drawn: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        given = kwargs or {}
        if self._drawn and any(one is drawn for one in tensors_of((args, given)) for drawn in self._drawn):
            self.are_read = True
        result = func(*args, **given)
        if func is torch.rand and result.device.type == "cpu" and given.keys().isdisjoint(("generator", "out")):
            self._calls.append((args, given))
            self._drawn.append(result)
        return result

    @property
    def are_there(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._calls)

    def again(self) -> None:
        """Draw as many numbers."""
        for args, given in self._calls:
            torch.rand(*args, **given)

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Leave the generator where it is now if anything was drawn, and let go of that at the end of a block."""
        generator = torch.get_rng_state()
        try:
            yield
        finally:
            self._drawn.clear()
            if self.are_there:
                torch.set_rng_state(generator)
