"""The sides of a measurement. Each decodes greedily; how it does that is its own business.

Every one generates exactly the tokens asked for. A decode time is the slope between a short and a long generation, so
what happens once per call (prefill, recording a graph anew) is in neither side's figure.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rewrite.measure.contender import Contender
from rewrite.verify.generation.loop_checks import SWITCH

from .benchmark_plan import LIGER, ORIGINAL, OURS, STATIC, STEP
from .token_parity import keeping

if TYPE_CHECKING:
    from torch import Tensor

    from .benchmark_models import Subject

LIGER_CONFIGURATIONS = 4
SWITCH_OF_TUNING = "LIGER_FUSED_MOE_AUTOTUNE"
SLOW_STEPS = 16
"""Tokens that an eager side decodes in a repeat: 10 to 80 ms each, so 16 are long enough to time."""


class Generating:
    """A model's own `generate()`, with more arguments."""

    def __init__(self, name: str, model: Any, short: int, steps: int, **arguments: Any):
        self.name, self.model, self.short, self.steps = name, model, short, steps
        self.arguments = arguments

    def generate(self, prompt: Tensor, new: int, mask: Tensor | None = None) -> Tensor:
        """Greedy tokens `[B, new]` that follow `prompt` `[B, L]`."""
        import torch

        mask = torch.ones_like(prompt) if mask is None else mask
        settings = {"max_new_tokens": new, "do_sample": False, "use_cache": True, **self.arguments}
        tokens: Tensor = self.model.generate(prompt, attention_mask=mask, **settings)[:, prompt.shape[1] :]
        return tokens


class CompiledStep:
    """A loop of one's own around the original: a static cache and `torch.compile(mode="reduce-overhead")` of a step.

    The step ends with the argmax, so what a token costs is one graph and the few calls that start it. It takes no
    padding.
    """

    def __init__(self, model: Any, batch: int, capacity: int, steps: int):
        from transformers import StaticCache

        from hf_rewrite_runtime.cache.cache_argument import argument_of

        self.name, self.short, self.steps = STEP, 16, steps
        self.model, self.keep = model, keeping(model, 1)
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.cached = {argument_of(model): self.cache, "use_cache": True}
        self.step = _compiled(self._step, mode="reduce-overhead")

    def _step(self, token: Tensor, position: Tensor) -> Tensor:
        logits = self.model(input_ids=token, position_ids=position, **self.cached, **self.keep).logits
        following: Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return following

    def generate(self, prompt: Tensor, new: int, mask: Tensor | None = None) -> Tensor:
        """Greedy tokens `[B, new]` that follow `prompt` `[B, L]`."""
        import torch

        self.cache.reset()
        logits = self.model(input_ids=prompt, **self.cached, **self.keep).logits
        tokens = [logits[:, -1].argmax(-1, keepdim=True)]
        position = torch.full_like(tokens[0], prompt.shape[1])
        for _ in range(new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            tokens.append(self.step(tokens[-1], position).clone())
            position = position + 1
        return torch.cat(tokens, 1)


def _compiled(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()  # each cell is compiled for its own shapes: none inherits dynamic ones from the last
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, **arguments)
    return compiled


def rewritten(model: Any, new_tokens: int, device: str) -> Contender:
    """Ours. Where it decodes through a graph both generations are long, so that a rest of a chunk is no matter."""
    if device == "cpu" or not hasattr(model, SWITCH):
        return Generating(OURS, model, 2, min(new_tokens, SLOW_STEPS))
    return Generating(OURS, model, 64, new_tokens)


def original(model: Any, new_tokens: int) -> Contender:
    """The original as it is, with its growing cache."""
    return Generating(ORIGINAL, model, 2, min(new_tokens, SLOW_STEPS))


def static(model: Any, new_tokens: int) -> Contender:
    """The original with a static cache, which transformers compiles by itself on a GPU."""
    import torch

    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)
    model.__dict__.pop("_previous_max_cache_length", None)
    return Generating(STATIC, model, 16, min(new_tokens, 64), cache_implementation="static")


def liger_installed() -> bool:
    """Whether Liger's kernels can be imported here."""
    return importlib.util.find_spec("liger_kernel") is not None


def liger(subject: Subject, donor: Any, new_tokens: int) -> Contender:
    """The original with Liger's kernels, and the parameters of `donor`."""
    from .benchmark_models import sharing

    model = with_liger(subject, lambda kind: sharing(kind, donor))
    return Generating(LIGER, model, 2, min(new_tokens, SLOW_STEPS))


def shorten_tuning() -> None:
    """Let Liger tune the kernels of its experts over four configurations each, unless it was told what to do.

    At their first call it compiles and times 240 of them, one after the other: minutes before the first step of a
    mixture of experts. The four are of the largest tiles.
    """
    if SWITCH_OF_TUNING in os.environ or importlib.util.find_spec("liger_kernel.ops.fused_moe_kernels") is None:
        return
    for kernel in vars(importlib.import_module("liger_kernel.ops.fused_moe_kernels")).values():
        configurations = getattr(kernel, "configs", None)
        if isinstance(configurations, list) and len(configurations) > LIGER_CONFIGURATIONS:
            kernel.configs = configurations[-2 * LIGER_CONFIGURATIONS :: 2]


def with_liger(subject: Subject, made: Callable[[Any], Any]) -> Any:
    """A model that `made` makes of the original's class, with Liger's kernels, applied by Liger to an instance.

    Liger also changes the module of transformers that everyone shares, which the original beside it must not see: what
    it changes there is moved to a copy of the module that this model's class is made in.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    from .benchmark_models import private_copy

    shorten_tuning()

    copied = private_copy(subject.module)
    model = made(getattr(copied, subject.original.__name__))
    before = dict(vars(subject.module))
    _apply_liger_kernel_to_instance(model=model)
    for name, value in list(vars(subject.module).items()):
        if name not in before or before[name] is not value:
            setattr(copied, name, value)
            setattr(subject.module, name, before.get(name))
    return model
