"""Whether a forward can be replayed from a graph, and why not."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..core import backend
from ..core.process import is_watched
from ..guards.observers import only_records, records
from ..launching.launch import collects, rehearses

REASONS = {
    "cpu": "the model is not on a GPU",
    "several_devices": "the model's tensors are on several devices, or are quantised or distributed ones",
    "training": "a module is in training mode",
    "gradient": "gradients are wanted",
    "autocast": "autocast chooses the dtype of each product",
    "compiled": "torch.compile compiles the model",
    "observed": "a hook or a wrapped forward watches a module: a replay would not call it",
    "watched": "a mode of torch, a transform or a tracer takes part in the call",
    "torch_replaced": "a function of torch that the model calls is not torch's own",
    "attention_implementation": "only eager and sdpa attention are known to run in a graph",
    "derived_weights": "the model multiplies by copies of its weights, which a replay would not renew",
    "own_state": "the model refers to itself, or holds more objects than can be compared at each call",
    "inference_tensors": "the model's tensors were made in inference mode: nobody counts what is written to them",
    "cache": "the call is given a cache, which it changes",
    "inputs": "an argument is of a class that no graph can stand for, or on another device than the model",
    "outputs": "something is returned that cannot be copied",
    "changes_inputs": "the forward changes an argument in place",
    "changes_state": "the forward changes the model",
    "random": "the forward draws random numbers, and reads them or draws them elsewhere than on the host",
    "not_capturable": "the forward asks the host, or cannot be part of a graph for another reason",
    "differs": "the graph computes something else than the forward does",
    "lengths_mask": "the forward takes no attention mask",
    "lengths_arguments": "an argument beside ids, embeddings, types, positions and mask of the text is a tensor",
    "lengths_positions": "positions are given and no mask, so they may tell several texts in a row apart",
    "lengths_reach": "it does not run on a text of the padded length",
    "lengths_outputs": "an output does not have the length of the text, and depends on it",
    "lengths_differ": "a padded text gives something else",
    "lengths_hidden": "where its mask hides a position, a padded text gives something else there",
    "lengths_read": "what stands in the padding has influence",
    "packed_layers": "the model has no layers of one class, one behind the other, that are given the hidden states",
    "packed_reach": "the layers do not run on a packed batch, as where attention is not torch's own function",
    "packed_outputs": "an output has the length of the texts in another place than behind their number",
    "packed_differ": "a packed batch gives something else",
    "slower": "a replay was not faster than the forward itself",
    "full": "there are as many graphs as are kept, and all are in use",
    "memory": "the graph takes more memory than is given to graphs",
    "out_of_memory": "the memory does not suffice for the graph",
    "reentrant": "the call comes from inside another forward that is being captured",
}

_KNOWN_ATTENTION = ("eager", "sdpa", None)


def unfit_call(model: nn.Module, device: torch.device) -> str | None:
    """Return why this moment is none for a graph, a key of `REASONS`: what may be otherwise at the next call."""
    if backend.autocasts(device.type):
        return "autocast"
    if is_watched() or nn.modules.module._has_any_global_hook():
        return "watched"
    return "compiled" if model._compiled_call_impl is not None else None


def is_elsewhere(device: torch.device) -> bool:
    """Return whether the call is part of somebody's capture, or of a rehearsal of one."""
    if collects() or rehearses() or backend.runs_plainly():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def unfit_model(model: nn.Module) -> str | None:
    """Return why a model cannot be captured as it is, a key of `REASONS`."""
    if getattr(model, "_tp_size", None) or getattr(model, "_is_replica", False):
        return "several_devices"
    for module in model.modules():
        if module.training:
            return "training"
        if backend.observed(module) and not only_records(module):
            return "observed"
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) not in _KNOWN_ATTENTION:
            return "attention_implementation"
    return None


def collector_of(model: nn.Module) -> Any:
    """Return what tells whether somebody records hidden states just now; None where no module has a hook for it."""
    for module in model.modules():
        for hook in filter(records, module._forward_hooks.values()):
            return hook.__globals__["_active_collector"]
    return None


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of the first parameter or buffer."""
    for tensor in model.parameters():
        return tensor.device
    return next((tensor.device for tensor in model.buffers()), None)


class Randomness:
    """The state of every generator that a forward may draw from."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before = self._now()

    def _now(self) -> tuple[Hashable, Tensor]:
        offset = 0
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            offset = torch.cuda.default_generators[index].get_offset()
        numpy = sys.modules.get("numpy")
        drawn = "" if numpy is None else str(numpy.random.get_state())
        return (offset, random.getstate(), drawn), torch.get_rng_state()

    def is_drawn(self, draws: Any) -> bool:
        """Return whether anything was drawn since that `draws`, a `Draws`, does not draw again, or that was read."""
        (others, state), (before, start) = self._now(), self._before
        if others == before and torch.equal(state, start):
            return False
        if others == before:
            torch.set_rng_state(start)
            draws.again()
            same = torch.equal(state, torch.get_rng_state())
            torch.set_rng_state(state)
            return draws.are_read or not same
        return True
