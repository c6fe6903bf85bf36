"""One decode step of a model, captured once and replayed for every token.

B batch, S capacity, V vocabulary.

    graph = DecodeGraph(model, batch_size=1, capacity=1024)
    logits = graph.prefill(input_ids)
    for _ in range(100):
        logits = graph.step(logits.argmax(-1))

`generate()` uses the same class, with the choice of the token inside the graph. On a CPU the step runs as plain calls.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..cache.cache_argument import argument_of
from ..cache.custom_cache import own_cache_of, own_like
from ..cache.extra_tensors import takes_padding
from ..cache.layers import CacheFull
from ..cache.preallocated import PreallocatedCache, preallocated_like
from ..core import backend
from ..core.rounding_noise import Trace, Verdict, Yardstick
from ..core.sharded_models import is_split
from ..device.compile_ahead import Compilation, CompilerLoading, Variants, compile_all, compiler_loading, variants
from ..device.graph_capture import CAPTURING, capture
from ..launching.launch import rehearsing
from ..sampling.greedy import choose
from ..sampling.sampling import Sampling, StepState
from .cache_format import get_cache_format
from .constant_folding import StepConstants
from .eligibility import unmasked_window
from .fp8_cache import keep_in_8_bits
from .policy import policy_of
from .prompt_graph import PromptGraphs
from .recurrent_state import carried_by
from .side_effects import Before, Kept
from .step import Step
from .validation import LOGITS, StepChanges, StepDiffers, StepFails, StepReads, compared, trace

PROGRAMS_KEPT = 8
"""Sampling configurations of which one `DecodeGraph` keeps a graph; they share cache and memory pool."""

_WARM: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose kernels were compiled side by side with their first prompt."""


class UnknownCache(TypeError):
    """The model keeps something that no buffer can stand for, or its configuration does not say what."""

    def __init__(self, model: nn.Module):
        name = type(model).__name__
        super().__init__(f"the cache of {name} has layers that no preallocated buffer can stand for, or names none")


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
        logits = graph.forward()
        if self.sampling is None:
            self.logits = logits
            graph.state.position.add_(1)
            graph.state.position_ids.add_(1)
            return
        self.logits, self.scores = choose(logits, graph.state, self.sampling)


class DecodeGraph(Step):
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
        self._model = weakref.ref(model)
        self.device = model.device
        self.captures = self.device.type == "cuda" if captures is None else captures
        self.carried = carried_by(model)
        self.cache = self._cache_like(like, model, batch_size, capacity)
        self.in_16_bits = in_16_bits
        if get_cache_format() is not None:
            keep_in_8_bits(self.cache, model, in_16_bits)
        self.carried.beside(self.cache)
        cache = self.cache
        self.state = StepState(batch_size, capacity, cache.position, cache.starts)
        with torch.inference_mode(False):
            self._attention_mask = torch.ones(batch_size, capacity, dtype=torch.int64, device=self.device)
            self._slots = torch.arange(capacity, device=self.device)
        self._hides = False
        """Whether a call's mask is in the first columns of `_attention_mask`, which are 1 otherwise."""
        self.pool: Any = None
        self._programs: OrderedDict[tuple[Hashable, Hashable], Program] = OrderedDict()
        self._kept: dict[Hashable, Any] = {}
        """What was on the model when a kind of step was proved."""
        self._proved: set[tuple[Hashable, int]] = set()
        """Kinds of steps, and how many tokens they read."""
        self.rounding = 0.0
        """Largest relative distance of a step's logits that rounding explains, of the steps that were proved."""
        self._hiding = set()
        self._watched: OrderedDict[Hashable, Any] = OrderedDict()
        self._constants = contextlib.nullcontext()
        self._constants = StepConstants()
        self._residuals = set()
        self.watched = None
        accepted = inspect.signature(model.forward).parameters
        self._cached = {"use_cache": True}
        if not self.carried.argument:
            self._cached[argument_of(model)] = self.cache
        self._accepted = set(accepted)
        self._inputs = self._static_inputs()
        self._policy = policy_of(model)
        self.prompts = PromptGraphs(model, self._accepted, self.captures)
        self.aligns: bool | None = None
        """Whether a step computes the same where its rows lie in other slots; None where that was not tried."""

    def _cache_like(self, like: DynamicCache | None, model: Any, batch_size: int, capacity: int) -> PreallocatedCache:
        if self.carried.argument:  # which counts the tokens, and holds none
            return PreallocatedCache(0, batch_size, capacity, self.device)
        if (kind := own_cache_of(model)) is not None:
            own = own_like(kind, batch_size, capacity, self.device)
            if own is None:
                raise UnknownCache(model)
            return own
        if like is None or not like.layers:
            like = self._configured_cache(model)
            if capacity > unmasked_window(model, like):
                raise UnknownCache(model)
        cache = preallocated_like(like, batch_size, capacity, self.device)
        if cache is None:
            raise UnknownCache(model)
        return cache

    @staticmethod
    def _configured_cache(model: Any) -> DynamicCache:
        """Return the growing cache that a model's configuration asks for."""
        try:
            return DynamicCache(config=model.config.get_text_config(decoder=True))
        except AttributeError as error:  # a model of several stacks has no single number of layers
            raise UnknownCache(model) from error

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Forget what was there and read a prompt.

        Args:
            input_ids: `[B, n]`, left-padded.
            attention_mask: `[B, n]`, 0 for padding; None for no padding.

        Returns:
            `[B, V]` logits of the next token, in the model's dtype.
        """
        self._forget()
        unpadded = attention_mask is None or bool((attention_mask != 0).all())

        def ordinary() -> Tensor:
            outputs = self.model(**self._of_prompt(input_ids, attention_mask), **self._cached, return_dict=True)
            if not self.cache.attention_layers and self.cache.is_written:
                self.cache.rewind(input_ids.shape[1])
            self.carried.load(outputs)
            logits: Tensor = outputs.logits[:, -1]
            return logits

        logits = (self.read_prompt(input_ids, ordinary) if unpadded else ordinary()).clone()
        if not (unpadded or (self.cache.knows_length and takes_padding(self.model))):
            raise StepFails(ValueError("a step would not read padded rows as the model does with a growing cache"))
        if attention_mask is None:
            self.begin(input_ids.shape[1], None)
        else:
            self.begin(_positions_of(attention_mask)[:, -1:] + 1, attention_mask)
        known = (self._kind, 1) in self._proved  # and nobody asks which token it would be
        self.prove(self.state.input_ids[:, 0] if known else logits.argmax(-1))
        return logits

    def _of_prompt(self, input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
        """Return what the forward of a prompt `[B, n]` is called with besides the cache."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        inputs = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": _positions_of(mask),
            "logits_to_keep": 1,
        }
        if "cache_position" in self._accepted:
            inputs["cache_position"] = torch.arange(input_ids.shape[1], device=input_ids.device)
        return {name: value for name, value in inputs.items() if name in self._accepted}

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
        if self._policy.before_replay is not None:
            self._policy.before_replay(self.model)
        rows, tokens = input_ids.shape
        length = self.prompts.length_for(rows, tokens, self.cache.capacity)
        states = self.cache.stateful_layers or self.carried  # filling up would go into them
        if length is None or self.cache.length or states:
            return ordinary()

        def warm_up(prompt: Callable[[], None]) -> None:
            if self.model not in _WARM:
                self._warm_up(ordinary, prompt, sampling)
                _WARM.add(self.model)

        return self.prompts.read(self.cache, input_ids, length, self._find_pool, ordinary, warm_up)

    def _warm_up(self, ordinary: Callable[[], Tensor], prompt: Callable[[], None], sampling: Sampling | None) -> None:
        """Compile the kernels of a prompt, a step and a sampling side by side; the cache is empty before and after.

        What the model computes once and keeps is made first, by calls without kernels, while the compiler is loaded.
        """
        runs = [prompt]
        with compiler_loading(self.device), backend.plainly():
            ordinary()
            length = self.cache.length
            if length < self.cache.capacity:
                runs.insert(0, self._step_with(sampling))
                self.begin(length, None)
                with self._as_for_decoding():
                    self._first_ordinary_step(length)
        self._compile(*runs)
        self.cache.rewind(0)
        torch.cuda.empty_cache()  # what only these calls needed

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

    def __del__(self) -> None:
        # A cache and its layers refer to each other: without this, memory waits for the cycle collector.
        if hasattr(self, "_inputs"):
            self.release()

    def reset(self) -> None:
        """Forget every token; graphs and buffers stay."""
        self._forget()
        self.cache.position.zero_()

    def _forget(self) -> None:
        """Forget every token; where the next step writes is left to `begin`."""
        self.cache.clear()
        self.carried.forget()

    def release(self) -> None:
        """Give the graphs and the cache back."""
        self._programs.clear()
        self.prompts.clear()
        self._watched.clear()
        self.watched = None
        self._constants.clear()
        self.cache.free()
        self.carried.free()
        self._proved.clear()
        self._kept.clear()
        self._hiding.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache, and of states beside it."""
        return self.cache.nbytes + sum(buffer.nbytes for buffer in self.carried.buffers)

    def watch(self, inputs: Any) -> None:
        """Take over the `StepInputs` of a call, beside tokens and mask; None for nothing but positions."""
        if inputs is not None:
            known = self._watched.setdefault(inputs.key, inputs)
            if known is not inputs:
                known.load(inputs)
            self._watched.move_to_end(inputs.key)
            while len(self._watched) > PROGRAMS_KEPT:
                gone, _ = self._watched.popitem(last=False)
                self._programs = OrderedDict((key, kept) for key, kept in self._programs.items() if key[0] != gone)
            inputs = known
        self.watched = inputs

    @property
    def is_proved(self) -> bool:
        """Whether a step has been compared with the model's ordinary one."""
        return bool(self._proved)

    def begin(self, position_ids: Tensor | int, attention_mask: Tensor | None) -> None:
        """Point the next step behind what the cache holds.

        Args:
            position_ids: `[B, 1]` of the next token, or one number for all rows.
            attention_mask: `[B, n]` of what the cache holds, left-padded; None for no padding.
        """
        self._constants.refresh()
        self.state.position.fill_(self.cache.length)
        if isinstance(position_ids, int):
            self.state.position_ids.fill_(position_ids)
        else:
            self.state.position_ids.copy_(position_ids)
        self.state.flags.zero_()
        if self._hides:
            self._attention_mask.fill_(1)
        self._hides = attention_mask is not None
        if attention_mask is None:
            self.cache.pad(None)
        else:
            self._attention_mask[:, : attention_mask.shape[1]] = attention_mask
            self.cache.pad((attention_mask != 0).int().argmax(dim=1))

    def hide_before(self, starts: Tensor) -> None:
        """Let each row begin at the slot `starts` `[B]`, on the device; only after a `begin` with a mask."""
        self.cache.starts.copy_(starts)
        self._attention_mask.copy_(self._slots >= starts[:, None])

    def program(self, sampling: Sampling | None, form: type[Program] = Program) -> Program:
        """Return the graph for a sampling, captured now if need be; None for the logits alone.

        Args:
            sampling: what follows the logits.
            form: of the step.

        Raises:
            CaptureFailed: if the step, or this sampling, cannot be captured.
        """
        key = (self._kind, (form, None if sampling is None else sampling.key))
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
        with self._as_for_decoding(), self._held():
            program = form(self, sampling)
        self.state.restore(before)
        return program

    def _find_pool(self) -> Any:
        """Return the graphs' memory pool, a new one for the first graph; a pool ends with the last graph in it."""
        if self.captures and not self._programs and not self.prompts.lengths:
            self.pool = torch.cuda.graph_pool_handle()
        return self.pool

    def prove(self, tokens: Tensor, sampling: Sampling | None = None) -> None:
        """Compare one step against the buffers with the model's ordinary step, once; it leaves the cache as it was.

        Before that the kernels of the step, and of a sampling, are compiled side by side.

        The model's own code decides which slots it attends to. Code that takes the mask as it comes for a single
        token, or is given none, would see the slots that nothing has written: a mask hides them then. Code that
        ignores masks would silently see them.

        Args:
            tokens: `[B]`, or `[B, n]` for a step of several tokens a row.
            sampling: what follows the step.

        Raises:
            StepDiffers: if they differ by more than another order of summation explains.
            StepFails: if the model's code needs the length as a Python int, say.
            StepChanges: if it leaves something on the model besides the states that its class is marked for.
            StepReads: if it was captured behind another prompt, and reads what that one left on the model.
        """
        tokens = tokens.view(self.cache.batch_size, -1)
        length, state, width = self.cache.length, self.state, tokens.shape[1]
        if length + width > self.cache.capacity:
            return
        several = tokens if width > 1 else None
        if (self._kind, width) in self._proved:
            if several is None:
                kept = self._kept.get(self._kind)
                if kept is not None and kept.is_read(self._once_more):
                    raise StepReads(self.model)
            return
        state.input_ids.copy_(tokens[:, :1])
        with self._as_for_decoding():
            with backend.plainly(), self._held():
                ordinary = self._trace(self._first_ordinary_step(length, several), length)
            self.cache.rewind(length)
            yardstick = Yardstick(ordinary, lambda: self._again(length, several))
            with self._held():
                self._compile(self._step_with(sampling, several))
            verdict, holds = self._compared(yardstick, length, several)
            if not holds and several is None and "attention_mask" in self._accepted:
                self._hiding.add(self._kind)
                verdict, holds = self._compared(yardstick, length, several)
                if not holds:
                    self._hiding.discard(self._kind)
            if several is None:
                self._look_for_changes()  # by which it may differ
        if not holds:
            raise StepDiffers(verdict)
        self._proved.add((self._kind, width))
        self.rounding = max(self.rounding, yardstick.bound(LOGITS))
        self.prompts.clear_if_moved()

    def _compared(self, yardstick: Yardstick, length: int, several: Tensor | None) -> tuple[Verdict, bool]:
        """Return how far a step is from the ordinary one, and whether it is the same."""

        def step() -> Trace:
            self.state.position.fill_(length)
            with rehearsing(), self._held():
                return self._trace(self.forward() if several is None else self.forward_several(several), length)

        return compared(self.cache, length + (1 if several is None else several.shape[1]), yardstick, step)

    def _again(self, length: int, several: Tensor | None) -> Trace:
        """Return what the ordinary step leaves, once more."""
        with backend.plainly(), self._held():
            found = self._trace(self._first_ordinary_step(length, several), length)
        self.cache.rewind(length)
        return found

    def _trace(self, logits: Tensor, length: int) -> Trace:
        """Return what a step of logits `[B, V]` or `[B, n, V]`, behind `length` tokens, has left."""
        width = logits.shape[1] if logits.dim() > 2 else 1
        return trace(self.cache, self._slots[length : length + width], logits.float(), self.carried.buffers)

    def _look_for_changes(self) -> None:
        """Run a step once more: what it makes at its first run is there."""
        before, kept = Before(self.model, self.carried.buffers, layers=self.cache.layers), Kept(self.model)
        kept.watch(self._once_more)
        if (changes := before.changes()) is not None:
            raise StepChanges(changes, changes.named(self.model))
        self._kept[self._kind] = kept

    def _once_more(self) -> None:
        """Run a step and leave everything as it is."""
        with rehearsing(), self._held(), self._as_for_decoding():
            self.forward()

    def _step_with(self, sampling: Sampling | None, several: Tensor | None = None) -> Callable[[], None]:
        """Return a step with what follows it."""

        def run() -> None:
            with self._as_for_decoding():
                known = len(self._residuals)
                logits = self.forward() if several is None else self.forward_several(several)[:, -1]
                if several is None and len(self._residuals) > known:  # the next steps run other kernels
                    logits = self.forward()
            if sampling is not None:
                choose(logits, self.state, sampling)

        return run

    def _compile(self, *runs: Callable[[], None]) -> None:
        """Compile the kernels of all runs side by side; what cannot be captured is compiled as it runs."""
        compile_all(self._variants(*runs), self.device)

    def _variants(self, *runs: Callable[[], None]) -> Variants:
        """Return the kernels of runs, as far as they can be captured; none where steps are plain calls.

        What a model computes once and keeps must be there: a graph that is thrown away has only room for it.
        """
        jobs: Variants = {}
        for run in runs if self.captures else ():
            jobs |= variants(run, self.device)
        return jobs

    def compiling(self, tokens: int, sampling: Sampling, loading: CompilerLoading | None) -> Compilation:
        """Begin to compile the kernels of prompts, a step and a sampling in threads, between two plain steps.

        Args:
            tokens: of a prompt that a graph might read; the shortest there is stands for one that none does.
            sampling: what follows a step.
            loading: of the compiler, if it was begun.
        """
        length = self.cache.length
        found = self._variants(*self.launching(tokens, sampling))
        self.cache.rewind(length)
        _WARM.add(self.model)
        return Compilation(found, self.device, loading)

    def launching(self, tokens: int, sampling: Sampling) -> list[Callable[[], None]]:
        """Return what launches the kernels of a call: a step with a sampling, and a prompt that a graph could read.

        Args:
            tokens: of the prompt; the shortest there is stands for one that no graph reads.
            sampling: what follows a step.
        """
        runs, rows = [self._step_with(sampling)], self.cache.batch_size
        for count in (tokens, self._policy.fewest_tokens):
            if (length := self.prompts.length_for(rows, count, self.cache.capacity)) is not None:
                return [*runs, self.prompts.rehearsal(self.model, self.cache, length)]
        return runs

    def take_over(self, other: DecodeGraph) -> None:
        """Continue where a graph with less capacity ended."""
        self.cache.copy_from(other.cache)
        self.carried.copy_from(other.carried)
        self.cache.fused = other.cache.fused
        self.watch(other.watched)
        self._proved |= {key for key in other._proved if key[0] == self._kind}
        self._hiding |= other._hiding & {self._kind}
        self._kept |= other._kept
        self.rounding = max(self.rounding, other.rounding)
        self._attention_mask.fill_(1)
        self._attention_mask[:, : other.cache.capacity] = other._attention_mask
        self._hides = other._hides
        self.state.restore(other.state.copy())


def _positions_of(mask: Tensor) -> Tensor:
    """Return the position of each token of left-padded rows, `[B, n]`."""
    return (mask.cumsum(-1) - 1).clamp_min(0)
