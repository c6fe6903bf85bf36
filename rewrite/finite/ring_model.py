"""Models in the ring: parameters of random elements, buffers of what they hold, and outputs as residues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_rewrite_runtime.core import backend

from . import ring
from .ring_tensor import RingTensor

backend.admit(RingTensor)
LEARNED = "_bias"
"""Ends the names of buffers that training changes, as a router's correction."""


def fill(model: Any) -> Any:
    """Replace parameters by random elements, which are equal in models that give them equal names."""
    made: dict[int, RingTensor] = {}
    for path, module in model.named_modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in made:
                    learned = slots is module._parameters or name.endswith(LEARNED)
                    found = ring.random(tuple(tensor.shape), f"{path}.{name}") if learned else ring.elements(tensor)
                    made[id(tensor)] = RingTensor(found)
                    if slots is module._parameters:
                        made[id(tensor)]._is_param = True
                slots[name] = made[id(tensor)]
    return model


def flattened(output: Any, name: str = "output") -> dict[str, Tensor]:
    """Return every tensor of an output by the way to it, residues in place of elements; caches are left out."""
    if isinstance(output, Tensor):
        return {name: output.elements if isinstance(output, RingTensor) else output.detach()}
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, (list, tuple)):
        items = list(enumerate(output))
    found: dict[str, Tensor] = {}
    for key, value in items:
        found |= flattened(value, f"{name}.{key}")
    return found
