"""`generate()` with the whole decode step in one graph: a mixin for causal language models.

B rows, V vocabulary, S capacity.

The prompt is read as transformers reads it, into a preallocated cache. Then a graph holds a whole step, from the
embedding to the next token and its bookkeeping, and is replayed in chunks; the host reads the tokens of one chunk
while the next one runs. Tokens, outputs, caches and the random generator's state are those of transformers' own
loop, which runs wherever this one does not fit; `explain(model)` says why.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation import GenerationMixin

from ..cache.cache_argument import argument_of, passed_on
from ..core import backend
from ..decode.device_map import plain_inside
from ..decode.eligibility import (
    Call,
    Unsupported,
    assists,
    host_reason,
    lookup_of,
    unfit_modules,
    unsupported_reason,
    with_cache,
)
from ..decode.graph_cache import GraphStore, store_of
from ..decode.policy import GraphPolicy
from ..decode.rank_agreement import Plan, planned
from ..decode.recurrent_state import restoring
from ..sampling.sampling import Lookup
from ..tensor_parallel.shards import local
from .decode_loop import DecodeLoop, sampling_of
from .neutral_modes import decodes_alike, without_modes
from .random_states import random_states, set_random_states
from .replayed_loop import BEAMS, ReplayedModel, may_reorder
from .uncached_call import computes_alike, with_hidden_cache


class GraphGeneration(GenerationMixin):
    """Generation through a decode graph where that gives the same as transformers' own loop."""

    graph_policy: ClassVar[GraphPolicy] = GraphPolicy()

    starts_plainly: bool | None = None
    """Whether the first tokens are chosen in torch's own operators while kernels are compiled (`head_start`); None for
    where steps are captured. With False the first call's tokens are those of the second, near-ties too."""

    _step_without_graph = False
    """Take this loop on any device with the step as plain calls; for tests, where there is no GPU."""

    @classmethod
    def can_generate(cls) -> bool:
        """Return True: transformers asks whether a base is called GenerationMixin."""
        return True

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate tokens, greedily or by drawing them; arguments and result are those of transformers' loop."""
        with backend.Inside(self):
            inputs = with_cache(self, model_kwargs)
            made = inputs is not model_kwargs
            call = Call(
                input_ids, logits_processor, stopping_criteria, generation_config, streamer, synced_gpus, inputs, made
            )
            generated, reason = self._generated(with_hidden_cache(self, call))
        if reason is None:
            backend.forget_reason("generate", self)
            return generated
        backend.count_fallback("generate", reason, self)
        with backend.Inside(self), plain_inside(self):
            return super()._sample(
                input_ids,
                generation_config=generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                streamer=streamer,
                synced_gpus=synced_gpus,
                **model_kwargs,
            )

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *arguments: Any, **keywords: Any) -> Any:
        """Give the cache by the name under which `forward` takes it, which may be older than the loop's."""
        inputs = super().prepare_inputs_for_generation(*arguments, **keywords)
        if passed_on() in inputs and (name := argument_of(self)) != passed_on():
            inputs[name] = inputs.pop(passed_on())
        return inputs

    @functools.wraps(GenerationMixin._beam_search)
    def _beam_search(self, input_ids: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Search with beams, in transformers' loop over replayed steps."""
        reason: str | None = BEAMS
        if not arguments and may_reorder(self):
            with backend.Inside(self):
                call = Call.of_keywords(input_ids, keywords)
                inputs = with_cache(self, call.model_kwargs)
                call = replace(call, model_kwargs=inputs, made_cache=inputs is not call.model_kwargs)
                generated, reason = self._generated(with_hidden_cache(self, call), beams=True)
        if reason is None:
            backend.forget_reason("generate", self)
            return generated
        backend.count_fallback("generate", reason, self)
        with backend.Inside(self), plain_inside(self):
            return super()._beam_search(input_ids, *arguments, **keywords)

    @functools.wraps(GenerationMixin._assisted_decoding)  # `generate` looks which arguments it takes
    def _assisted_decoding(self, input_ids: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Check tokens that were looked up in the text, or that another model with this loop drafts."""
        with backend.Inside(self):
            generated, reason = self._drafted(input_ids, arguments, keywords)
        if reason is None:
            backend.forget_reason("generate", self)
            return generated
        backend.count_fallback("generate", str(reason), self)
        with backend.Inside(self), plain_inside(self):
            return super()._assisted_decoding(input_ids, *arguments, **keywords)

    def _drafted(self, input_ids: Tensor, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, str | None]:
        """Return what the graph's loop generates with drafts and None, or None and why transformers' runs."""
        if arguments:
            return None, "drafted"
        call = Call.of_keywords(input_ids, keywords)
        assistant = keywords.get("assistant_model")
        known = isinstance(assistant, GraphGeneration) and keywords.get("assistant_tokenizer") is None
        helps = known and assists(assistant, self, self._step_without_graph)
        drafts = lookup_of(self, call, assistant if helps else None)
        if isinstance(drafts, str):
            return None, drafts
        return self._generated(call, drafts, None if drafts.ngram else assistant)

    def _generated(
        self, call: Call, lookup: Lookup | None = None, assistant: Any = None, beams: bool = False
    ) -> tuple[Any, str | None]:
        """Return what the graph's loop generates and None, or None and why transformers' own has to run."""
        with without_modes(self) as modes, self._own_tensors() as ranks:
            store = store_of(self)
            known = store.fits and ranks is None  # of several ranks none may find out later than the others
            reason = unsupported_reason(self, call, self._step_without_graph, ranks, known)
            if lookup is not None and ranks is not None:
                reason = reason or "drafts_for_ranks"
            if reason is None and (lookup is not None or ranks is not None):
                reason = BEAMS if beams else host_reason(call)
            if modes and ranks is not None:
                reason = reason or modes.reason
            if call.without is not None and ranks is not None:
                reason = reason or "no_cache"
            plan = planned(call, ranks, reason)
            if plan.reason is not None:
                return None, plan.reason
            with plan.watched(), store.claimed(self) as ours:
                if not ours:
                    return None, "reentrant"
                if known and not store.fits and (reason := unfit_modules(self)) is not None:
                    return None, reason
                store.fits = True
                if (reason := store.refuses_code(call.cache)) is not None:
                    return None, reason
                if modes and modes.key not in store.modes_alike:
                    store.modes_alike[modes.key] = decodes_alike(self, call, modes)
                if modes and not store.modes_alike[modes.key]:
                    return None, modes.reason
                if call.without is not None and not self._computes_alike(call, store):
                    return None, "no_cache"
                drawn = random_states(call.input_ids.device)
                try:
                    with restoring(self, call.inputs):
                        if beams:
                            return ReplayedModel(self, call, store, plan, BEAMS).run(
                                GenerationMixin._beam_search
                            ), None
                        return self._chosen(call, store, plan, lookup, assistant)
                except Unsupported as unfitting:
                    set_random_states(drawn)  # what was tried may have drawn, and transformers' loop begins anew
                    return None, unfitting.reason

    def _chosen(
        self, call: Call, store: GraphStore, plan: Plan, lookup: Lookup | None, assistant: Any
    ) -> tuple[Any, str | None]:
        """Return what `_generated` does, tokens chosen in the graph where it can.

        Raises:
            Unsupported: before anything was generated, if the graph's loop cannot take the call.
        """
        reason = host_reason(call)
        sampling = sampling_of(call, lookup) if reason is None else None
        if sampling is None:
            reason = reason or "logits_processor"
            if lookup is not None or plan.ranks is not None:
                raise Unsupported(reason)
            return ReplayedModel(self, call, store, plan, reason).run(GenerationMixin._sample), None
        generation = DecodeLoop(self, call, store, plan, sampling)
        if assistant is not None:
            with store_of(assistant).claimed(assistant) as theirs:
                return (generation.run(assistant), None) if theirs else (None, "reentrant")
        return generation.run(), None

    def _computes_alike(self, call: Call, store: GraphStore) -> bool:
        """Return whether a call without a cache may have one."""
        if store.caches_alike is None:
            store.caches_alike = computes_alike(self, call)
        return store.caches_alike

    def _own_tensors(self) -> AbstractContextManager[Any]:
        """Let every module hold this rank's tensors in a `with` block, which yields the ranks, as `local` does."""
        if not torch.is_grad_enabled():
            return local(self)
        return contextlib.nullcontext()
