"""How far a call of `generate()` is: what the host has read, and the random generator behind each token."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from ..decode.token_stream import Arrival
from ..device.graph_capture import index_of
from ..sampling.stop_checker import Reader


class Progress:
    """How far a call is.

    Args:
        device: that draws.
        draws: whether it does.
        reader: of the tokens.
        first: the first token.
        start: the slot of that.
    """

    def __init__(self, device: torch.device, draws: bool, reader: Reader, first: Arrival, start: int):
        self.reader, self.start = reader, start
        self.waiting = deque([first])
        """What the host has not read."""
        self.made = 1
        """Tokens, as far as the device was told to make them."""
        self.stopped = False
        """Whether the host has seen the end."""
        self._random = _Randomness(device) if draws else None
        self._marks: list[Any] = []
        self.mark()

    def read(self) -> None:
        """Let the host read what arrives next."""
        self.stopped = self.reader.read(self.waiting.popleft().tokens())

    def mark(self) -> None:
        """Note where the random generator stands behind a token."""
        if self._random is not None:
            self._marks.append(self._random.mark())

    def restore(self) -> None:
        """Let it stand where it stood behind the last token that was read."""
        if self._random is not None:
            self._random.restore(self._marks[self.reader.count - 1])


class _Randomness:
    """Where the device's random generator stands, without asking the device."""

    def __init__(self, device: torch.device):
        self._generator = None
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[index_of(device)]

    def mark(self) -> Any:
        """Return where it stands."""
        return torch.get_rng_state() if self._generator is None else self._generator.get_offset()

    def restore(self, mark: Any) -> None:
        """Let it stand there again."""
        if self._generator is None:
            torch.set_rng_state(mark)
        else:
            self._generator.set_offset(mark)
