"""What functions of torch compute, put off until something reads it: a mode of torch's Python functions.

What is run once and captured in a graph may be looked at call by call, since that costs nothing later. A handler says
what a call gives without computing it (`pending_ops`, `pointwise_fusion`); whatever reads that then gets it computed
first, and so does whatever may write what it is computed from. Every call of torch's Python functions and of a
tensor's methods passes here, `data_ptr` included, by which kernels get at memory.

Not seen are functions that take tensors apart in C++ without asking torch (`torch.jit.script`, extensions by
pybind11): what was put off is not a number until it is computed, so what reads it shows where a graph is compared with
what it stands for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..core import lazy_hooks

Instead = Mapping[Callable[..., Any], Callable[..., Tensor | None]]
Handlers = Mapping[Callable[..., Any], Callable[..., Tensor | None]]

_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "layout", "is_nested")
ASKS: frozenset[Any] = frozenset({
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride,
    torch.Tensor.is_contiguous, torch.Tensor.get_device, torch.Tensor.element_size, torch.Tensor.is_floating_point,
    torch.Tensor.storage_offset, torch.Tensor.__len__, torch.is_floating_point, torch.numel,
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
})  # fmt: skip
"""What tells how a tensor lies in memory, and of what."""
_VIEWS = {
    torch.Tensor.view, torch.Tensor.transpose, torch.Tensor.permute, torch.Tensor.unsqueeze, torch.Tensor.squeeze,
    torch.Tensor.chunk, torch.Tensor.split, torch.Tensor.split_with_sizes, torch.Tensor.unflatten,
    torch.Tensor.expand, torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.select, torch.Tensor.narrow,
    torch.Tensor.unbind, torch.unbind, torch.Tensor.t, torch.t, torch.Tensor.swapaxes, torch.swapaxes,
    torch.Tensor.movedim, torch.movedim, torch.narrow, torch.select, torch.Tensor.detach,
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT")),
    torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.chunk, torch.split, torch.unflatten,
}  # fmt: skip
"""What never reads a number."""
_SAME_ORDER = {
    torch.Tensor.reshape, torch.Tensor.flatten, torch.Tensor.contiguous, torch.reshape, torch.flatten,
}  # fmt: skip
"""What reads none of a contiguous tensor."""
_VALUES = (Tensor, int, float, torch.dtype)


@dataclass(eq=False)
class Deferred:
    """Something that stands for a tensor and can compute it."""

    place: weakref.ref[torch.UntypedStorage] = field(init=False)
    """The memory of the tensor that the model holds; dead when nothing reads it any more."""
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)

    def stands_for(self, tensor: Tensor) -> None:
        """Take the tensor as its place."""
        self.place, self.shape, self.dtype = weakref.ref(tensor.untyped_storage()), tensor.shape, tensor.dtype

    def on(self, place: torch.UntypedStorage) -> Tensor:
        """Return the tensor itself."""
        return torch.empty(0, dtype=self.dtype, device=place.device).set_(place).view(self.shape)

    @property
    def reads(self) -> Sequence[Tensor]:
        """What it reads when it is computed."""
        raise NotImplementedError

    @property
    def link(self) -> Any:
        """What it is in a chain of functions, a `chain_text.Node`; None where it is no chain."""
        return None

    @property
    def function_alone(self) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
        """The function of torch that it is, and its operands; None where it is none that a chain may take in."""
        return None

    def compute(self, out: Tensor) -> None:
        """Write the tensor."""
        raise NotImplementedError

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Write the memory of the tensor."""
        self.compute(self.on(storage))


class LazyMode(TorchFunctionMode):
    """Runs functions of torch, or puts off what they compute.

    Args:
        instead: by functions of torch, what to call first; it returns None where torch's is to run.
        handlers: by functions of torch that are called with tensors and values, what may put off their result;
            they are given this before the arguments, and return None for what they do not take.
        poisons: fill what is put off with NaN, so that it shows where it is read and not computed.
    """

    of_step = False
    """Whether it is for steps of one token, which have kernels of their own."""
    largest = 1 << 16
    """Numbers of what a chain of functions gives (`pointwise_fusion`): more take longer than the launch they save."""

    def __init__(
        self, instead: Instead | None = None, handlers: Handlers | None = None, *, poisons: bool = False
    ) -> None:
        super().__init__()
        self._instead = instead or {}
        self._handlers = handlers or {}
        self.chains: Handlers = {}
        """The same as handlers, asked last, whatever a call is given."""
        self._poisons = poisons
        self._deferred: dict[int, Deferred] = {}
        self._asks: AbstractContextManager[None] = lazy_hooks.to(self)

    def __enter__(self) -> LazyMode:
        """Begin: this package's operators ask here first (`core.lazy_hooks`)."""
        self._asks = lazy_hooks.to(self)
        self._asks.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Compute what the model still holds."""
        super().__exit__(kind, error, trace)
        self._asks.__exit__(kind, error, trace)
        if kind is None:
            while self._deferred:  # the last first: what it was made of may then be of no use
                self._compute(next(reversed(self._deferred)))
                self._forget()
        self._deferred.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or put off what it computes."""
        given = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **given)
        taken = self._taken(func, args, given)
        if taken is None and func in self._handlers and all(isinstance(a, _VALUES) for a in args):
            taken = self._handlers[func](self, *args, **given)
        if taken is None and func in self.chains:
            taken = self.chains[func](self, *args, **given)
        if taken is not None:
            return taken
        if self._holds() and not self._reads_no_number(func, args):
            self._settle(args, given)
        instead = self._instead.get(func)
        taken = None if instead is None else instead(*args, **given)
        return func(*args, **given) if taken is None else taken

    def _taken(self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]) -> Any:
        """Return what stands for the result of a call that is put off, None for any other."""
        return _dropout(*args, **given) if func is F.dropout else None

    def _holds(self) -> bool:
        """Return whether a call may read what was put off."""
        return bool(self._deferred)

    def rms_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off an RMSNorm; `core.lazy_hooks` says what each of these is given. By default nothing is put off."""
        return None

    def layer_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off a LayerNorm."""
        return None

    def normed(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        """Return what a norm that was put off is computed from."""
        return None

    def product(self, input: Tensor, *product: Any) -> Tensor | None:
        """Put off a product."""
        return None

    def sum(self, first: Tensor, second: Tensor) -> Tensor | None:
        """Put off a sum."""
        return None

    def put_off(
        self, deferred: Deferred, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the tensor that it stands for."""
        place = like.new_empty(tuple(shape), dtype=dtype or like.dtype)
        if self._poisons:
            place.fill_(float("nan") if place.is_floating_point() else 0)
        deferred.stands_for(place)
        self._forget()
        self._deferred[key_of(place)] = deferred
        return place

    def write(self, write: Deferred, *places: Tensor) -> bool:
        """Put off a write into tensors that do not share memory, until something reads one of them."""
        with torch._C.DisableTorchFunction():
            if len({key_of(place) for place in places}) < len(places):
                return False
            self._settle(places)
            for tensor in write.reads:  # which it does not write: what else is computed from them can wait
                self.settle(tensor)
            for place in places:
                write.stands_for(place)
                self._deferred[key_of(place)] = write
        return True

    def taken(self, *places: Tensor) -> Deferred | None:
        """Return a write that was put off into all of these, what it reads computed: the caller does it."""
        with torch._C.DisableTorchFunction():
            found = self.at(places[0])
            if found is None or any(self.at(place) is not found for place in places):
                return None
            for read in found.reads:
                self.settle(read)
            self.forget(*places)
        return found

    def forget(self, *places: Tensor) -> None:
        """Leave out what somebody else has written."""
        for place in places:
            self._deferred.pop(key_of(place), None)

    def _forget(self) -> None:
        """Drop what nothing reads any more, last what was for that."""
        for key in [*self._deferred][::-1]:
            if self._deferred[key].place() is None:
                del self._deferred[key]

    def of(self, tensor: Any) -> Deferred | None:
        """Return what a tensor stands for: all of it, in its order."""
        if not isinstance(tensor, Tensor) or (found := self._deferred.get(key_of(tensor))) is None:
            return None
        whole = found.place() is not None and tensor.numel() == found.shape.numel() and tensor.is_contiguous()
        return found if whole and tensor.dtype == found.dtype else None

    def at(self, tensor: Tensor) -> Deferred | None:
        """Return what will be written where a tensor lies, of which it may be any part."""
        found = self._deferred.get(key_of(tensor))  # which may be of a tensor that is gone, whose key was given anew
        return None if found is None or found.place() is None else found

    def is_read(self, tensor: Tensor) -> bool:
        """Return whether what is put off reads the memory of a tensor."""
        self._forget()
        return any(key_of(tensor) in map(key_of, deferred.reads) for deferred in self._deferred.values())

    def replace(self, tensor: Tensor, deferred: Deferred) -> None:
        """Let a tensor stand for something else, which nothing reads yet."""
        before = self._deferred.pop(key_of(tensor))
        deferred.place, deferred.shape, deferred.dtype = before.place, before.shape, before.dtype
        self._deferred[key_of(tensor)] = deferred

    def take_out(self, wanted: Callable[[Deferred], bool]) -> list[tuple[Deferred, Tensor]]:
        """Forget what is wanted of all that is put off; returns it with the tensors that are to be written."""
        found = []
        for key, deferred in [*self._deferred.items()]:
            if wanted(deferred) and (storage := deferred.place()) is not None:
                del self._deferred[key]
                found.append((deferred, deferred.on(storage)))
        return found

    @staticmethod
    def _reads_no_number(func: Callable[..., Any], args: Sequence[Any]) -> bool:
        if func in ASKS or func in _VIEWS or (func is torch.Tensor.__getitem__ and is_slice(args[1])):
            return True
        return func in _SAME_ORDER and bool(args[0].is_contiguous())

    def _settle(self, *arguments: Any) -> None:
        """Compute what a call reads, and what is computed from something that it may write."""
        self._forget()
        keys = {key_of(tensor) for tensor in tensors_of(arguments)}
        for key in [*self._deferred][::-1]:
            if key in self._deferred and (key in keys or not keys.isdisjoint(map(key_of, self._deferred[key].reads))):
                self._compute(key)

    def settle(self, tensor: Tensor) -> None:
        """Compute a tensor that was put off."""
        if key_of(tensor) in self._deferred:
            self._compute(key_of(tensor))

    def _compute(self, key: int) -> None:
        deferred = self._deferred.pop(key)
        if (storage := deferred.place()) is not None:
            deferred.fill(storage)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    return None if training else input


def is_slice(index: Any) -> bool:
    """Return whether an index gives a view, and reads nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or type(part) in (int, slice) for part in parts)


def key_of(tensor: Tensor) -> int:
    """Return what tells the memory of one tensor from that of another, while both are there."""
    return tensor.untyped_storage()._cdata


def tensors_of(given: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples and dictionaries."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from tensors_of(item)
    elif isinstance(given, dict):
        yield from tensors_of(tuple(given.values()))
