"""Models whose layers accelerate has spread over several devices (`device_map`), while transformers' loop runs them.

accelerate wraps the `forward` of every module that has weights, to move what it is called with to the module's device.
A wrapped module has to be called as it is, so that no operator may read its weights: each layer would run as in the
original. But inside of a block that is on one device and wrapped itself, everything has been moved already. So for the
length of a loop the modules inside of such blocks have their own `forward` again, and a layer runs as on one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_spread(model: nn.Module) -> bool:
    """Return whether accelerate has put a model's modules on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


@contextlib.contextmanager
def plain_inside(model: nn.Module) -> Iterator[None]:
    """Let the modules inside of blocks on one device have their own `forward` in a `with` block."""
    lifted: list[nn.Module] = []
    if is_spread(model):
        lifted = [module for block in _blocks(model) for module in _inside(block)]
    wrappers = [module.__dict__.pop("forward") for module in lifted]
    try:
        yield
    finally:
        for module, wrapper in zip(lifted, wrappers, strict=True):
            module.__dict__["forward"] = wrapper


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that move what they are called with, but the model."""
    for child in model.children():
        if _hook(child) is None:
            yield from _blocks(child)
        else:
            yield child


def _inside(block: nn.Module) -> list[nn.Module]:
    """Return the wrapped modules inside of a block; none if one of all does more than move inputs to one device."""
    wrapped = [module for module in block.modules() if _hook(module) is not None]
    place = getattr(_hook(block), "execution_device", None)
    if place is None or not all(_only_moves(module, place) for module in wrapped):
        return []
    tensors = (*block.parameters(), *block.buffers())
    return wrapped[1:] if all(_is_at(tensor, place) for tensor in tensors) else []


def _hook(module: nn.Module) -> Any:
    return module.__dict__.get("_hf_hook")


def _only_moves(module: nn.Module, place: Any) -> bool:
    """Return whether a module is wrapped by accelerate, once, to move its inputs to a place."""
    hook, wrapper = _hook(module), module.__dict__.get("forward")
    own = getattr(module.__dict__.get("_old_forward"), "__func__", None) is type(module).forward
    known = type(hook).__name__ == "AlignDevicesHook" and type(hook).__module__ == "accelerate.hooks"
    if not (known and own and isinstance(wrapper, functools.partial)):
        return False
    return bool(hook.execution_device == place and not (hook.offload or hook.io_same_device or hook.no_grad))


def _is_at(tensor: Tensor, place: Any) -> bool:
    if isinstance(place, int):
        return tensor.device.index == place
    device = torch.device(place)
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
