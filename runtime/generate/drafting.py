"""The drafts of one call of `generate()`: whether several tokens a step can be checked, and who drafts them.

B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.position_count import position_count
from ..decode.eligibility import Call, Unsupported
from ..decode.graph_cache import store_of
from ..decode.rank_agreement import Plan
from ..decode.step_graph import DecodeGraph, Program
from ..decode.validation import StepDiffers, StepFails
from ..device.graph_capture import CaptureFailed
from ..sampling.prompt_lookup import look_up
from ..sampling.sampling import Lookup, Sampling
from ..sampling.stop_checker import Reader
from ..speculative.draft_model import Assistant
from ..speculative.left_pad_rows import Alignment, aligns
from ..speculative.speculative_loop import DraftedLoop, fits
from ..speculative.verify_step import RaggedWindow, Window, width_of
from .call_graphs import CallGraphs


class Drafting:
    """How one call drafts.

    Args:
        model: that generates.
        call: its arguments.
        plan: of the call.
        sampling: what follows the logits, with its `lookup`.
        graphs: of the call.
    """

    def __init__(self, model: Any, call: Call, plan: Plan, sampling: Sampling, graphs: CallGraphs):
        assert sampling.lookup is not None
        self._lookup: Lookup = sampling.lookup
        self._model, self._call, self._plan, self._sampling, self._graphs = model, call, plan, sampling, graphs
        self._assistant: Assistant | None = None
        self._ragged = False
        """Whether rows keep what was right of each, instead of as many drafts as the one with the fewest."""

    def may_be_ragged(self) -> bool:
        """Return whether the call leaves it open in which slots rows lie behind the prompt."""
        return not (self._call.input_ids.shape[0] == 1 or self._call.keeps or self._plan.keeps_cache)

    def prepare(self, graph: DecodeGraph, token: Tensor) -> None:
        """Try and capture the step of several tokens, where there is room for one behind the prompt.

        Args:
            graph: that has read the prompt.
            token: `[B]` that comes next.
        """
        width = width_of(self._sampling)
        if not fits(graph, width, self._positions()):
            return
        several = token[:, None] + torch.arange(width, device=token.device)
        several %= self._model.config.get_text_config(decoder=True).vocab_size
        try:
            graph.prove(several, self._sampling)
            self._ragged = self.may_be_ragged() and aligns(graph, several)
            graph.program(self._sampling, RaggedWindow if self._ragged else Window)
            if self._ragged:
                graph.program(self._sampling, Alignment)
        except StepDiffers as error:
            raise self._graphs.refuse(graph, "drafts_differ", self._sampling.key, error) from error
        except (StepFails, CaptureFailed) as error:
            raise self._graphs.refuse(graph, "drafts_fail", self._sampling.key, error) from error

    def assist(self, graph: DecodeGraph, model: Any) -> None:
        """Let an assistant read the prompt, where it has the positions for all that the graph has room for."""
        ids, capacity = self._call.input_ids, graph.cache.capacity
        positions = position_count(model.config.get_text_config(decoder=True))
        if graph.cache.length != ids.shape[1] or (positions is not None and positions < capacity):
            raise Unsupported("drafted")
        self._assistant = Assistant(
            model, self._model, store_of(model), ids, self._call.mask, capacity - ids.shape[1],
            tokens=self._lookup.tokens, captures=self._graphs.captures,
        )  # fmt: skip
        self._ragged = self._ragged and self._assistant.aligns()

    def decode(
        self,
        graph: DecodeGraph,
        program: Program,
        reader: Reader,
        keep: Callable[[Tensor | None, Tensor | None], None],
    ) -> DecodeGraph:
        """Replay until the reader has seen the end; return the graph that holds it."""
        if self._lookup.ngram:
            look_up(graph.state, self._lookup, self._sampling.eos)
        loop = DraftedLoop(
            self._sampling, self._plan, reader, self._call.steps, self._positions(), keep, self._grow,
            ragged=self._ragged, assistant=self._assistant,
        )  # fmt: skip
        return loop.run(graph, program)

    def _grow(self, graph: DecodeGraph, room: int) -> tuple[DecodeGraph, Program]:
        larger = self._graphs.larger(graph, room)
        return larger, larger.program(self._sampling)

    def _positions(self) -> int | None:
        return position_count(self._model.config.get_text_config(decoder=True))
