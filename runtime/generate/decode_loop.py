"""One call of `generate()` that takes the graph's loop, from its prompt to what it returns.

B rows, V vocabulary. A prompt is read, the step is proved where it is new, and replays follow in chunks, of which the
host reads one while the next runs. `GraphGeneration` decides which calls come here.

Reading from the start: `README.md`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core import backend
from ..decode.eligibility import Call, Unsupported
from ..decode.graph_cache import GraphStore
from ..decode.rank_agreement import Plan
from ..decode.side_effects import Before
from ..decode.step_graph import DecodeGraph, Program
from ..decode.token_stream import Arrival
from ..device.compile_ahead import CompilerLoading, taking_turns
from ..device.graph_capture import CAPTURING
from ..sampling.sampling import Lookup, Sampling, graph_forms
from ..sampling.stop_checker import Reader
from .call_graphs import CallGraphs
from .call_output import CallOutput
from .call_prefill import CallPrefill
from .call_progress import Progress
from .drafting import Drafting
from .eager_warmup import PlainStep, has_head_start

CHUNK = 4
"""Replays between two looks at the tokens. Two chunks are under way at a time, and what was run beyond the end is
thrown away, so a longer chunk wastes more; a shorter one gains nothing (a look costs the device about 4 µs)."""
STREAMED_CHUNK = 2


class DecodeLoop:
    """One call that takes the graph's loop; `sampling` is how it chooses tokens."""

    def __init__(self, model: Any, call: Call, store: GraphStore, plan: Plan, sampling: Sampling):
        self.model, self.call, self.store, self.plan, self.sampling = model, call, store, plan, sampling
        self.output = CallOutput(model, call, store)
        self.graphs = CallGraphs(model, call, store, plan, sampling, self.output.dynamic)
        drafts = sampling.lookup is not None
        self.drafting = Drafting(model, call, plan, sampling, self.graphs) if drafts else None
        self.prompt = CallPrefill(model, call, self.sampling, self.graphs, self.drafting)
        self.loading: CompilerLoading | None = None
        self.progress: Progress | None = None

    def run(self, assistant: Any = None) -> Any:
        """Generate; with drafts of an assistant whose graphs the caller holds.

        Raises:
            Unsupported: before anything was generated, if it turns out that the graph's loop cannot take the call.
        """
        if self.sampling.sample:
            self.plan.share_randomness()
        graph = self.graphs.first()
        plainly = assistant is None and self._has_head_start(graph)
        program: Program | PlainStep | None = None
        best: Tensor | None = None
        with self.graphs.refusing(graph):
            if plainly:
                logits = self._read_plainly(graph)
            else:
                logits = self.prompt.read(graph)
                best = logits.argmax(-1)
                program = self._proved(graph, best, assistant)
        # From here on tokens are drawn and streamed: there is no way back.
        with self._left_behind():
            progress = self.progress = self._begin(graph, self._first_token(logits, best))
            if program is None:
                graph, program = self._decode_plainly(graph, progress)
            if self.drafting is not None:
                assert isinstance(program, Program)
                graph = self.drafting.decode(graph, program, progress.reader, self.output.keep)
            else:
                graph = self._decode(graph, program, progress)
        finished = self.output.finish(graph, progress.reader, progress.start, self.drafting is not None)
        if plainly and graph.validator.has_proved and progress.start == self.call.input_ids.shape[1]:
            self._capture_prompt(graph)
        return finished

    @contextlib.contextmanager
    def _left_behind(self) -> Iterator[None]:
        """Where a caller's streamer or criterion raises in the block, leave cache and generator as transformers' loop.

        That has read the tokens up to the one before that was made last.
        """
        try:
            yield
        except BaseException:
            graph, progress = self.graphs.held, self.progress
            assert graph is not None
            length = graph.cache.length
            if progress is not None and progress.reader.count:
                length = progress.start + progress.reader.count - 1
                progress.restore()
            self.output.leave(graph, length, self.drafting is not None)
            raise

    def _has_head_start(self, graph: DecodeGraph) -> bool:
        """Return whether the first tokens are chosen without kernels."""
        if self.prompt.watches or self.drafting is not None or self.plan.ranks is not None:
            return False
        return has_head_start(self.model, graph, self.store.compilations.get(graph.cache.batch_size))

    def _read_plainly(self, graph: DecodeGraph) -> Tensor:
        """Read the prompt without kernels, while the compiler is loaded; return as `CallPrefill.read` does."""
        if self.graphs.captures and graph.cache.batch_size not in self.store.compilations:
            self.loading = CompilerLoading(self.call.input_ids.device)
        with taking_turns(), backend.plainly():
            return self.prompt.read(graph)

    def _proved(self, graph: DecodeGraph, tokens: Tensor, assistant: Any = None) -> Program:
        """Return the graph of a step that has been compared with the model's, of the tokens `[B]` that come next."""
        graph.prove(tokens, self.sampling)
        program = self.graphs.program(graph)
        if self.drafting is not None:
            self.drafting.prepare(graph, tokens)
            if assistant is not None:
                self.drafting.assist(graph, assistant)
        return program

    def _first_token(self, logits: Tensor, best: Tensor | None) -> Tensor:
        """Return `[B]`, chosen from the prompt's logits as transformers does; `best` are the largest if known."""
        scores = self.call.processors(self.call.input_ids, logits)
        self.output.keep(logits, scores)
        if not self.sampling.sample:
            return best if best is not None and scores is logits else torch.argmax(scores, dim=-1)
        with CAPTURING:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    def _begin(self, graph: DecodeGraph, first: Tensor) -> Progress:
        """Put the first token `[B]` where the first replay expects it, and send it to the host."""
        call, sampling, state, start = self.call, self.sampling, graph.state, graph.cache.length
        length = call.input_ids.shape[1]
        state.input_ids.copy_(first[:, None])
        # Processors that ask which tokens a row has see no other than these in the slots to come.
        state.sequence.copy_(first[:, None])
        if sampling.reads_ids:
            state.sequence[:, :start] = call.input_ids
        state.length_offset.fill_(length - start + 1)
        state.behind.zero_()
        state.most.fill_(length + call.steps)
        if sampling.eos is not None:
            state.finished.copy_((first[:, None] == sampling.eos).any(dim=-1))
        pad = None if sampling.pad is None else int(call.config._pad_token_tensor)
        reader = Reader(call.input_ids, call.steps, call.criteria, pad, call.has_stop_strings, call.streamer)
        arrival = Arrival(state, state.sequence[:, start : start + 1], self.plan)
        return Progress(call.input_ids.device, sampling.sample, reader, arrival, start)

    def _decode_plainly(self, graph: DecodeGraph, progress: Progress) -> tuple[DecodeGraph, Program | PlainStep]:
        """Take plain steps until the kernels are there; return the graph, and the step with which to go on."""
        step, steps, rows = PlainStep(graph, self.sampling), self.call.steps, graph.cache.batch_size
        compilation = self.store.compilations.get(rows)
        with taking_turns():
            progress.read()
            if compilation is None:
                self._take(graph, step, 1, progress)  # makes what the model computes once and keeps
                if not progress.stopped:
                    progress.read()
                compilation = graph.kernels.compiling(self.call.input_ids.shape[1], self.sampling, self.loading)
                self.store.compilations[rows] = compilation
            while not (progress.stopped or progress.made == steps or compilation.is_done() or graph.cache.is_full):
                self._take(graph, step, 1, progress)
                progress.read()
        if progress.stopped or progress.made == steps:
            return graph, step
        compilation.wait()
        if graph.cache.is_full:
            graph = self.graphs.larger(graph, steps - progress.made)
        try:
            with self.graphs.refusing(graph):
                if self.graphs.captures:
                    torch.cuda.empty_cache()  # what only plain calls needed
                return graph, self._proved(graph, graph.state.input_ids[:, 0])
        except Unsupported as unfitting:
            backend.count_fallback("generate", unfitting.reason, self.model)
            return graph, PlainStep(graph, self.sampling)

    def _take(self, graph: DecodeGraph, program: Program | PlainStep, count: int, progress: Progress) -> None:
        """Take steps, whose tokens will arrive together."""
        for _ in range(count):
            program.replay()
            progress.mark()
            self.output.keep(program.logits, program.scores)
        graph.cache.grow(count)
        first = progress.start + progress.made
        progress.waiting.append(Arrival(graph.state, graph.state.sequence[:, first : first + count], self.plan))
        progress.made += count

    def _decode(self, graph: DecodeGraph, program: Program | PlainStep, progress: Progress) -> DecodeGraph:
        """Replay until the reader has seen the end; return the graph that holds it."""
        steps, waiting = self.call.steps, progress.waiting
        chunk, ahead = STREAMED_CHUNK if self.plan.streams else CHUNK, 2
        outlives = self.plan.keeps_cache or graph.carried.argument in self.call.inputs
        if graph.carried.always_outlive or (outlives and (graph.cache.stateful_layers or graph.carried)):
            chunk, ahead = 1, 1  # states cannot go back to the end
        while not progress.stopped and (progress.made < steps or waiting):
            if progress.made == steps or len(waiting) == ahead:
                progress.read()
                continue
            if graph.cache.is_full:
                while waiting and not progress.stopped:
                    progress.read()
                if not progress.stopped:
                    graph, program = self._grow(graph, steps - progress.made, program)
                continue
            count = min(chunk, steps - progress.made, graph.cache.capacity - graph.cache.length)
            self._take(graph, program, 1 if isinstance(program, PlainStep) else count, progress)
        progress.restore()
        return graph

    def _grow(
        self, graph: DecodeGraph, room: int, program: Program | PlainStep
    ) -> tuple[DecodeGraph, Program | PlainStep]:
        """Move to a larger cache, with a graph of its own, or with plain steps after such."""
        larger = self.graphs.larger(graph, room)
        if isinstance(program, PlainStep):
            return larger, PlainStep(larger, self.sampling)
        return larger, larger.program(self.sampling)

    def _capture_prompt(self, graph: DecodeGraph) -> None:
        """Read the prompt once more, as the next call will: that captures it."""
        rows, tokens = self.call.input_ids.shape
        if graph.carried or graph.prompts.length_for(rows, tokens, graph.cache.capacity) is None:
            return
        graph.cache.clear()
        before = Before(self.model, [], keeps=True)
        try:
            self.prompt.read(graph)
        except torch.OutOfMemoryError:
            self.store.release()
        if (changes := before.changes()) is not None:  # a model that counts its calls, say
            before.put_back(changes)


def sampling_of(call: Call, lookup: Lookup | None) -> Sampling | None:
    """Return what a graph does with the logits; None where only the host can.

    Raises:
        Unsupported: for drafts, where a processor reads the tokens.
    """
    device = call.input_ids.device
    forms = graph_forms(call.processors, device, call.input_ids.shape[1])
    if forms is None:
        return None
    eos = pad = None
    if call.ends:
        eos = torch.cat([ids.to(device) for ids in call.ends]).clone()
        pad = call.config._pad_token_tensor.to(device).view(1).clone()
    sampling = Sampling(forms, bool(call.config.do_sample), eos, pad, call.keeps)
    if lookup is not None:
        if sampling.reads_ids:
            raise Unsupported("drafts_for_processor")
        sampling.lookup = lookup
    return sampling
