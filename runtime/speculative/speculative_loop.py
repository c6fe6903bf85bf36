"""The host's side of a loop whose tokens are drafted on the device and checked several at a time.

B rows, n tokens of a step of several.

A step of one token (`Program`) and a step of several (`Window`) leave the same state behind, so that each may follow
the other, and both draft for the next. Where nothing was found in the text the host stays a step behind the device, as
in the loop without drafts; where something was, it waits for the step under way and replays the one of several tokens.

Rows keep what is right of each (`ragged`) where the model computes the same with its rows in other slots, and nothing
is wanted of the call but tokens; otherwise all keep as many as the one with the fewest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..decode.rank_agreement import Plan
from ..decode.step_graph import DecodeGraph, Program
from ..decode.token_stream import Arrival
from ..sampling.sampling import Sampling
from ..sampling.stop_checker import Reader
from .draft_model import Assistant, nbytes
from .left_pad_rows import Alignment, fall_in, moved_bytes
from .verify_step import RaggedWindow, Window

AHEAD = 2
"""Steps of one token under way at a time."""


class Worth:
    """Whether drafts behind a match of some length are checked, by how many of them were right in this call.

    A step of several tokens takes longer than one of a single token, by a part that depends on model and card. In any
    text a single token has stood before, and what followed it follows again in one of several cases only.
    """

    LEAST = 0.5
    """Right drafts a step: with fewer, single tokens are taken instead. A step of 11 takes 1.5 of one (`LONGER`)."""
    FIRST = 1.5
    """What is thought of a length before it was tried, in units of what has to be."""
    WEIGHT = 0.125
    """Of the last step in the average."""
    AGAIN = 64
    """One in so many is tried nevertheless."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._left_out = 0

    def pays(self, matched: Sequence[int], ragged: bool = True, besides: float = 0.0) -> bool:
        """Return whether to check drafts.

        Args:
            matched: of each row that goes on, how many tokens were found in the text; 0 where nothing is drafted.
            ragged: whether each row keeps what is right of it, instead of as many as the one with the fewest.
            besides: what a step of several tokens costs beside its own time, in steps of one.
        """
        if not any(matched) or not (ragged or all(matched)):
            return False
        least = self.LEAST + besides
        right = [self._right.get(length, self.FIRST * least) if length else 0.0 for length in matched]
        if (sum(right) / len(right) if ragged else min(right)) >= least:
            return True
        self._left_out += 1
        return self._left_out % self.AGAIN == 0

    def learn(self, matched: int, right: int) -> None:
        """Take note that `right` drafts behind a match of `matched` tokens were right."""
        before = self._right.get(matched, self.FIRST * self.LEAST)
        self._right[matched] = before + self.WEIGHT * (right - before)


class DraftedLoop:
    """Replays until the reader has seen the end.

    Args:
        sampling: of the call, with its `lookup`.
        plan: of the call.
        reader: of its tokens.
        steps: most tokens that it will generate.
        positions: that the model has; None for any number.
        keep: is given logits and scores of every token, `[B, V]`, as far as a step leaves some.
        grow: moves to a larger cache, with room for so many more tokens.
        ragged: whether each row keeps what is right of it; False for a single one.
        assistant: drafts in place of the text, as long as it pays and every step is one of several, or it would miss a
            token.
    """

    def __init__(
        self, sampling: Sampling, plan: Plan, reader: Reader, steps: int, positions: int | None,
        keep: Callable[[Tensor | None, Tensor | None], None],
        grow: Callable[[DecodeGraph, int], tuple[DecodeGraph, Program]],
        *, ragged: bool = False, assistant: Assistant | None = None,
    ):  # fmt: skip
        assert sampling.lookup is not None
        self._sampling, self._plan, self._reader, self._steps = sampling, plan, reader, steps
        self._positions, self._keep, self._grow = positions, keep, grow
        self._width = 1 + sampling.lookup.tokens
        self._ragged = ragged
        self._worth = Worth()
        self._assistant = assistant
        self._window: Program | None = None
        self._alignment: Program | None = None
        self._weights, self._moved = 0, 0.0
        """Bytes of the model, and bytes that an alignment moves for each slot there is."""
        self._matched: list[int] = []
        """Of each row, the tokens of the text before what is drafted; 0 where nothing is, or the row has ended."""
        self._pays = False
        """Whether the last tokens that arrived are worth a step of several."""
        self._waiting: deque[Arrival] = deque()

    def run(self, graph: DecodeGraph, program: Program) -> DecodeGraph:
        """Generate behind the first token, which `graph.state` has; return the graph that holds the text."""
        start, self._weights, self._moved = graph.cache.length, nbytes(graph.model), moved_bytes(graph)
        self._send(graph, graph.state.sequence[:, start : start + 1])
        stopped = False
        while not stopped:
            left = self._steps - 1 - (graph.cache.length - start)
            full = graph.cache.length == graph.cache.capacity
            wanted = self._pays or self._assistant is not None
            several = wanted and self._steps - self._reader.count > 1 and fits(graph, self._width, self._positions)
            if self._waiting and (len(self._waiting) == AHEAD or several or full or not left):
                stopped = self._read(graph, self._waiting.popleft())
            elif full and left:
                graph, program = self._grow(graph, left + self._width)
                self._window, self._alignment, self._moved = None, None, moved_bytes(graph)
            elif several and (left > 1 or self._ragged):
                stopped = self._several(graph, left)
            elif left:
                self._assistant = None
                program.replay()
                self._keep(program.logits, program.scores)
                graph.cache.grow(1)
                self._send(graph, graph.state.sequence[:, graph.cache.length : graph.cache.length + 1])
            elif self._ragged:  # the row that is ahead is complete, others are not
                fall_in(graph.state, torch.zeros_like(graph.state.taken))
                self._align(graph)
                self._send(graph, graph.state.sequence[:, :0])
                stopped = self._read(graph, self._waiting.popleft())
                assert stopped or graph.cache.length < start + self._steps - 1
            else:
                stopped = True
        return graph

    def _several(self, graph: DecodeGraph, left: int) -> bool:
        """Check what is drafted and return whether the generation ends with one of the new tokens."""
        window = self._window
        if window is None:
            window = self._window = graph.program(self._sampling, RaggedWindow if self._ragged else Window)
        if self._assistant is not None:
            self._assistant.draft(graph)
        window.replay()
        if self._ragged:
            if self._assistant is not None:
                self._assistant.align(graph)
            self._align(graph)
        self._send(graph, graph.state.chosen[:, : self._width])
        arrival = self._waiting.popleft()
        taken, drafted = arrival.more()[2], self._matched
        right = [count - 1 for count in taken if count]
        if self._assistant is None:
            for matched, count in zip(drafted, taken, strict=True):
                if matched and count:
                    self._worth.learn(matched, count - 1)
        elif right and not self._assistant.pays(sum(right) / len(right), self._besides(graph)):
            self._assistant = None
        if self._ragged:
            return self._read(graph, arrival, taken)
        count = min(taken[0], left)
        if window.logits is not None and window.scores is not None:
            for number in range(count):
                self._keep(window.logits[:, number], window.scores[:, number])
        graph.cache.grow(count)
        return self._read(graph, arrival, [count] * len(taken))

    def _align(self, graph: DecodeGraph) -> None:
        if self._alignment is None:
            self._alignment = graph.program(self._sampling, Alignment)
        self._alignment.replay()

    def _send(self, graph: DecodeGraph, tokens: Tensor) -> None:
        state = graph.state
        more = state.counts.T, state.finished[:, None], state.position.expand_as(state.behind)
        self._waiting.append(Arrival(state, tokens, self._plan, *more))

    def _read(self, graph: DecodeGraph, arrival: Arrival, counts: list[int] | None = None) -> bool:
        """Read the first tokens of each row, all that came by default, and what is drafted behind them."""
        tokens = arrival.tokens()
        drafted, matched, _, finished, position = arrival.more()
        if self._ragged:
            counts = [tokens.shape[1]] * len(tokens) if counts is None else counts
            stopped = self._reader.read_rows(tokens, counts)
            if not self._waiting:
                graph.cache.rewind(position[0])
        else:
            stopped = self._reader.read(tokens if counts is None else tokens[:, : counts[0]])
        rows = zip(drafted, matched, finished, strict=True)
        self._matched = [length if count and not ended else 0 for count, length, ended in rows]
        going_on = [length for length, ended in zip(self._matched, finished, strict=True) if not ended]
        self._pays = self._worth.pays(going_on, self._ragged or len(finished) == 1, self._besides(graph))
        return stopped

    def _besides(self, graph: DecodeGraph) -> float:
        """Return what the alignment behind a step takes, in steps of one token: both are as long as what they read."""
        if not self._ragged:
            return 0.0
        moved = self._moved * graph.cache.length
        return moved / (moved / 2 + self._weights)


def fits(graph: DecodeGraph, width: int, positions: int | None) -> bool:
    """Return whether a cache has the slots, and the model the positions, for a step of `width` tokens."""
    end = graph.cache.length + width
    return end <= graph.cache.capacity and (positions is None or end <= positions)
