"""A step of several tokens: the last one of a text and what was drafted behind it, of which it keeps what is right.

B rows, n tokens of the step, V vocabulary, K = n - 1 drafts, E number of end-of-sequence ids.

The logits behind each token say which one follows. As far as that is the next draft the draft was right, and the
first one that is not, or the one behind the last draft, comes on top: at least one token a step, at most n. A token
that is drawn is drawn behind each draft, whatever the draft is, so that the text is distributed as one that was drawn
token by token (Leviathan and others, 2023, with drafts that are certain). Keys and
values of drafts that were wrong stay behind the position, where no mask shows them and the next step overwrites them.

Of several rows either each keeps what was right (`RaggedWindow`), and they are brought into line behind the step
(`left_pad_rows`), or all keep as many as the one with the fewest, and stay in line. Where a row is cut off depends on
what others draw, or on what it has drawn so far, so that either way its text is distributed as by itself.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..decode.step_graph import Program
from ..sampling.prompt_lookup import look_up
from ..sampling.sampling import Sampling, StepState, select
from .left_pad_rows import fall_in


class Window(Program):
    """One graph of such a step and of what drafts for the next one; `logits` and `scores` are `[B, n, V]`."""

    ragged: ClassVar[bool] = False
    """Whether each row keeps what was right of it; an `Alignment` has to follow."""

    def _rehearse(self) -> None:
        graph = self._decode()
        assert graph is not None
        graph.state.position.fill_(min(graph.cache.length, graph.cache.capacity - width_of(self.sampling)))
        self._run()

    def _run(self) -> None:
        graph = self._decode()
        assert graph is not None
        assert self.sampling is not None
        state = graph.state
        drafts = state.drafts[:, : width_of(self.sampling) - 1]
        if len(drafts) > 1 and self.sampling.pad is not None:
            drafts.copy_(torch.where(state.finished[:, None], self.sampling.pad, drafts))
        logits = graph.call.forward_several(torch.cat([state.input_ids, drafts], dim=1))
        self.logits, self.scores = check(logits, state, self.sampling, self.ragged)


class RaggedWindow(Window):
    """Such a step in which every row keeps what was right of it."""

    ragged = True


def width_of(sampling: Sampling | None) -> int:
    """Return n."""
    assert sampling is not None
    assert sampling.lookup is not None
    return 1 + sampling.lookup.tokens


def check(logits: Tensor, state: StepState, sampling: Sampling, ragged: bool = False) -> tuple[Tensor, Tensor]:
    """Write down the drafts that are right and the token behind them, move on, and draft anew.

    Args:
        logits: `[B, n, V]`, behind the last token and behind each draft.
        state: of the step; `taken` says how many tokens came of each row, `chosen` which.
        sampling: how tokens are chosen and drafted.
        ragged: whether each row takes its own, none if it had ended. Who drafts from the text does so once the rows
            are in line.

    Returns:
        Logits and processed scores `[B, n, V]`, as `select` returns them.
    """
    shape, (rows, width) = logits.shape, logits.shape[:2]
    number = torch.arange(width, device=logits.device)
    chosen, logits, scores = select(logits.flatten(0, 1), state, sampling, number.repeat(rows)[:, None])
    tokens = chosen.view(rows, width)
    right = tokens[:, :-1] == state.drafts[:, : width - 1]  # one that nobody drafted may be right too
    taken = right.long().cumprod(1).sum(dim=1) + 1
    ends: Tensor | None = None
    if sampling.eos is not None and sampling.pad is not None:
        tokens = torch.where(state.finished[:, None], sampling.pad, tokens)
        ends = (tokens[..., None] == sampling.eos).any(dim=-1)
        taken = torch.minimum(taken, (ends.long().cumsum(1) == 0).sum(dim=1) + 1)
    taken = torch.minimum(taken, state.most - (state.position + state.length_offset - state.behind[:, 0]))
    if ragged:
        taken = taken.masked_fill(state.finished, 0)
    elif rows > 1:
        taken = taken.masked_fill(state.finished, width).amin().expand(rows)
    if ends is not None:
        state.finished.logical_or_((ends & (number < taken[:, None])).any(dim=1))
    last = tokens.gather(1, (taken - 1).clamp_min(0)[:, None])
    if ragged:
        last = torch.where(taken[:, None] > 0, last, state.input_ids)
    state.chosen[:, :width].copy_(tokens)
    # Who looks at the slots to come sees no token but these.
    state.sequence.index_copy_(1, state.position + 1 + number, torch.where(number < taken[:, None], tokens, last))
    state.input_ids.copy_(last)
    state.taken.copy_(taken)
    if ragged:
        fall_in(state, taken)
        return logits.view(shape), scores.view(shape)
    state.position.add_(taken[:1])
    state.position_ids.add_(taken[:, None])
    assert sampling.lookup is not None
    if sampling.lookup.ngram:
        look_up(state, sampling.lookup, sampling.eos)
    return logits.view(shape), scores.view(shape)
