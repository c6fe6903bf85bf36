"""What is measured: something that generates tokens, whoever does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Contender(Protocol):
    """A side: its name, the tokens its short generation has, how many more its long one has."""

    name: str
    short: int
    steps: int

    def generate(self, prompt: Tensor, new: int, mask: Tensor | None = None) -> Tensor:
        """Greedy tokens `[B, new]` that follow `prompt` `[B, L]`."""
        ...
