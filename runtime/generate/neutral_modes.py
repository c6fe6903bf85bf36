"""Training mode and accelerate's mixed precision, where a model decodes under them as without: bit for bit.

That a module is in training mode says little: of most language models dropout is zero. Nor does autocast, of a model
whose weights are in its dtype. Whether they change anything is tried once, on the prompt of a call, for as long as the
model is what it is. Where they do not, the graph's loop runs without them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core import backend
from ..decode.eligibility import Call, length_of
from ..decode.recurrent_state import restoring
from ..decode.side_effects import Before, Changes
from .random_states import random_states, set_random_states

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
"""Of models that are out of their modes: another thread would take what it sees for how they are."""
_making = threading.Lock()


class Modes:
    """What a model is called under: modules in training mode, and accelerate's wrapper of its `forward`.

    Args:
        model: that generates.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._training = [module for module in model.modules() if module.training]
        self._forward = vars(model).get("forward") if _casts(model) else None

    def __bool__(self) -> bool:
        return bool(self._training) or self._forward is not None

    @property
    def key(self) -> Hashable:
        """Which they are, for as long as the modules are the same."""
        return tuple(map(id, self._training)), self._forward is None

    @property
    def reason(self) -> str:
        """Why they keep a call from the graph's loop where they matter, a key of `loop_reasons.REASONS`."""
        return "training" if self._training else "observed"

    def put(self, on: bool) -> None:
        """Put the model under them, or out of them."""
        for module in self._training:
            module.training = on
        if self._forward is not None and on:
            self._model.__dict__["forward"] = self._forward
        elif self._forward is not None:
            del self._model.__dict__["forward"]


@contextlib.contextmanager
def without_modes(model: nn.Module) -> Iterator[Modes]:
    """Put a model out of its modes in a `with` block, which yields them; falsy where there are none.

    Another thread's call waits until they are back, and no longer than that.
    """
    with _making:
        lock = _locks.setdefault(model, threading.RLock())
    with contextlib.ExitStack() as held:
        held.enter_context(lock)
        modes = Modes(model)
        if not modes:
            held.close()
        modes.put(False)
        try:
            yield modes
        finally:
            modes.put(True)


def decodes_alike(model: Any, call: Call, modes: Modes) -> bool:
    """Return whether a model reads a prompt under modes as without them.

    Nothing may be drawn, written to the model or left out of the cache either; what was is put back. Operators run
    their references, since kernels are not chosen alike under autocast.

    Args:
        model: out of the modes.
        call: whose prompt is read, twice.
        modes: of the model.
    """
    first = Before(model, [], keeps=True)
    with backend.plainly():
        wanted = _read(model, call)
        anyway = first.changes()
        before, states = Before(model, [], keeps=True), (random.getstate(), random_states(model.device))
        modes.put(True)
        try:
            found = _read(model, call)
        finally:
            modes.put(False)
    changes = before.changes()
    if changes is not None:
        first.put_back(changes)  # what the package makes of its weights when it is first called stays
    if drawn := _drawn(states, (random.getstate(), random_states(model.device))):
        random.setstate(states[0])
        set_random_states(states[1])
    return _is_within(changes, anyway) and not drawn and found[1] == wanted[1] and torch.equal(found[0], wanted[0])


def _read(model: Any, call: Call) -> tuple[Tensor, int]:
    """Return the logits `[B, V]` of a call's prompt in fp32, and how many tokens a copy of its cache holds then."""
    inputs = {**call.inputs, call.cache_name: copy.deepcopy(call.inputs.get(call.cache_name))}
    with restoring(model, call.inputs, always=True):
        outputs = model._prefill(call.input_ids, call.config, dict(inputs))
    cache = inputs[call.cache_name]
    return outputs.logits[:, -1].float(), length_of(getattr(cache, "self_attention_cache", cache))


def _casts(model: nn.Module) -> bool:
    """Return whether accelerate has wrapped the class's own `forward` for mixed precision, and nobody has since."""
    forward = vars(model).get("forward")
    function = getattr(forward, "__func__", forward)
    if getattr(function, "__qualname__", "") != "convert_outputs_to_fp32.<locals>.forward":
        return False
    inner = getattr(getattr(function, "__wrapped__", None), "model_forward", None)
    if inner is None or getattr(inner, "__globals__", {}).get("__name__") != torch.amp.autocast_mode.__name__:
        return False
    by_accelerate = str(getattr(function, "__module__", "")).startswith("accelerate.")
    return by_accelerate and inspect.unwrap(inner) is inspect.unwrap(type(model).forward)


def _is_within(changes: Changes | None, others: Changes | None) -> bool:
    """Return whether all that was changed once was changed another time, too."""
    if changes is None or others is None:
        return changes is None
    names, more = ({(id(now), name) for now, name in one.names} for one in (changes, others))
    return names <= more


def _drawn(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Return whether Python's generator or one of torch's stands elsewhere."""
    of_torch = zip(before[1], now[1], strict=True)
    return before[0] != now[0] or any(not torch.equal(a, b) for a, b in of_torch if isinstance(a, Tensor))
