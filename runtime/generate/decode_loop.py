"""One call of `generate()` that takes the graph's loop, from its prompt to what it returns.

B rows, V vocabulary. A prompt is read, the step is proved where it is new, and replays follow in chunks, of which the
host reads one while the next runs. `GraphGeneration` decides which calls come here.

Reading from the start: `README.md`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from ..cache.cache_argument import NAMES, given_back
from ..cache.extra_tensors import takes_padding
from ..cache.layers import OtherContents
from ..cache.nested_tensors import UnknownState
from ..core import backend
from ..core.position_count import position_count
from ..decode.eligibility import Call, Unsupported, has_own_inputs, keeps_cache, knows_both, length_of
from ..decode.graph_cache import GraphStore, Refusal, store_of
from ..decode.rank_agreement import Plan
from ..decode.recorded_inputs import StepInputs
from ..decode.side_effects import Before
from ..decode.step_graph import DecodeGraph, Program, UnknownCache
from ..decode.token_stream import Arrival
from ..decode.validation import StepChanges, StepDiffers, StepFails, StepReads
from ..device.compile_ahead import CompilerLoading, taking_turns
from ..device.graph_capture import CAPTURING, CaptureFailed
from ..sampling.prompt_lookup import look_up
from ..sampling.sampling import Lookup, Sampling, graph_forms
from ..sampling.stop_checker import Reader
from ..speculative.draft_model import Assistant
from ..speculative.left_pad_rows import Alignment, aligns
from ..speculative.speculative_loop import DraftedLoop, fits
from ..speculative.verify_step import RaggedWindow, Window, width_of
from .call_progress import Progress
from .eager_warmup import PlainStep, has_head_start

CHUNK = 4
"""Replays between two looks at the tokens. Two chunks are under way at a time, and what was run beyond the end is
thrown away, so a longer chunk wastes more; a shorter one gains nothing (a look costs the device about 4 µs)."""
STREAMED_CHUNK = 2
_OF_THE_PROMPT = {"attention_mask", "position_ids", "token_type_ids"}
"""Inputs with an entry for every token of the prompt."""
FIRST_ROOM = 4096
"""Tokens beyond the prompt that the first cache has room for; a longer text moves to one of up to twice the size."""


class GraphLoop:
    """One call that takes the graph's loop."""

    def __init__(self, model: Any, call: Call, store: GraphStore, plan: Plan, lookup: Lookup | None = None):
        self.model, self.call, self.store, self.plan, self.lookup = model, call, store, plan, lookup
        self.batch_size, self.prompt_length = call.input_ids.shape
        self.device = call.input_ids.device
        self.captures = model.device.type == "cuda" and not model._step_without_graph
        self.dynamic = call.cache if isinstance(call.cache, DynamicCache) else DynamicCache()
        self.watches = has_own_inputs(model, call)
        self.assistant: Any = None
        """The `Assistant` that drafts."""
        self.ragged = False
        """Whether rows keep what was right of each, instead of as many drafts as the one with the fewest."""
        self.loading: CompilerLoading | None = None
        self.sampling = self._sampling()
        self.kept_logits: list[Tensor] = []
        self.kept_scores: list[Tensor] = []

    def run(self, assistant: Any = None) -> Any:
        """Generate; with drafts of an assistant whose graphs the caller holds.

        Raises:
            Unsupported: before anything was generated, if it turns out that the graph's loop cannot take the call.
        """
        if self.sampling.sample:
            self.plan.share_randomness()
        graph = self._graph()
        plainly = assistant is None and self._has_head_start(graph)
        program: Program | PlainStep | None = None
        best: Tensor | None = None
        with self._refusing(graph):
            if plainly:
                logits = self._read_plainly(graph)
            else:
                logits = self._prefill(graph)
                best = logits.argmax(-1)
                program = self._proved(graph, best, assistant)
        # From here on tokens are drawn and streamed: there is no way back.
        start = graph.cache.length
        first = self._first_token(logits, best)
        self._begin(graph, first, start)
        reader = self._reader()
        arrival = Arrival(graph.state, graph.state.sequence[:, start : start + 1], self.plan)
        progress = Progress(self.device, self.sampling.sample, arrival)
        if program is None:
            graph, program = self._decode_plainly(graph, reader, progress, start)
        graph = self._decode(graph, program, reader, progress, start)
        finished = self._finish(graph, reader, start)
        if plainly and graph.is_proved and start == self.prompt_length:
            self._capture_prompt(graph)
        return finished

    @contextlib.contextmanager
    def _refusing(self, graph: DecodeGraph) -> Iterator[None]:
        """Remember what a block finds out of a step that cannot be captured.

        Raises:
            Unsupported: in place of that.
        """
        is_new = not graph.is_proved
        before: Any = None
        if is_new:
            before = Before(self.model, [], keeps=True)
        try:
            yield
        except StepDiffers as error:
            raise self._refuse(graph, "step_differs", error=error) from error
        except StepFails as error:
            raise self._refuse(graph, "step_fails", error=error) from error
        except StepReads as error:
            if self.store.has_reread:
                raise self._refuse(graph, "step_reads", error=error) from error
            self.store.has_reread = True  # which may have been the user's doing: the next call captures anew
            self.store.drop(graph)
            raise Unsupported("step_reads") from error
        except StepChanges as error:
            if before is not None:
                before.put_back(error.changes)
            raise self._refuse(graph, "step_changes", error=error) from error
        except OtherContents as error:
            self.store.drop(graph)
            raise Unsupported("cache_contents") from error
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        except BaseException:
            if is_new:  # it may be that of layers which are not the model's
                self.store.drop(graph)
            raise
        finally:
            if is_new:
                self.store.settle(self.model, graph)

    def _proved(self, graph: DecodeGraph, tokens: Tensor, assistant: Any = None) -> Program:
        """Return the graph of a step that has been compared with the model's, of the tokens `[B]` that come next."""
        graph.prove(tokens, self.sampling)
        program = self._program(graph)
        if self.lookup is not None:
            self._prepare_window(graph, tokens)
        if assistant is not None:
            self._assist(graph, assistant)
        return program

    def _may_be_ragged(self, graph: DecodeGraph) -> bool:
        """Return whether the call leaves it open in which slots rows lie behind the prompt."""
        if self.lookup is None or self.batch_size == 1 or self.call.keeps or self.plan.keeps_cache:
            return False
        return graph.cache.knows_length and takes_padding(self.model)

    def _sampling(self) -> Sampling:
        """Return what the graph does with the logits."""
        call = self.call
        forms = graph_forms(call.processors, self.device, self.prompt_length)
        if forms is None:
            raise Unsupported("logits_processor")
        eos = pad = None
        if call.ends:
            eos = torch.cat([ids.to(self.device) for ids in call.ends]).clone()
            pad = call.config._pad_token_tensor.to(self.device).view(1).clone()
        sampling = Sampling(forms, bool(call.config.do_sample), eos, pad, call.keeps)
        if self.lookup is not None:
            if sampling.reads_ids:
                raise Unsupported("drafts_for_processor")
            sampling.lookup = self.lookup
        return sampling

    def _graph(self) -> DecodeGraph:
        """Return a graph with a cache that holds what the call continues."""
        for key in (None, self.sampling.key):
            if key in self.store.refused:
                raise Unsupported(self.store.refused[key].reason)
        if not takes_padding(self.model) and not self.call.is_unpadded:
            raise Unsupported("attention_mask")
        room = min(self.call.steps - 1, FIRST_ROOM)
        if self.lookup is not None:
            room += width_of(self.sampling)
        needed = length_of(self.dynamic) + self.prompt_length + room
        try:
            graph = self._find(needed)
            graph.cache.clear()
        except UnknownCache as error:
            raise Unsupported("cache_kind") from error
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        try:
            graph.cache.load(self.dynamic)
        except OtherContents as error:
            if not graph.is_proved:
                self.store.drop(graph)
            raise Unsupported("cache_contents") from error
        return graph

    def _find(self, needed: int) -> DecodeGraph:
        """Return a graph whose rows have room for so many tokens."""
        in_16_bits = "drafts" if self.lookup is not None else "ranks" if self.plan.ranks is not None else ""
        return self.store.find(self.model, self.batch_size, needed, self.dynamic, self.captures, in_16_bits)

    def _has_head_start(self, graph: DecodeGraph) -> bool:
        """Return whether the first tokens are chosen without kernels."""
        if self.watches or self.lookup is not None or self.plan.ranks is not None:
            return False
        return has_head_start(self.model, graph, self.store.compilations.get(self.batch_size))

    def _read_plainly(self, graph: DecodeGraph) -> Tensor:
        """Read the prompt without kernels, while the compiler is loaded; return as `_prefill` does."""
        if self.captures and self.batch_size not in self.store.compilations:
            self.loading = CompilerLoading(self.device)
        with taking_turns(), backend.plainly():
            return self._prefill(graph)

    def _prefill(self, graph: DecodeGraph) -> Tensor:
        """Read the prompt and return the logits `[B, V]` of the first token in fp32."""
        name, cache = self.call.cache_name, self._cache_for_the_prompt(graph)
        inputs, ids, past = dict(self.call.inputs), self.call.input_ids, graph.cache.length
        if not graph.carried.argument:
            inputs[name] = cache

        def ordinary() -> Tensor:
            try:
                outputs = self.model._prefill(ids, self.call.config, dict(inputs))
            except AttributeError as error:
                if not graph.cache.has_part(error.obj):
                    raise
                raise self._refuse(graph, "cache_kind", error=error) from error
            if not graph.cache.attention_layers and graph.cache.is_written:
                graph.cache.rewind(past + self.prompt_length)
            try:
                graph.carried.load(outputs)
            except UnknownState as error:
                raise self._refuse(graph, "carried_state", error=error) from error
            used = None if graph.carried.argument else given_back(outputs)
            if used is None:  # the model's own loop goes on with the one that it gave
                used = cache
            if used is not cache and isinstance(used, EncoderDecoderCache) and not self.watches:
                used = used.self_attention_cache  # a model with cross-attention may put it into a cache of both
            if used is not cache or graph.cache.length == 0:
                raise self._refuse(graph, "cache_unused")
            if self.watches:
                watched = StepInputs(self.model, outputs, ids, inputs, graph.cache)
                if not watched.sees(self.call.mask):
                    raise Unsupported("attention_mask")
                graph.watch(watched)
            logits: Tensor = outputs.logits[:, -1]
            return logits

        takes_graph = not (self.watches or backend.runs_plainly()) and self.call.is_unpadded
        graph.watch(None)
        last = graph.read_prompt(ids, ordinary, self.sampling) if takes_graph else ordinary()
        if self.sampling.reads_ids and graph.cache.length != self.prompt_length:
            raise Unsupported("processor_needs_ids")
        mask = self.call.mask
        if mask is not None and mask.shape[1] != graph.cache.length:
            raise Unsupported("attention_mask")
        if not (graph.cache.knows_length or self.call.is_unpadded):
            raise Unsupported("attention_mask")
        plain = mask is None or (mask is inputs.get("attention_mask") and self.call.is_unpadded)
        if plain and self._may_be_ragged(graph):
            mask, plain = torch.ones(self.batch_size, graph.cache.length, dtype=torch.int64, device=self.device), False
        graph.begin(self._next_position_ids(graph, mask), None if plain else mask)
        return last.to(copy=True, dtype=torch.float32)

    def _cache_for_the_prompt(self, graph: DecodeGraph) -> Cache:
        """Return what the model is given: the graph's cache, beside one of an encoder's output where it wants that."""
        if isinstance(given := self.call.inputs.get(self.call.cache_name), EncoderDecoderCache):
            cross = DynamicCache()
            cross.layers = [copy.copy(layer) for layer in given.cross_attention_cache.layers]
            cross.layer_class_to_replicate = given.cross_attention_cache.layer_class_to_replicate
            return EncoderDecoderCache(graph.cache, cross)
        return graph.cache

    def _next_position_ids(self, graph: DecodeGraph, mask: Tensor | None) -> Tensor | int:
        """Return `[B or 1, 1]`, or one number for all rows."""
        own = not self.watches and graph.cache.length == self.prompt_length
        if own and self.call.is_unpadded and (mask is None or mask is self.call.inputs.get("attention_mask")):
            return self.prompt_length
        given = None if self.watches else self.call.inputs.get("position_ids")
        if given is not None:
            return given[:, -1:] + 1
        if mask is not None:
            return mask.long().sum(-1, keepdim=True)
        return graph.cache.length

    def _program(self, graph: DecodeGraph) -> Program:
        try:
            return graph.program(self.sampling)
        except CaptureFailed as error:
            # Was it the model, or what follows it? Without processors it may yet be captured.
            key = self.sampling.key if self.sampling.forms else None
            raise self._refuse(graph, "step_not_capturable", key, error) from error

    def _prepare_window(self, graph: DecodeGraph, token: Tensor) -> None:
        """Try and capture the step of several tokens, where there is room for one behind the prompt."""
        width = width_of(self.sampling)
        if not fits(graph, width, self._positions()):
            return
        several = token[:, None] + torch.arange(width, device=self.device)
        several %= self.model.config.get_text_config(decoder=True).vocab_size
        try:
            graph.prove(several, self.sampling)
            self.ragged = self._may_be_ragged(graph) and aligns(graph, several)
            graph.program(self.sampling, RaggedWindow if self.ragged else Window)
            if self.ragged:
                graph.program(self.sampling, Alignment)
        except StepDiffers as error:
            raise self._refuse(graph, "drafts_differ", self.sampling.key, error) from error
        except (StepFails, CaptureFailed) as error:
            raise self._refuse(graph, "drafts_fail", self.sampling.key, error) from error

    def _assist(self, graph: DecodeGraph, model: Any) -> None:
        """Let an assistant read the prompt, where it has the positions for all that the graph has room for."""
        assert self.lookup is not None
        room = graph.cache.capacity - self.prompt_length
        positions = position_count(model.config.get_text_config(decoder=True))
        if graph.cache.length != self.prompt_length or (positions is not None and positions < graph.cache.capacity):
            raise Unsupported("drafted")
        ids, mask = self.call.input_ids, self.call.mask
        self.assistant = Assistant(
            model, self.model, store_of(model), ids, mask, room, tokens=self.lookup.tokens, captures=self.captures
        )
        self.ragged = self.ragged and self.assistant.aligns()

    def _decode_drafted(self, graph: DecodeGraph, program: Program, reader: Reader, lookup: Lookup) -> DecodeGraph:
        if lookup.ngram:
            look_up(graph.state, lookup, self.sampling.eos)
        loop = DraftedLoop(
            self.sampling, self.plan, reader, self.call.steps, self._positions(), self._keep, self._grow,
            ragged=self.ragged, assistant=self.assistant,
        )  # fmt: skip
        return loop.run(graph, program)

    def _positions(self) -> int | None:
        return position_count(self.model.config.get_text_config(decoder=True))

    def _refuse(
        self, graph: DecodeGraph, reason: str, key: Hashable = None, error: Exception | None = None
    ) -> Unsupported:
        """Remember that the model cannot, or not with the sampling `key`, and return what to raise."""
        self.store.refused[key] = Refusal(reason, "" if error is None else str(error))
        self.store.drop(graph)
        return Unsupported(reason)

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> Exception:
        """Give everything back and return what to raise: other ranks would wait for this one's step."""
        self.store.release()
        return Unsupported("out_of_memory") if self.plan.ranks is None else error

    def _first_token(self, logits: Tensor, best: Tensor | None) -> Tensor:
        """Return `[B]`, chosen from the prompt's logits as transformers does; `best` are the largest if known."""
        scores = self.call.processors(self.call.input_ids, logits)
        self._keep(logits, scores)
        if not self.sampling.sample:
            return best if best is not None and scores is logits else torch.argmax(scores, dim=-1)
        with CAPTURING:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    def _begin(self, graph: DecodeGraph, first: Tensor, start: int) -> None:
        """Put the first token where the first replay expects it."""
        state = graph.state
        state.input_ids.copy_(first[:, None])
        # Processors that ask which tokens a row has see no other than these in the slots to come.
        state.sequence.copy_(first[:, None])
        if self.sampling.reads_ids:
            state.sequence[:, :start] = self.call.input_ids
        state.length_offset.fill_(self.prompt_length - start + 1)
        state.behind.zero_()
        state.most.fill_(self.prompt_length + self.call.steps)
        if self.sampling.eos is not None:
            state.finished.copy_((first[:, None] == self.sampling.eos).any(dim=-1))

    def _reader(self) -> Reader:
        pad = None if self.sampling.pad is None else int(self.call.config._pad_token_tensor)
        call = self.call
        return Reader(call.input_ids, call.steps, call.criteria, pad, call.has_stop_strings, call.streamer)

    def _decode_plainly(
        self, graph: DecodeGraph, reader: Reader, progress: Progress, start: int
    ) -> tuple[DecodeGraph, Program | PlainStep]:
        """Take plain steps until the kernels are there; return the graph, and the step with which to go on."""
        step, steps = PlainStep(graph, self.sampling), self.call.steps
        compilation = self.store.compilations.get(self.batch_size)
        with taking_turns():
            progress.read(reader)
            if compilation is None:
                self._take(graph, step, 1, progress, start)  # makes what the model computes once and keeps
                if not progress.stopped:
                    progress.read(reader)
                compilation = graph.compiling(self.prompt_length, self.sampling, self.loading)
                self.store.compilations[self.batch_size] = compilation
            while not (progress.stopped or progress.made == steps or compilation.is_done() or graph.cache.is_full):
                self._take(graph, step, 1, progress, start)
                progress.read(reader)
        if progress.stopped or progress.made == steps:
            return graph, step
        compilation.wait()
        if graph.cache.is_full:
            graph = self._larger(graph, steps - progress.made)
        try:
            with self._refusing(graph):
                if self.captures:
                    torch.cuda.empty_cache()  # what only plain calls needed
                return graph, self._proved(graph, graph.state.input_ids[:, 0])
        except Unsupported as unfitting:
            backend.count_fallback("generate", unfitting.reason, self.model)
            return graph, PlainStep(graph, self.sampling)

    def _take(
        self, graph: DecodeGraph, program: Program | PlainStep, count: int, progress: Progress, start: int
    ) -> None:
        """Take steps, whose tokens will arrive together."""
        for _ in range(count):
            program.replay()
            progress.mark()
            self._keep(program.logits, program.scores)
        graph.cache.grow(count)
        first = start + progress.made
        progress.waiting.append(Arrival(graph.state, graph.state.sequence[:, first : first + count], self.plan))
        progress.made += count

    def _decode(
        self, graph: DecodeGraph, program: Program | PlainStep, reader: Reader, progress: Progress, start: int
    ) -> DecodeGraph:
        """Replay until the reader has seen the end; return the graph that holds it."""
        if self.lookup is not None:
            assert isinstance(program, Program)
            return self._decode_drafted(graph, program, reader, self.lookup)
        steps, waiting = self.call.steps, progress.waiting
        chunk, ahead = STREAMED_CHUNK if self.plan.streams else CHUNK, 2
        outlives = self.plan.keeps_cache or graph.carried.argument in self.call.inputs
        if graph.carried.always_outlive or (outlives and (graph.cache.stateful_layers or graph.carried)):
            chunk, ahead = 1, 1  # states cannot go back to the end
        while not progress.stopped and (progress.made < steps or waiting):
            if progress.made == steps or len(waiting) == ahead:
                progress.read(reader)
                continue
            if graph.cache.is_full:
                while waiting and not progress.stopped:
                    progress.read(reader)
                if not progress.stopped:
                    graph, program = self._grow(graph, steps - progress.made, program)
                continue
            count = min(chunk, steps - progress.made, graph.cache.capacity - graph.cache.length)
            self._take(graph, program, 1 if isinstance(program, PlainStep) else count, progress, start)
        progress.restore(reader.count)
        return graph

    def _grow(
        self, graph: DecodeGraph, room: int, program: Program | PlainStep | None = None
    ) -> tuple[DecodeGraph, Any]:
        """Move to a larger cache, with a graph of its own, or with plain steps after such."""
        larger = self._larger(graph, room)
        if isinstance(program, PlainStep):
            return larger, PlainStep(larger, self.sampling)
        return larger, larger.program(self.sampling)

    def _larger(self, graph: DecodeGraph, room: int) -> DecodeGraph:
        """Move to a larger cache."""
        capacity = graph.cache.capacity
        needed = capacity + min(room, capacity)
        larger = self._find(needed)
        larger.cache.clear()
        larger.take_over(graph)
        self.store.drop(graph)
        return larger

    def _capture_prompt(self, graph: DecodeGraph) -> None:
        """Read the prompt once more, as the next call will: that captures it."""
        rows, tokens = self.call.input_ids.shape
        if graph.carried or graph.prompts.length_for(rows, tokens, graph.cache.capacity) is None:
            return
        graph.cache.clear()
        before = Before(self.model, [], keeps=True)
        try:
            self._prefill(graph)
        except torch.OutOfMemoryError:
            self.store.release()
        if (changes := before.changes()) is not None:  # a model that counts its calls, say
            before.put_back(changes)

    def _finish(self, graph: DecodeGraph, reader: Reader, start: int) -> Any:
        """Return what transformers' loop returns."""
        call, count = self.call, reader.count
        length = start + count - 1
        if reader.edited:
            sequences = torch.cat(
                [call.input_ids, reader.ids[:, self.prompt_length :][:, :count].to(self.device)], dim=-1
            )
        else:
            sequences = torch.cat([call.input_ids, graph.state.sequence[:, start : start + count]], dim=-1)
        carried = graph.carried.leave() if graph.carried else None
        if keeps_cache(call):
            graph.cache.store(self.dynamic, length, drafted=self.lookup is not None)
            if graph.watched is not None:
                graph.watched.store(call.inputs.get(call.cache_name))
        if call.streamer is not None:
            call.streamer.end()
        if not call.config.return_dict_in_generate:
            return sequences
        kept: dict[str, Any] = {
            "sequences": sequences,
            "scores": tuple(self.kept_scores[:count]) if call.config.output_scores else None,
            "logits": tuple(self.kept_logits[:count]) if call.config.output_logits else None,
        }
        encodes = self.model.config.is_encoder_decoder
        output = GenerateEncoderDecoderOutput if encodes else GenerateDecoderOnlyOutput
        cached = NAMES[0] if NAMES[0] in output.__dataclass_fields__ else NAMES[1]
        states_alone = graph.carried.argument and not isinstance(call.cache, Cache)
        return output(**kept, **{cached: carried if states_alone else self._returned_cache()})

    def _returned_cache(self) -> Any:
        """Return the cache as the model gives it back: one with cross-attention may put a growing one into another."""
        given = self.call.inputs[self.call.cache_name]
        if type(given) is DynamicCache:
            return self._wrapped(given)
        return given

    def _wrapped(self, given: DynamicCache) -> Cache:
        call, config = self.call, self.model.config
        may_wrap = (
            knows_both(self.model) and not config.is_encoder_decoder and getattr(config, "add_cross_attention", True)
        )
        if not may_wrap or self.store.gives_back_plain:
            return given
        beside = {name: value for name, value in call.inputs.items() if name not in _OF_THE_PROMPT}
        one = self.model._prefill(call.input_ids[:, :1], call.config, {**beside, call.cache_name: DynamicCache()})
        returned = given_back(one)
        if not isinstance(returned, EncoderDecoderCache):
            self.store.gives_back_plain = True
            return given
        returned.self_attention_cache = given
        return returned

    def _keep(self, logits: Tensor | None, scores: Tensor | None) -> None:
        if self.call.keeps and logits is not None and scores is not None:
            if self.call.config.output_logits:
                self.kept_logits.append(logits.clone())
            if self.call.config.output_scores:
                self.kept_scores.append(scores.clone())
