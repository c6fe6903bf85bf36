"""One decode step of a model, captured once and replayed for every token.

B batch, S capacity, V vocabulary.

    graph = DecodeGraph(model, batch_size=1, capacity=1024)
    logits = graph.prefill(input_ids)
    for _ in range(100):
        logits = graph.step(logits.argmax(-1))

`generate()` uses the same class, with the choice of the token inside the graph. On a CPU the step runs as plain calls.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..cache.layers import CacheFull
from ..core.sharded_models import is_split
from ..device.graph_capture import CAPTURING, capture
from ..sampling.greedy import choose
from ..sampling.sampling import Sampling
from .kernels_ahead import KernelsAhead
from .policy import policy_of
from .prompt_graph import PromptGraphs
from .step_buffers import StepBuffers
from .step_call import StepCall
from .validator import Validator

PROGRAMS_KEPT = 8
"""Sampling configurations of which one `DecodeGraph` keeps a graph; they share cache and memory pool."""


class NotLocal(TypeError):
    """The model's tensors are dealt to several ranks, and its modules do not hold this rank's."""

    def __init__(self, model: nn.Module):
        super().__init__(f"{type(model).__name__} is dealt to several ranks: generate() makes its own graphs")


class Program:
    """One graph: the step, and what follows it."""

    def __init__(self, graph: DecodeGraph, sampling: Sampling | None):
        self._decode = weakref.ref(graph)
        self.sampling = sampling
        self.logits: Tensor | None = None
        """`[B, V]` of the last replay, in fp32 where a sampling keeps them; the next replay overwrites them."""
        self.scores: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if graph.captures:
            self._graph = capture(self._run, self._rehearse, graph.device, graph.pool)

    def replay(self) -> None:
        """Run one step; nothing waits for the device."""
        if self._graph is None:
            self._run()
        elif self.sampling is not None and self.sampling.sample:
            with CAPTURING:
                self._graph.replay()
        else:
            self._graph.replay()

    def _rehearse(self) -> None:
        """Run the step at the end of what the cache holds; running it twice is running it once."""
        graph = self._decode()
        assert graph is not None
        graph.state.position.fill_(min(graph.cache.length, graph.cache.capacity - 1))
        self._run()

    def _run(self) -> None:
        graph = self._decode()
        assert graph is not None
        logits = graph.call.forward()
        if self.sampling is None:
            self.logits = logits
            graph.state.position.add_(1)
            graph.state.position_ids.add_(1)
            return
        self.logits, self.scores = choose(logits, graph.state, self.sampling)


class DecodeGraph:
    """A preallocated cache of one batch size and capacity, and the graphs of the steps against it.

    It holds the model weakly. Not for several threads at a time. After the model's weights were moved or replaced, or
    a module was added or hooked, make another one: a graph keeps the addresses that it was captured with.

    Args:
        model: a causal language model in eval mode.
        batch_size: B.
        capacity: S, the most tokens a row can hold.
        like: a growing cache with the layers that the model needs; by default that of its config.
        captures: whether steps are captured; by default on a GPU.
        in_16_bits: why keys and values keep the model's dtype even where 8 bits are asked for (`set_cache_format`).

    Raises:
        UnknownCache: if the model keeps something else than keys and values.
        NotLocal: if the model is dealt to several ranks, whose `generate()` makes graphs of its own.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int,
        capacity: int,
        *,
        like: DynamicCache | None = None,
        captures: bool | None = None,
        in_16_bits: str = "",
    ):
        if is_split(model):
            raise NotLocal(model)
        self.device: torch.device = model.device
        self.captures = self.device.type == "cuda" if captures is None else captures
        self.pool: Any = None
        self.buffers = StepBuffers(model, batch_size, capacity, like, in_16_bits)
        self.cache, self.carried, self.state = self.buffers.cache, self.buffers.carried, self.buffers.state
        self.call = StepCall(model, self.buffers)
        self._programs: OrderedDict[tuple[Hashable, Hashable], Program] = OrderedDict()
        self.prompts = PromptGraphs(model, self.call.accepted, self.captures)
        self.kernels = KernelsAhead(self.call, self.prompts, self.captures)
        self.validator = Validator(self.call, self.kernels)
        self.has_read = False
        """Whether a prompt was read, and the model is known by what it was after that."""

    def __del__(self) -> None:
        # A cache and its layers refer to each other: without this, memory waits for the cycle collector.
        if hasattr(self, "validator"):
            self.release()

    @property
    def model(self) -> Any:
        """The model, which has to be alive."""
        return self.call.model

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, and of states beside it."""
        return self.buffers.nbytes

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Forget what was there and read a prompt.

        Args:
            input_ids: `[B, n]`, left-padded.
            attention_mask: `[B, n]`, 0 for padding; None for no padding.

        Returns:
            `[B, V]` logits of the next token, in the model's dtype.
        """
        self.buffers.forget()
        unpadded = attention_mask is None or bool((attention_mask != 0).all())

        def ordinary() -> Tensor:
            given = _of_prompt(input_ids, attention_mask, self.call.accepted)
            outputs = self.model(**given, **self.call.cached, return_dict=True)
            if not self.cache.attention_layers and self.cache.is_written:
                self.cache.rewind(input_ids.shape[1])
            self.carried.load(outputs)
            logits: Tensor = outputs.logits[:, -1]
            return logits

        logits = (self.read_prompt(input_ids, ordinary) if unpadded else ordinary()).clone()
        if attention_mask is None:
            self.begin(input_ids.shape[1], None)
        else:
            self.begin(_positions_of(attention_mask)[:, -1:] + 1, attention_mask)
        known = self.validator.knows_step()  # and nobody asks which token it would be
        self.prove(self.state.input_ids[:, 0] if known else logits.argmax(-1))
        return logits

    def read_prompt(
        self, input_ids: Tensor, ordinary: Callable[[], Tensor], sampling: Sampling | None = None
    ) -> Tensor:
        """Read a prompt `[B, n]` without padding, in a graph where there is one for it.

        Args:
            input_ids: the prompt.
            ordinary: reads it without a graph and returns the logits.
            sampling: what will follow the logits; its kernels are compiled beside those of the prompt.

        Returns:
            `[B, V]` logits of the next token; the next prompt may overwrite them.
        """
        before_replay = policy_of(self.model).before_replay
        if before_replay is not None:
            before_replay(self.model)
        rows, tokens = input_ids.shape
        length = self.prompts.length_for(rows, tokens, self.cache.capacity)
        states = self.cache.stateful_layers or self.carried  # filling up would go into them
        if length is None or self.cache.length or states:
            return ordinary()

        def warm_up(prompt: Callable[[], None]) -> None:
            self.kernels.warm_up(ordinary, prompt, sampling)

        return self.prompts.read(self.cache, input_ids, length, self._find_pool, ordinary, warm_up)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token `[B]` to each row and return the logits `[B, V]` of the next.

        Raises:
            CacheFull: if there is no slot left.
        """
        if self.cache.length >= self.cache.capacity:
            raise CacheFull(self.cache.length + 1, self.cache.capacity)
        program = self.program(None)
        self.state.input_ids.copy_(tokens.view(-1, 1))
        program.replay()
        self.cache.grow(1)
        assert program.logits is not None
        return program.logits.clone()

    def begin(self, position_ids: Tensor | int, attention_mask: Tensor | None) -> None:
        """Point the next step behind what the cache holds.

        Args:
            position_ids: `[B, 1]` of the next token, or one number for all rows.
            attention_mask: `[B, n]` of what the cache holds, left-padded; None for no padding.
        """
        self.buffers.begin(position_ids, attention_mask)

    def watch(self, inputs: Any) -> None:
        """Take over the `StepInputs` of a call, beside tokens and mask; None for nothing but positions."""
        for gone in self.call.watch(inputs):
            self._programs = OrderedDict((key, kept) for key, kept in self._programs.items() if key[0] != gone)

    def prove(self, tokens: Tensor, sampling: Sampling | None = None) -> None:
        """Compare one step with the model's ordinary one, once, as `Validator.prove` does."""
        if self.validator.prove(tokens, sampling):
            self.prompts.clear_if_moved()

    def program(self, sampling: Sampling | None, form: type[Program] = Program) -> Program:
        """Return the graph for a sampling, captured now if need be; None for the logits alone.

        Args:
            sampling: what follows the logits.
            form: of the step.

        Raises:
            CaptureFailed: if the step, or this sampling, cannot be captured.
        """
        key = (self.call.kind, (form, None if sampling is None else sampling.key))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self.captured(sampling, form)
            while len(self._programs) > PROGRAMS_KEPT:
                self._programs.popitem(last=False)
        elif program.sampling is not None and sampling is not None:
            program.sampling.load(sampling)
        self._programs.move_to_end(key)
        return program

    def captured(self, sampling: Sampling | None, form: type[Program] = Program) -> Program:
        """Return a new graph that only the caller keeps; `rewrite tune` compares several.

        Raises:
            CaptureFailed: if the step, or this sampling, cannot be captured.
        """
        self._find_pool()
        before = self.state.copy()
        with self.call.as_for_decoding(), self.call.held():
            program = form(self, sampling)
        self.state.restore(before)
        return program

    def _find_pool(self) -> Any:
        """Return the graphs' memory pool, a new one for the first graph; a pool ends with the last graph in it."""
        if self.captures and not self._programs and not self.prompts.lengths:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def take_over(self, other: DecodeGraph) -> None:
        """Continue where a graph with less capacity ended."""
        self.buffers.copy_cache(other.buffers)
        self.watch(other.call.watched)
        self.validator.take_over(other.validator)
        self.buffers.copy_state(other.buffers)

    def reset(self) -> None:
        """Forget every token; graphs and buffers stay."""
        self.buffers.forget()
        self.cache.position.zero_()

    def release(self) -> None:
        """Give the graphs and the cache back."""
        self._programs.clear()
        self.prompts.clear()
        self.call.forget_inputs()
        self.buffers.free()
        self.validator.forget()


def _of_prompt(input_ids: Tensor, attention_mask: Tensor | None, accepted: set[str]) -> dict[str, Any]:
    """Return what the forward of a prompt `[B, n]` is called with besides the cache."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    inputs = {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": _positions_of(mask),
        "logits_to_keep": 1,
    }
    if "cache_position" in accepted:
        inputs["cache_position"] = torch.arange(input_ids.shape[1], device=input_ids.device)
    return {name: value for name, value in inputs.items() if name in accepted}


def _positions_of(mask: Tensor) -> Tensor:
    """Return the position of each token of left-padded rows, `[B, n]`."""
    return (mask.cumsum(-1) - 1).clamp_min(0)
