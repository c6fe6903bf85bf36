"""transformers' own loop over replayed steps: for calls whose tokens are chosen by what only the host can run.

B rows, V vocabulary. Beams, a caller's processors and stopping criteria, and whatever else that loop does with the
logits stay what they are: it is given something that stands for the model, which reads the prompt into a graph's cache
and replays the graph of a step for each token. A token costs the device's step and what the host does with its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutput

from ..cache.cache_argument import NAMES
from ..core import backend
from ..decode.eligibility import Call, Unsupported
from ..decode.graph_cache import GraphStore
from ..decode.rank_agreement import Plan
from ..decode.step_graph import DecodeGraph, Program
from .call_graphs import CallGraphs
from .call_output import CallOutput
from .call_prefill import CallPrefill

BEAMS = "beams"
"""Why a search with beams is the host's."""
OPERATOR = "tokens"
"""What `explain(model)` calls the choice of tokens where the host makes it."""


class ReplayedModel:
    """Stands for a model in transformers' loop of one call; all that it does not say itself is the model's.

    Args:
        model: that generates.
        call: its arguments.
        store: of its graphs.
        plan: of the call.
        reason: why its tokens are chosen on the host, a key of `loop_reasons.REASONS`.
    """

    def __init__(self, model: Any, call: Call, store: GraphStore, plan: Plan, reason: str):
        self._model, self._call, self._reason = model, call, reason
        self._output = CallOutput(model, call, store)
        self._graphs = CallGraphs(model, call, store, plan, None, self._output.dynamic)
        self._prompt = CallPrefill(model, call, None, self._graphs)
        self._graph: DecodeGraph | None = None
        self._program: Program | None = None

    def run(self, loop: Callable[..., Any]) -> Any:
        """Return what `loop`, a method of transformers' mixin, returns.

        Args:
            loop: takes the model and the arguments of the call.

        Raises:
            Unsupported: before anything was generated, if the step runs in no graph.
        """
        call = self._call
        keywords = dict(call.model_kwargs)
        if loop is GenerationMixin._sample:  # a search with beams streams nothing
            keywords["streamer"] = call.streamer
        try:
            found = loop(
                self,
                call.input_ids,
                logits_processor=call.processors,
                stopping_criteria=call.criteria,
                generation_config=call.config,
                synced_gpus=call.synced_gpus,
                **keywords,
            )
        except BaseException:  # of a caller's processor, say
            if self._graph is not None:
                self._output.leave(self._graph, self._graph.cache.length)
            raise
        assert self._graph is not None
        self._output.leave(self._graph, self._graph.cache.length)
        if call.config.return_dict_in_generate:
            cached = {name: self._output.returned_cache() for name in found.keys() & {*NAMES}}
            found = type(found)(**{**found, **cached})
        backend.count_fallback(OPERATOR, self._reason, self._model)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prefill(self, *_: Any, **__: Any) -> CausalLMOutput:
        """Read the prompt, and make the graph of a step where one follows."""
        graph = self._graphs.first()
        returned = self._call.config.return_dict_in_generate and self._output.has_states_alone(graph)
        if graph.carried and (returned or self._reason == BEAMS):
            raise Unsupported(self._reason)
        steps = self._call.steps > 1
        with self._graphs.refusing(graph, steps):
            logits = self._prompt.read(graph)
            if steps:
                graph.prove(logits.argmax(-1))
                self._program = self._graphs.program(graph)
        self._graph = graph
        return _outputs(logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, *_: Any, **__: Any) -> dict[str, Tensor]:
        """Return the token `[B]` that a step reads."""
        return {"tokens": input_ids[:, -1]}

    def __call__(self, tokens: Tensor, **_: Any) -> CausalLMOutput:
        """Replay a step."""
        assert self._graph is not None
        assert self._program is not None
        graph, length = self._graph, self._graph.cache.length
        if graph.cache.is_full:
            made = length - self._call.input_ids.shape[1]
            graph = self._graph = self._graphs.larger(graph, max(1, self._call.steps - made))
            self._program = self._graphs.program(graph)
        graph.state.input_ids.copy_(tokens[:, None])
        self._program.replay()
        graph.cache.grow(1)
        assert self._program.logits is not None
        return _outputs(self._program.logits)

    def _update_model_kwargs_for_generation(self, _: Any, model_kwargs: dict[str, Any], **__: Any) -> dict[str, Any]:
        """Return what a step is given besides its token: the graph knows."""
        return model_kwargs

    def _reorder_cache(self, cache: Any, beam_idx: Tensor) -> Any:
        """Let each row go on with the text of row `beam_idx [B]`; what else rows have, beams of one text share."""
        assert self._graph is not None
        self._graph.cache.reorder_cache(beam_idx)
        return cache


def may_reorder(model: Any) -> bool:
    """Return whether a search with beams is transformers' own, and takes rows of a cache as layers have them."""
    own = hasattr(model, "_reorder_cache")
    kinds = [kind for kind in type(model).__mro__ if "_beam_search" in vars(kind)]
    return not own and "_beam_search" not in vars(model) and kinds[1:] == [GenerationMixin]


def _outputs(logits: Tensor) -> CausalLMOutput:
    """Return what a forward gives that computes the logits `[B, V]` of one token."""
    return CausalLMOutput(logits=logits[:, None])
