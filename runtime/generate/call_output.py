"""What one call of `generate()` returns: tokens, what was kept of every step, and the cache that it leaves.

B rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..cache.cache_argument import NAMES, given_back
from ..decode.eligibility import Call, keeps_cache, knows_both
from ..decode.graph_cache import GraphStore
from ..decode.step_graph import DecodeGraph
from ..sampling.stop_checker import Reader

_OF_THE_PROMPT = {"attention_mask", "position_ids", "token_type_ids"}
"""Inputs with an entry for every token of the prompt."""


class CallOutput:
    """What one call returns.

    Args:
        model: that generates.
        call: its arguments.
        store: of its graphs.
    """

    def __init__(self, model: Any, call: Call, store: GraphStore):
        self._model, self._call, self._store = model, call, store
        self.dynamic = call.cache if isinstance(call.cache, DynamicCache) else DynamicCache()
        """A growing cache that gets what the graph's holds in the end."""
        self._logits: list[Tensor] = []
        self._scores: list[Tensor] = []

    def keep(self, logits: Tensor | None, scores: Tensor | None) -> None:
        """Keep copies of a token's logits and scores `[B, V]`, as far as the call wants them."""
        if self._call.keeps and logits is not None and scores is not None:
            if self._call.config.output_logits:
                self._logits.append(logits.clone())
            if self._call.config.output_scores:
                self._scores.append(scores.clone())

    def finish(self, graph: DecodeGraph, reader: Reader, start: int, drafted: bool) -> Any:
        """Return what transformers' loop returns, and leave caches as it does.

        Args:
            graph: that holds the text.
            reader: of its tokens.
            start: number of tokens before the first that was generated.
            drafted: whether tokens behind the end may be in the cache.
        """
        call, count = self._call, reader.count
        sequences = self._sequences(graph, reader, start)
        carried = self.leave(graph, start + count - 1, drafted)
        if call.streamer is not None:
            call.streamer.end()
        if not call.config.return_dict_in_generate:
            return sequences
        kept: dict[str, Any] = {
            "sequences": sequences,
            "scores": tuple(self._scores[:count]) if call.config.output_scores else None,
            "logits": tuple(self._logits[:count]) if call.config.output_logits else None,
        }
        encodes = self._model.config.is_encoder_decoder
        output = GenerateEncoderDecoderOutput if encodes else GenerateDecoderOnlyOutput
        cached = NAMES[0] if NAMES[0] in output.__dataclass_fields__ else NAMES[1]
        return output(**kept, **{cached: carried if self.has_states_alone(graph) else self.returned_cache()})

    def has_states_alone(self, graph: DecodeGraph) -> bool:
        """Whether what a call leaves is states that `forward` gives back, and no cache."""
        return bool(graph.carried.argument) and not isinstance(self._call.cache, Cache)

    def leave(self, graph: DecodeGraph, length: int, drafted: bool = False) -> Any:
        """Let a cache that outlives the call hold the first `length` tokens of a graph's; return states beside it."""
        carried = graph.carried.leave() if graph.carried else None
        if keeps_cache(self._call):
            graph.cache.store(self.dynamic, length, drafted=drafted)
            if graph.call.watched is not None:
                graph.call.watched.store(self._call.inputs.get(self._call.cache_name))
        return carried

    def _sequences(self, graph: DecodeGraph, reader: Reader, start: int) -> Tensor:
        """Return the prompt and the tokens, as the host has them where it padded some."""
        prompt, count = self._call.input_ids, reader.count
        if reader.edited:
            made = reader.ids[:, prompt.shape[1] :][:, :count].to(prompt.device)
        else:
            made = graph.state.sequence[:, start : start + count]
        return torch.cat([prompt, made], dim=-1)

    def returned_cache(self) -> Any:
        """Return the cache as the model gives it back: one with cross-attention may put a growing one into another."""
        if self._call.without is not None:
            return None
        given = self._call.inputs[self._call.cache_name]
        if type(given) is DynamicCache:
            return self._wrapped(given)
        return given

    def _wrapped(self, given: DynamicCache) -> Cache:
        call, config = self._call, self._model.config
        may_wrap = (
            knows_both(self._model) and not config.is_encoder_decoder and getattr(config, "add_cross_attention", True)
        )
        if not may_wrap or self._store.gives_back_plain:
            return given
        beside = {name: value for name, value in call.inputs.items() if name not in _OF_THE_PROMPT}
        one = self._model._prefill(call.input_ids[:, :1], call.config, {**beside, call.cache_name: DynamicCache()})
        returned = given_back(one)
        if not isinstance(returned, EncoderDecoderCache):
            self._store.gives_back_plain = True
            return given
        returned.self_attention_cache = given
        return returned
