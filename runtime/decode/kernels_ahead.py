"""Compiles what a step, a sampling and prompts will launch side by side, before any of it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core import backend
from ..device.compile_ahead import Compilation, CompilerLoading, Variants, compile_all, compiler_loading, variants
from ..sampling.greedy import choose
from ..sampling.sampling import Sampling
from .policy import policy_of
from .prompt_graph import PromptGraphs
from .step_call import StepCall

_WARM: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose kernels were compiled side by side with their first prompt."""


class KernelsAhead:
    """Compiles the kernels of one `DecodeGraph`; what cannot be captured is compiled as it runs.

    Args:
        call: of its steps.
        prompts: its graphs of prompts.
        captures: whether steps are captured; they are plain calls otherwise, and nothing is compiled ahead.
    """

    def __init__(self, call: StepCall, prompts: PromptGraphs, captures: bool):
        self._call, self._prompts, self._captures = call, prompts, captures
        self._device = call.buffers.device
        self._fewest_tokens = policy_of(call.model).fewest_tokens

    def compile_step(self, sampling: Sampling | None, several: Tensor | None) -> None:
        """Compile the kernels of a step with what follows it."""
        self._compile(self._step_with(sampling, several))

    def warm_up(self, ordinary: Callable[[], Tensor], prompt: Callable[[], None], sampling: Sampling | None) -> None:
        """Compile the kernels of a model's first prompt, a step and a sampling; the cache is empty before and after.

        What the model computes once and keeps is made first, by calls without kernels, while the compiler is loaded.

        Args:
            ordinary: reads the prompt without a graph.
            prompt: launches its kernels.
            sampling: what follows a step.
        """
        call, cache = self._call, self._call.buffers.cache
        if call.model in _WARM:
            return
        runs = [prompt]
        with compiler_loading(self._device), backend.plainly():
            ordinary()
            length = cache.length
            if length < cache.capacity:
                runs.insert(0, self._step_with(sampling))
                call.buffers.begin(length, None)
                with call.as_for_decoding():
                    call.first_ordinary_step(length)
        self._compile(*runs)
        cache.rewind(0)
        torch.cuda.empty_cache()  # what only these calls needed
        _WARM.add(call.model)

    def compiling(self, tokens: int, sampling: Sampling, loading: CompilerLoading | None) -> Compilation:
        """Begin to compile the kernels of prompts, a step and a sampling in threads, between two plain steps.

        Args:
            tokens: of a prompt that a graph might read; the shortest there is stands for one that none does.
            sampling: what follows a step.
            loading: of the compiler, if it was begun.
        """
        length = self._call.buffers.cache.length
        found = self._variants(*self.launching(tokens, sampling))
        self._call.buffers.cache.rewind(length)
        _WARM.add(self._call.model)
        return Compilation(found, self._device, loading)

    def launching(self, tokens: int, sampling: Sampling) -> list[Callable[[], None]]:
        """Return what launches the kernels of a call: a step with a sampling, and a prompt that a graph could read.

        Args:
            tokens: of the prompt; the shortest there is stands for one that no graph reads.
            sampling: what follows a step.
        """
        cache, runs = self._call.buffers.cache, [self._step_with(sampling)]
        for count in (tokens, self._fewest_tokens):
            if (length := self._prompts.length_for(cache.batch_size, count, cache.capacity)) is not None:
                return [*runs, self._prompts.rehearsal(self._call.model, cache, length)]
        return runs

    def _step_with(self, sampling: Sampling | None, several: Tensor | None = None) -> Callable[[], None]:
        """Return a step with what follows it."""
        call = self._call

        def run() -> None:
            with call.as_for_decoding():
                known = len(call.residuals)
                logits = call.forward() if several is None else call.forward_several(several)[:, -1]
                if several is None and len(call.residuals) > known:  # the next steps run other kernels
                    logits = call.forward()
            if sampling is not None:
                choose(logits, call.buffers.state, sampling)

        return run

    def _compile(self, *runs: Callable[[], None]) -> None:
        compile_all(self._variants(*runs), self._device)

    def _variants(self, *runs: Callable[[], None]) -> Variants:
        """Return the kernels of runs, as far as they can be captured; none where steps are plain calls.

        What a model computes once and keeps must be there: a graph that is thrown away has only room for it.
        """
        jobs: Variants = {}
        for run in runs if self._captures else ():
            jobs |= variants(run, self._device)
        return jobs
