"""The host's side of the decode loop: it reads the tokens that have arrived as transformers' own loop would.

B rows, k tokens of a chunk.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

NOT_NUMBERS = "probability tensor contains either `inf`, `nan` or element < 0"
"""What `torch.multinomial` says."""


class Reader:
    """Follows the generated tokens, a few steps behind the device.

    Args:
        input_ids: `[B, n]`, the prompt.
        steps: most tokens that will come.
        criteria: transformers' list of stopping criteria.
        pad: the id that follows the end of a row; None if rows go on until all have ended.
        reads_prompt: whether a criterion looks at more than the last token.
        streamer: gets every token in order; None for none.
    """

    def __init__(
        self, input_ids: Tensor, steps: int, criteria: Any, pad: int | None, reads_prompt: bool, streamer: Any
    ):
        batch, length = input_ids.shape
        self.prompt_length = length
        self.criteria, self.pad, self.streamer = criteria, pad, streamer
        self.ids = torch.zeros(batch, length + steps, dtype=torch.int64, device="cpu")
        if reads_prompt:
            self.ids[:, :length] = input_ids.cpu()
        self.count = 0
        """Number of tokens read."""
        self.edited = False
        """Whether a row was padded here that the device did not know to have ended."""
        self._unfinished = torch.ones(batch, dtype=torch.int64, device="cpu")
        self._ahead: list[deque[int]] = [deque() for _ in range(batch)]
        """Tokens of rows that are ahead of others."""

    def read(self, tokens: Tensor) -> bool:
        """Read `[B, k]` tokens on the host and return whether the generation ends with one of them."""
        return any(self._read_one(column) for column in tokens.unbind(1))

    def read_rows(self, tokens: Tensor, counts: list[int]) -> bool:
        """Read as many of `[B, k]` tokens as each row has, a column as soon as every row has come as far.

        Args:
            tokens: of the rows.
            counts: how many of them each row has.
        """
        self.edited = True  # the device has these rows in other columns
        for row, (ahead, count) in enumerate(zip(self._ahead, counts, strict=True)):
            ahead.extend(tokens[row, :count].tolist())
        while all(ahead or ended for ahead, ended in zip(self._ahead, self._ended, strict=True)):
            column = [ahead.popleft() if ahead else 0 for ahead in self._ahead]
            if self._read_one(torch.tensor(column, device="cpu")):
                return True
        return False

    @property
    def _ended(self) -> list[bool]:
        """Rows of which no token is wanted any more."""
        if self.pad is None:
            return [False] * len(self._unfinished)
        return [not going_on for going_on in self._unfinished.tolist()]

    def _read_one(self, tokens: Tensor) -> bool:
        if self.pad is not None:
            padded = tokens * self._unfinished + self.pad * (1 - self._unfinished)
            self.edited = self.edited or not torch.equal(padded, tokens)
            tokens = padded
        end = self.prompt_length + self.count + 1
        self.ids[:, end - 1] = tokens
        self.count += 1
        self._unfinished = self._unfinished & ~self.criteria(self.ids[:, :end], None)
        if self.streamer is not None:
            self.streamer.put(tokens.clone())
        return not self._unfinished.any()
