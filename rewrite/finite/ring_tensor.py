"""A float tensor whose elements are of the ring: modules and functions of torch compute with it as they stand.

It has the dtype that it was given, and rounds to none. Where an operation has no meaning in the ring, such as a
conversion to integers, `ring.Meaningless` names it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from . import ring
from .ring_operations import ASKS, COMPARES, COMPUTES, FUNCTIONS, INTO, MOVES, elements

WHOLE = 2**15
"""What is taken for a count where integers are made of elements: of other elements one in 32,768 is as small."""


class RingTensor(Tensor):
    """Elements of the ring in the guise of floats."""

    elements: Tensor
    """Their residues, int64: what shares memory with this tensor shares it here."""

    @staticmethod
    def __new__(cls, elements: Tensor, dtype: torch.dtype = torch.float32) -> RingTensor:
        """Put elements into the guise of a dtype."""
        made: RingTensor = Tensor._make_wrapper_subclass(
            cls, elements.size(), strides=elements.stride(), storage_offset=elements.storage_offset(), dtype=dtype
        )
        made.elements = elements
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RingTensor({self.elements})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; those that fuse what the ring can say are taken apart."""
        own = FUNCTIONS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # the answer to a comparison is no element
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch on elements.

        Raises:
            Meaningless: the ring has no such operation.
        """
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is torch.ops.aten._to_copy and not _is_float(kwargs.get("dtype")):
            return _converted(args[0], kwargs["dtype"])
        if packet in COMPUTES:
            return _computed(packet, args, kwargs)
        if packet in INTO:
            if not isinstance(args[0], RingTensor):
                raise ring.Meaningless(f"{packet} into an ordinary tensor")
            found = _computed(INTO[packet], args, kwargs)
            args[0].elements.copy_(found.elements)
            return args[0]
        if packet in MOVES:
            return _moved(func, args, kwargs)
        if packet in COMPARES:
            return packet(*(ring.key(elements(arg)) for arg in args))
        if packet in ASKS:
            return packet(ring.key(elements(args[0])), *args[1:], **kwargs)
        if func.namespace != "aten":  # an operator of the runtime, made of torch's
            return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        taken_apart = func.decompose(*args, **kwargs)
        if taken_apart is NotImplemented:
            raise ring.Meaningless(str(packet))
        return taken_apart


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is None or dtype.is_floating_point


def _converted(tensor: Any, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return elements(tensor) != 0
    whole = ring.key(elements(tensor))
    if bool((whole.abs() > WHOLE).any()):
        raise ring.Meaningless(f"a conversion to {dtype}")
    return whole.to(dtype)


def _computed(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    function = COMPUTES[packet]
    wanted = _keywords(function)
    found = function(*args, **{name: value for name, value in kwargs.items() if wanted is None or name in wanted})
    dtype = kwargs.get("dtype")
    if dtype is None or not _is_float(dtype):
        dtype = next(leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RingTensor))
    if isinstance(found, tuple):
        return tuple(RingTensor(one, dtype) if place == 0 else one for place, one in enumerate(found))
    return RingTensor(found, dtype)


@functools.cache
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of what a function takes; None if it takes any."""
    given = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in given.values())
    return None if takes_any else frozenset(given)


def _moved(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RingTensor)]
    floats = not isinstance(args[0], Tensor) or args[0].dtype.is_floating_point

    def inner(leaf: Any) -> Any:
        if isinstance(leaf, RingTensor):
            return leaf.elements
        if isinstance(leaf, float):  # what is put somewhere: numbers of places are whole
            return ring.element(leaf)
        return ring.elements(leaf) if floats and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    if isinstance(args[0], Tensor) and not isinstance(args[0], RingTensor) and func._schema.is_mutable:
        raise ring.Meaningless(f"{func.overloadpacket} into an ordinary tensor")
    kwargs = {name: value for name, value in kwargs.items() if name not in ("dtype", "device", "layout", "pin_memory")}
    found = func(*tree_map(inner, args), **tree_map(inner, kwargs))
    if func._schema.is_mutable:
        return args[0]
    if isinstance(found, (tuple, list)):
        return type(found)(RingTensor(one, given[0].dtype) for one in found)
    return RingTensor(found, given[0].dtype)


class InTheRing(TorchFunctionMode):
    """Has the tensors that a model makes, and writes elements into, made of elements."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        found = func(*args, **(kwargs or {}))
        if func in _MAKES and type(found) is Tensor and found.is_floating_point():
            return RingTensor(ring.elements(found), found.dtype)
        return found


_MAKES = {torch.zeros, torch.ones, torch.empty, torch.empty_strided, torch.eye}
