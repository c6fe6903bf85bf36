"""A step of several tokens: the last one of a text and what was drafted behind it, of which it keeps what is right.

n tokens of the step, V vocabulary, K = n - 1 drafts, E number of end-of-sequence ids. One row.

The logits behind each token say which one follows. As far as that is the next draft the draft was right, and the
first one that is not, or the one behind the last draft, comes on top: at least one token a step, at most n. A token
that is drawn is drawn behind each draft, whatever the draft is, so that the text is distributed as one that was drawn
token by token (Leviathan and others, 2023, with drafts that are certain). Keys and
values of drafts that were wrong stay behind the position, where no mask shows them and the next step overwrites them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Program
from .lookup import look_up
from .sampling import Sampling, StepState, select

OFFERS: dict[str, dict[str, str]] = {}


class Window(Program):
    """One graph of such a step and of what drafts for the next one; `logits` and `scores` are `[n, V]`."""

    def _rehearse(self) -> None:
        graph = self._decode()
        assert graph is not None
        graph.state.position.fill_(min(graph.cache.length, graph.cache.capacity - width_of(self.sampling)))
        self._run()

    def _run(self) -> None:
        graph = self._decode()
        assert graph is not None
        assert self.sampling is not None
        drafts = graph.state.drafts[:, : width_of(self.sampling) - 1]
        logits = graph.forward_several(torch.cat([graph.state.input_ids, drafts], dim=1))
        self.logits, self.scores = check(logits[0], graph.state, self.sampling)


def width_of(sampling: Sampling | None) -> int:
    """Return n."""
    assert sampling is not None
    assert sampling.lookup is not None
    return 1 + sampling.lookup.tokens


def check(logits: Tensor, state: StepState, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Write down the drafts that are right and the token behind them, move on, and draft anew.

    Args:
        logits: `[n, V]`, behind the last token and behind each draft.
        state: of the step; `taken` says how many tokens came.
        sampling: how tokens are chosen and drafted.

    Returns:
        Logits and processed scores `[n, V]`, as `select` returns them.
    """
    number = torch.arange(len(logits), device=logits.device)
    tokens, logits, scores = select(logits, state, sampling, number[:, None])
    right = tokens[:-1] == state.drafts[0, : len(tokens) - 1]  # one that nobody drafted may be right too
    taken = right.long().cumprod(0).sum().view(1) + 1
    last = tokens.index_select(0, taken - 1)
    tokens = torch.where(number < taken, tokens, last)  # who looks at the slots to come sees no token but these
    state.sequence.index_copy_(1, state.position + 1 + number, tokens[None])
    if sampling.eos is not None:
        state.finished.logical_or_((tokens[:, None] == sampling.eos).any())
    state.position.add_(taken)
    state.position_ids.add_(taken)
    state.input_ids.copy_(last[:, None])
    state.taken.copy_(taken)
    assert sampling.lookup is not None
    if sampling.lookup.ngram:
        look_up(state, sampling.lookup, sampling.eos)
    return logits, scores
