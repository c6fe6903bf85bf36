"""The host's side of a loop whose tokens are drafted on the device and checked several at a time. One row.

A step of one token (`Program`) and a step of several (`Window`) leave the same state behind, so that each may follow
the other, and both draft for the next. Where nothing was found in the text the host stays a step behind the device, as
in the loop without drafts; where something was, it waits for the step under way and replays the one of several tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from .arrival import Arrival
from .assistant import Assistant
from .graph import DecodeGraph, Program
from .plan import Plan
from .sampling import Sampling
from .stopping import Reader
from .window import Window

AHEAD = 2
"""Steps of one token under way at a time."""


class Worth:
    """Whether drafts behind a match of some length are checked, by how many of them were right in this call.

    A step of several tokens takes longer than one of a single token, by a part that depends on model and card. In any
    text a single token has stood before, and what followed it follows again in one of several cases only.
    """

    LEAST = 0.5
    """Right drafts a step: with fewer, single tokens are taken instead. A step of 11 takes 1.5 of one (`LONGER`)."""
    FIRST = 0.75
    """What is thought of a length before it was tried."""
    WEIGHT = 0.125
    """Of the last step in the average."""
    AGAIN = 64
    """One in so many is tried nevertheless."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._left_out = 0

    def pays(self, matched: int) -> bool:
        """Return whether to check drafts behind a match of `matched` tokens."""
        if self._right.get(matched, self.FIRST) >= self.LEAST:
            return True
        self._left_out += 1
        return self._left_out % self.AGAIN == 0

    def learn(self, matched: int, right: int) -> None:
        """Take note that `right` drafts behind a match of `matched` tokens were right."""
        before = self._right.get(matched, self.FIRST)
        self._right[matched] = before + self.WEIGHT * (right - before)


class DraftedLoop:
    """Replays until the reader has seen the end.

    Args:
        sampling: of the call, with its `lookup`.
        plan: of the call.
        reader: of its tokens.
        steps: most tokens that it will generate.
        positions: that the model has; None for any number.
        keep: is given logits and scores of every token, `[1, V]`, as far as a step leaves some.
        grow: moves to a larger cache, with room for so many more tokens.
        assistant: drafts in place of the text, as long as it pays and every step is one of several, or it would miss a
            token.
    """

    def __init__(
        self, sampling: Sampling, plan: Plan, reader: Reader, steps: int, positions: int | None,
        keep: Callable[[Tensor | None, Tensor | None], None],
        grow: Callable[[DecodeGraph, int], tuple[DecodeGraph, Program]],
        assistant: Assistant | None = None,
    ):  # fmt: skip
        assert sampling.lookup is not None
        self._sampling, self._plan, self._reader, self._steps = sampling, plan, reader, steps
        self._positions, self._keep, self._grow = positions, keep, grow
        self._width = 1 + sampling.lookup.tokens
        self._worth = Worth()
        self._assistant = assistant
        self._window: Program | None = None
        self._matched = 0
        self._pays = False
        """Whether the last tokens that arrived are worth a step of several."""
        self._waiting: deque[Arrival] = deque()

    def run(self, graph: DecodeGraph, program: Program) -> DecodeGraph:
        """Generate behind the first token, which `graph.state` has; return the graph that holds the text."""
        start = graph.cache.length
        self._send(graph, start, 1)
        stopped = False
        while not stopped:
            left = self._steps - 1 - (graph.cache.length - start)
            full = graph.cache.length == graph.cache.capacity
            wanted = self._pays or self._assistant is not None
            several = wanted and left > 1 and fits(graph, self._width, self._positions)
            if self._waiting and (len(self._waiting) == AHEAD or several or full or not left):
                stopped = self._read(self._waiting.popleft(), 1)
            elif not left:
                stopped = True
            elif full:
                graph, program = self._grow(graph, left + self._width)
                self._window = None
            elif several:
                stopped = self._several(graph, left)
            else:
                self._assistant = None
                program.replay()
                self._keep(program.logits, program.scores)
                graph.cache.grow(1)
                self._send(graph, graph.cache.length, 1)
        return graph

    def _several(self, graph: DecodeGraph, left: int) -> bool:
        """Check what is drafted and return whether the generation ends with one of the new tokens."""
        window = self._window
        if window is None:
            window = self._window = graph.program(self._sampling, Window)
        if self._assistant is not None:
            self._assistant.draft(graph)
        window.replay()
        self._send(graph, graph.cache.length + 1, self._width)
        arrival = self._waiting.popleft()
        taken = arrival.more()[0]
        if self._assistant is None:
            self._worth.learn(self._matched, taken - 1)
        elif not self._assistant.pays(taken - 1):
            self._assistant = None
        taken = min(taken, left)
        if window.logits is not None and window.scores is not None:
            for number in range(taken):
                self._keep(window.logits[number : number + 1], window.scores[number : number + 1])
        graph.cache.grow(taken)
        return self._read(arrival, taken)

    def _send(self, graph: DecodeGraph, start: int, count: int) -> None:
        state = graph.state
        self._waiting.append(Arrival(graph, start, count, self._plan, state.taken, state.drafted, state.matched))

    def _read(self, arrival: Arrival, count: int) -> bool:
        """Read the first `count` tokens and what was drafted behind the last one."""
        stopped = self._reader.read(arrival.tokens()[:, :count])
        _, drafted, self._matched = arrival.more()
        self._pays = drafted > 0 and self._worth.pays(self._matched)
        return stopped


def fits(graph: DecodeGraph, width: int, positions: int | None) -> bool:
    """Return whether a cache has the slots, and the model the positions, for a step of `width` tokens."""
    end = graph.cache.length + width
    return end <= graph.cache.capacity and (positions is None or end <= positions)
