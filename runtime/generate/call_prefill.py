"""Reads the prompt of one call of `generate()` into a graph's cache.

B rows, n tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..cache.cache_argument import given_back
from ..cache.nested_tensors import UnknownState
from ..core import backend
from ..decode.eligibility import Call, Unsupported, has_own_inputs
from ..decode.recorded_inputs import StepInputs
from ..decode.step_graph import DecodeGraph
from ..sampling.sampling import Sampling
from .call_graphs import CallGraphs
from .drafting import Drafting


class CallPrefill:
    """The prompt of one call.

    Args:
        model: that generates.
        call: its arguments.
        sampling: what follows the logits; None for nothing.
        graphs: of the call.
        drafting: how tokens are drafted; None for not at all.
    """

    def __init__(
        self, model: Any, call: Call, sampling: Sampling | None, graphs: CallGraphs, drafting: Drafting | None = None
    ):
        self._model, self._call, self._sampling, self._graphs = model, call, sampling, graphs
        self._drafting = drafting
        self.watches = has_own_inputs(model, call)
        """Whether the model's own loop is watched for what it gives its steps."""

    def read(self, graph: DecodeGraph) -> Tensor:
        """Read the prompt and return the logits `[B, V]` of the first token in fp32."""
        call, ids, cache = self._call, self._call.input_ids, self._cache_for(graph)
        inputs = dict(call.inputs)
        if not graph.carried.argument:
            inputs[call.cache_name] = cache
        past = graph.cache.length

        def ordinary() -> Tensor:
            return self._read_ordinarily(graph, inputs, cache, past)

        takes_graph = not (self.watches or backend.runs_plainly()) and call.is_unpadded
        graph.watch(None)
        last = graph.read_prompt(ids, ordinary, self._sampling) if takes_graph else ordinary()
        length, mask = graph.cache.length, call.mask
        if self._sampling is not None and self._sampling.reads_ids and length != ids.shape[1]:
            raise Unsupported("processor_needs_ids")
        if mask is not None and mask.shape[1] != length:
            raise Unsupported("attention_mask")
        plain = mask is None or (mask is inputs.get("attention_mask") and call.is_unpadded)
        if plain and self._drafting is not None and self._drafting.may_be_ragged():
            mask, plain = torch.ones(len(ids), length, dtype=torch.int64, device=ids.device), False
        graph.begin(self._next_position_ids(graph, mask), None if plain else mask)
        return last.to(copy=True, dtype=torch.float32)

    def _read_ordinarily(self, graph: DecodeGraph, inputs: dict[str, Any], cache: Cache, past: int) -> Tensor:
        """Read the prompt without a graph, behind `past` tokens, and return the logits `[B, V]` of its last one."""
        call, ids = self._call, self._call.input_ids
        try:
            outputs = self._model._prefill(ids, call.config, dict(inputs))
        except AttributeError as error:
            if not graph.cache.has_part(error.obj):
                raise
            raise self._graphs.refuse(graph, "cache_kind", error=error) from error
        if not graph.cache.attention_layers and graph.cache.is_written:
            graph.cache.rewind(past + ids.shape[1])
        try:
            graph.carried.load(outputs)
        except UnknownState as error:
            raise self._graphs.refuse(graph, "carried_state", error=error) from error
        used = None if graph.carried.argument else given_back(outputs)
        if used is None:  # the model's own loop goes on with the one that it gave
            used = cache
        if used is not cache and isinstance(used, EncoderDecoderCache) and not self.watches:
            used = used.self_attention_cache  # a model with cross-attention may put it into a cache of both
        if used is not cache or graph.cache.length == 0:
            raise self._graphs.refuse(graph, "cache_unused")
        if self.watches:
            watched = StepInputs(self._model, outputs, ids, inputs, graph.cache)
            if not watched.sees(call.mask):
                raise Unsupported("attention_mask")
            graph.watch(watched)
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _cache_for(self, graph: DecodeGraph) -> Cache:
        """Return what the model is given: the graph's cache, beside one of an encoder's output where it wants that."""
        if isinstance(given := self._call.inputs.get(self._call.cache_name), EncoderDecoderCache):
            cross = DynamicCache()
            cross.layers = [copy.copy(layer) for layer in given.cross_attention_cache.layers]
            cross.layer_class_to_replicate = given.cross_attention_cache.layer_class_to_replicate
            return EncoderDecoderCache(graph.cache, cross)
        return graph.cache

    def _next_position_ids(self, graph: DecodeGraph, mask: Tensor | None) -> Tensor | int:
        """Return `[B or 1, 1]`, or one number for all rows."""
        call, length = self._call, self._call.input_ids.shape[1]
        own = not self.watches and graph.cache.length == length
        if own and call.is_unpadded and (mask is None or mask is call.inputs.get("attention_mask")):
            return length
        given = None if self.watches else call.inputs.get("position_ids")
        if given is not None:
            return given[:, -1:] + 1
        if mask is not None:
            return mask.long().sum(-1, keepdim=True)
        return graph.cache.length
