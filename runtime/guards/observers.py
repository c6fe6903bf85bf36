"""Who takes part in the call of a module from outside of it: hooks, and a `forward` that was put on the instance."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from .provenance import runs_as_written

RECORDERS = "transformers.utils.output_capturing"
"""The module of the hooks that transformers leaves behind once it recorded hidden states."""
_HOOKS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
}


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's `forward` is its class's own.

    So it is where somebody put it back on the instance, bound to it: as it is, or without what decorates it in the
    class, as accelerate does once it takes its wrapper away.
    """
    forward: Any = vars(module).get("forward")
    if forward is None:
        return True
    function, own = getattr(forward, "__func__", None), type(module).forward
    while own is not function and (inner := getattr(own, "__wrapped__", None)) is not None:
        own = inner
    return own is function and forward.__self__ is module


def takes_part(hook: Callable[..., Any]) -> bool:
    """Return whether a forward hook may do something.

    One that only marks its module's output as wanting a gradient does nothing where there are none; transformers, PEFT
    and TRL put such on the embeddings for gradient checkpointing, and leave it there.
    """
    return torch.is_grad_enabled() or _does(hook) != _does(_mark)


def only_records(module: nn.Module) -> bool:
    """Return whether what watches a module can be part of a graph.

    That is transformers' recording of hidden states, and a parametrisation, which computes a weight from others.
    """
    others = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    hooks = filter(takes_part, module._forward_hooks.values())
    return not others and has_own_forward(module) and all(map(records, hooks))


def has_recorded(module: nn.Module) -> bool:
    """Return whether nothing but transformers' recording of hidden states watches a module."""
    return only_records(module) and "parametrizations" not in module._modules


def is_idle(module: nn.Module) -> bool:
    """Return whether nothing watches a module's call but transformers' recording, which nobody has asked for."""
    if not has_recorded(module) or not runs_as_written(type(module)):
        return False
    hooks = filter(takes_part, module._forward_hooks.values())
    return all(hook.__globals__["_active_collector"].get() is None for hook in hooks)


def records(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is transformers' own that records hidden states where somebody asks for them."""
    return hook.__module__ == RECORDERS and "_active_collector" in getattr(hook, "__globals__", {})


def observers(module: nn.Module) -> Iterator[str]:
    """Yield who takes part in a module's call, each with the file that it is of."""
    for kind, name in _HOOKS.items():
        yield from _named(kind, vars(module)[name])
    if not has_own_forward(module):
        yield f"`forward` of the instance {_of_file(vars(module)['forward'])}"


def global_observers() -> Iterator[str]:
    """Yield who takes part in every module's call."""
    for kind, name in _HOOKS.items():
        yield from _named(f"global {kind}", vars(torch_modules)[f"_global{name}"])


def _named(kind: str, hooks: Mapping[int, Callable[..., Any]]) -> Iterator[str]:
    for hook in hooks.values():
        if takes_part(hook) and not records(hook):
            yield f"{kind} {_of_file(hook)}"


def _of_file(called: Any) -> str:
    while isinstance(called, partial):
        called = called.func
    function = getattr(called, "__func__", called)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):  # which is its own: a wrapper has the name of what it wraps
        return f"{getattr(code, 'co_qualname', code.co_name)} of {code.co_filename}"
    kind = type(function)
    return f"{kind.__qualname__} of {getattr(sys.modules.get(kind.__module__), '__file__', kind.__module__)}"


def _mark(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def _does(hook: Callable[..., Any]) -> object:
    """Return what a function does, wherever it stands; itself where that is not known."""
    code = getattr(hook, "__code__", None)
    return (code.co_code, code.co_names, code.co_consts) if isinstance(code, CodeType) else hook
