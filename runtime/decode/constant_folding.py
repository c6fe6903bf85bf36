"""What a step computes of parameters alone is computed once a call: rates of a state space, weights in fp32.

A graph replays every kernel that it has seen, so that `-torch.exp(self.A_log.float())` costs three launches a layer
and token. Here it is computed where the step is rehearsed; the graph reads the result, and every call of `generate()`
computes it anew from what the parameters are then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LARGEST = 4 << 20
"""Bytes of one result; a larger one is worth no memory."""
BUDGET = 64 << 20
"""Bytes of all results of a graph."""

_CASTS = {"float", "double", "half", "bfloat16", "to"}
_VALUES = _CASTS | {"exp", "neg", "softplus", "sigmoid", "add", "mul", "sub", "div", "pow", "rsub"}
_VIEWS = {"view", "reshape", "squeeze", "unsqueeze", "expand", "transpose", "permute", "contiguous", "__getitem__"}
_OPERATORS = {f"__{side}{name}__" for side in ("", "r") for name in ("add", "mul", "sub", "truediv", "pow")}
_PURE = _VALUES | _VIEWS | _OPERATORS | {"__neg__", "cat"}
"""Names of torch's functions that compute a tensor of their arguments and do nothing else."""
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "mul", "sub", "div", "truediv", "pow", "mod"))}
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, slice, type(None), type(...))


class _Constant(NamedTuple):
    """A result, and how it is computed again."""

    result: Tensor
    func: Callable[..., Tensor]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    is_view: bool
    """Whether it lies in the memory of what it was computed from."""


class StepConstants(TorchFunctionMode):
    """Keeps what pure functions of torch return for parameters, and for what it has kept, while a step runs."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Hashable, _Constant] = {}
        self._results: set[int] = set()
        self.nbytes = 0
        """Bytes of what is kept, views left out."""
        self._gives_up = False
        """Whether the model writes into such a result, so that it has to be its own in every step."""

    def refresh(self) -> None:
        """Compute everything anew from the parameters as they are now."""
        with torch.inference_mode(False), torch.no_grad():
            for result, func, args, kwargs, is_view in self._kept.values():
                if not is_view:
                    result.copy_(func(*args, **kwargs))

    def clear(self) -> None:
        """Forget everything; only where no graph reads it any more."""
        self._kept.clear()
        self._results.clear()
        self.nbytes = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or return what it returned for the same parameters."""
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._kept and _writes(name, given) and self._is_kept(args, given):
            self.clear()
            self._gives_up = True
        if self._gives_up or name not in _PURE:
            return func(*args, **given)
        key = self._key(func, args, given)
        if key is None:
            return func(*args, **given)
        kept = self._kept.get(key)
        return self._keep(key, func, args, given) if kept is None else kept.result

    def _keep(self, key: Hashable, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():  # would be computed in a replay
            return func(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            result = func(*args, **kwargs)
        if type(result) is not Tensor:  # a parameter itself, or no tensor
            return result
        is_view = not _storages([result]).isdisjoint(_storages(_tensors(args, kwargs)))
        if is_view:
            result = result.data  # as a view of a parameter it would keep that from being swapped for another
        size = 0 if is_view else result.untyped_storage().nbytes()
        if size <= LARGEST and self.nbytes + size <= BUDGET:
            self._kept[key] = _Constant(result, func, args, kwargs, is_view)
            self._results.add(id(result))
            self.nbytes += size
        return result

    def _key(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
        """Return what tells a call from others, None where it takes something else than constants."""
        parts: list[Hashable] = []
        for value in (*args, *kwargs.values()):
            part = self._part(value)
            if part is None:
                return None
            parts.append(part)
        return (func, tuple(parts), tuple(kwargs)) if any(True for _ in _tensors(args, kwargs)) else None

    def _part(self, value: Any) -> Hashable | None:
        if isinstance(value, Tensor):
            constant = type(value) is nn.Parameter or id(value) in self._results
            return (id(value), value.data_ptr()) if constant else None
        if isinstance(value, (tuple, list)):
            parts = tuple(self._part(item) for item in value)
            return None if None in parts else parts
        return (type(value).__name__, repr(value)) if isinstance(value, _PLAIN) else None

    def _is_kept(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        given = [*args[:1], *([kwargs["out"]] if "out" in kwargs else [])]
        own = _storages(constant.result for constant in self._kept.values() if not constant.is_view)
        return not _storages(_tensors(given, {})).isdisjoint(own)


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value, {})


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    with torch._C.DisableTorchFunction():  # no number is read of what a step has put off
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch writes its first argument, or one that it is given for that."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
