"""What a forward copies from the host to the device, kept on the device: constants that its code makes on the CPU.

A scale by `torch.tensor(...)`, a list of shapes, a grid of numpy, an index: each is copied at every call, which a
graph cannot hold. What is captured reads nothing back from the device (that fails), so that such a value follows from
shapes, the host's arguments and the model, which are the graph's own. Copies are watched while the call runs; what is
captured reads memory that has been filled then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .known_numbers import KnownNumbers

_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Make a tensor of what the host holds."""
_MOVES = {Tensor.to, Tensor.cuda, Tensor.type_as}
"""Return a tensor on another device."""
_READS = {
    Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, Tensor.index_put_, Tensor.index_put, Tensor.where,
    torch.index_put, torch.where, torch.index_put_,
}  # fmt: skip
"""Take host tensors beside the device's, and copy them; of other functions a host's number is an argument."""


class ChangesFromCallToCall(RuntimeError):
    """What a forward copies from the host is another value at each run."""

    def __init__(self, place: int):
        super().__init__(f"of what the host copies to the device, number {place} is another value at each run")


class _Copy(NamedTuple):
    """A tensor of the host's, as it was, and the device's."""

    host: Tensor
    own: Tensor


class HostCopies(TorchFunctionMode):
    """Watches a forward in a first `with` block, and gives it the device's copies in every further one.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._copies: list[_Copy] = []
        self._next = 0
        self._watches: bool | None = None
        self._numbers = KnownNumbers(device)

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __enter__(self) -> HostCopies:
        self._next, self._watches = 0, self._watches is None
        self._numbers.begin()
        super().__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        self._numbers.begin()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        given = dict(kwargs or {})
        is_known, number = self._numbers.read(func, args, given)
        if is_known:
            return number
        copied = self._copied(func, args, given)
        result = func(*args, **given) if copied is None or self._watches else copied()
        if copied is not None and func not in _READS:
            self._numbers.add(result)
        else:
            self._numbers.follow(func, args, given, result)
        return result

    def _copied(
        self, func: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """Return what does the same with the device's copies; None for a function that copies nothing."""
        if func in _FROM_DATA and self._makes_own(func, args, given):
            own = self._own(func(*args, **{**given, "device": "cpu"}))
            return None if own is None else own.clone
        if func in _MOVES and self._is_host(args[0]) and self._moves_here(func, args[1:], given):
            own = self._own(args[0])
            return functools.partial(_moved, func, own, args[1:], given)
        if func in _READS and self._has_own((*args, *given.values())):
            read, named = self._read(func, args, given)
            return functools.partial(func, *read, **named)
        return None

    def _own(self, host: Any) -> Any:
        """Return the device's copy of what is copied next; None for what has no elements, which is not copied."""
        if not self._is_host(host):
            return None
        place, self._next = self._next, self._next + 1
        if place == len(self._copies):
            with torch.inference_mode(False), torch.no_grad():
                self._copies.append(_Copy(host.detach().clone(), host.detach().to(self._device)))
        known = self._copies[place]
        if known.host.dtype != host.dtype or known.host.shape != host.shape or not _same(known.host, host):
            raise ChangesFromCallToCall(place)
        return known.own

    def _is_host(self, value: Any) -> bool:
        """Return whether something is a tensor of the host's, with elements: what has none is not copied."""
        return type(value) is Tensor and value.device.type == "cpu" != self._device.type and value.numel() > 0

    def _is_own(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self._device.type

    def _makes_own(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        """Return whether a tensor is made on the device of what no tensor of the device is in."""
        place = given.get("device")
        if place is None and func is Tensor.new_tensor:
            place = args[0].device
        data = args[1:] if func is Tensor.new_tensor else args
        return place is not None and torch.device(place).type == self._device.type and not self._has_own(data)

    def _has_own(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self._has_own, value))
        return self._is_own(value)

    def _moves_here(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        """Return whether a host's tensor is moved to the device."""
        if func is Tensor.cuda:
            return self._device.type == "cuda"
        for value in (*args, *given.values()):
            if isinstance(value, Tensor):
                return self._is_own(value)
            if isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
                return torch.device(value).type == self._device.type
        return False

    def _read(
        self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments of a function with the device's copies for what it would copy."""
        args = list(args)
        if func is Tensor.__setitem__ and self._has_mask(args[1]):
            return args, dict(given)  # torch fills with a number of the host's: one of the device it would assign
        if func is Tensor.__setitem__ and isinstance(args[2], (int, float)):
            args[2] = torch.tensor(args[2], dtype=args[0].dtype, device="cpu")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args[1] = self._index(args[1])
        return [self._instead(value) for value in args], {key: self._instead(value) for key, value in given.items()}

    def _instead(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(map(self._is_host, value)):
            return type(value)(map(self._instead, value))
        return self._own(value) if self._is_host(value) else value

    def _has_mask(self, index: Any) -> bool:
        """Return whether a mask of the device is in an index."""
        if isinstance(index, tuple):
            return any(map(self._has_mask, index))
        return self._is_own(index) and index.dtype in (torch.bool, torch.uint8)

    def _index(self, index: Any) -> Any:
        """Return an index with tensors for its lists, which torch makes of them on the host."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, list) and index and not self._has_own(index):
            index = torch.tensor(index, device="cpu")
        if self._is_host(index) and index.dtype in (torch.bool, torch.uint8) and index.dim() == 1:
            return index.nonzero()[:, 0]
        return index


def _moved(func: Callable[..., Any], own: Tensor, args: Sequence[Any], given: Mapping[str, Any]) -> Tensor:
    """Return a tensor that is not the copy itself, which the forward may write to."""
    moved: Tensor = func(own, *args, **given)
    return moved.clone() if moved is own else moved


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
