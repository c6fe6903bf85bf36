"""What a package's graphs do, without a GPU: each is run once, and what the device was told is told again."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from rewrite.measure.runtime_part import runtime_part

from .change import patched
from .families import Side

sys.path.insert(0, str(Path(__file__).parents[1]))
from told_again import Recorded

COUNTS: Counter[str] = Counter()
"""Replays of decode steps, of prompts and of whole forwards."""


class Told(Recorded):
    """What the device was told, of which only what computes or writes is told again."""

    @functools.cached_property
    def _again(self) -> list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]]:
        plan = []
        for function, args, kwargs, found in self.told:
            inputs = {_storage(part) for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor)}
            outputs = [(n, part) for n, part in enumerate(tree_flatten(found)[0]) if isinstance(part, Tensor)]
            made = [(n, part) for n, part in outputs if _storage(part) not in inputs]
            if made or function._schema.is_mutable:
                plan.append((function, args, kwargs, made))
        return plan

    @torch.no_grad()
    def replay(self) -> None:
        """Tell it again, without any Python of the model."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            for function, args, kwargs, made in self._again:
                with _writing(args if function._schema.is_mutable else ()):
                    again = function(*args, **kwargs)
                if made:
                    parts = [again] if isinstance(again, Tensor) else tree_flatten(again)[0]
                    for place, kept in made:
                        with _writing(kept):
                            kept.copy_(parts[place])


def _writing(args: Any) -> AbstractContextManager[object]:
    """Return the mode in which tensors may be written; a device writes them in any."""
    inference = any(isinstance(part, Tensor) and part.is_inference() for part in tree_flatten(args)[0])
    return torch.inference_mode() if inference else nullcontext()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def watch(side: Side) -> None:
    """Count replays of a package, from now on; where nothing is captured, they are told again."""
    if not side.runtime or side.part("decode/step_graph").Program.__dict__.get("told"):
        return
    program, graph = side.part("decode/step_graph").Program, side.part("forward/forward_graph").ForwardGraph
    program.told = True
    side.part("forward/forward_settings").set_forward_graphs("always")
    program.replay = _counted("steps", _told(program.replay, side))
    graph._again = _told(graph._again, side)
    graph.launch = _counted("forwards", graph.launch)
    prompts = getattr(side.part("decode/prompt_graph"), "PromptGraph", None)
    prompts.run = _told(prompts.run, side)
    prompts.read = _counted("prompts", prompts.read)


def _counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        COUNTS[name] += 1
        return method(*arguments, **keywords)

    return call


def _told(method: Callable[..., Any], side: Side) -> Callable[..., None]:
    """Return a method that is run once for each object."""
    runtime, captures = side.runtime, side.device != "cpu"

    def call(self: Any) -> None:
        if captures:
            method(self)
        elif (told := vars(self).get("recorded")) is not None:
            told.replay()
        else:
            told = Told()
            with _unseen(runtime), told:
                method(self)
            self.recorded = told

    return call


@contextmanager
def _unseen(runtime: str) -> Iterator[None]:
    """Let what records be no dispatch mode to a package's operators, as a capture is none."""
    with ExitStack() as stack:
        for name in ("core/backend", "core/process"):
            part = runtime_part(runtime, name)
            depth = part._len_torch_dispatch_stack
            stack.enter_context(patched(part, "_len_torch_dispatch_stack", lambda depth=depth: depth() - 1))
        yield
