"""Tokens on their way from the device to the host.

B rows, k tokens, m further numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling.sampling import StepState
from ..sampling.stop_checker import NOT_NUMBERS
from .rank_agreement import Plan


class Arrival:
    """Tokens of a chunk on their way to the host.

    Args:
        state: of the step that writes them.
        tokens: `[B, k]`, a part of it.
        plan: of the call.
        more: `[B, m]`, together m integers of each row that come with them.
    """

    def __init__(self, state: StepState, tokens: Tensor, plan: Plan, *more: Tensor):
        self._plan, self._count = plan, tokens.shape[1]
        source = torch.cat([tokens, *more, state.invalid[:, None]], dim=1)
        self._event: torch.cuda.Event | None = None
        self._tokens = source
        if source.is_cuda:
            self._tokens = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._tokens.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(source.device))

    def tokens(self) -> Tensor:
        """Wait for them and return `[B, k]`.

        Raises:
            RuntimeError: if a row's probabilities were no numbers, as `torch.multinomial` does.
        """
        return self._arrived()[:, : self._count]

    def more(self) -> list[list[int]]:
        """Wait for them and return each further number of every row."""
        numbers: list[list[int]] = self._arrived()[:, self._count : -1].T.tolist()
        return numbers

    def _arrived(self) -> Tensor:
        if self._event is not None:
            self._plan.wait(self._event)
        if self._tokens[:, -1].any():
            raise RuntimeError(NOT_NUMBERS)
        return self._tokens
