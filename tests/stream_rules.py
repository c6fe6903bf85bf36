"""What a stream capture refuses, watched for on any device: a host that waits, and shapes that depend on values.

Inside `stream_rules()` an operator whose result the host needs, or whose shape depends on values, raises `Refused`
with the line of the modeling file that asked for it; transformers' mask code is told that a capture is running.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

HOST_WAITS = {
    "_local_scalar_dense", "nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select",
    "bincount", "equal", "is_nonzero", "item",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Refused(RuntimeError):
    """A step did what a stream capture does not allow."""

    def __init__(self, what: str):
        self.what, self.where = what, _asking_line()
        super().__init__(f"{what} at {self.where}")


class _Rules(TorchDispatchMode):
    """Raises for the operators that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.muted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if not self.muted:
            if name in HOST_WAITS:
                raise Refused(name)
            if name in INDEXING and _has_mask(args) and not _fills(name, args):
                raise Refused(f"{name} by a mask")
            if name == "repeat_interleave" and kwargs.get("output_size") is None and func._overloadname == "Tensor":
                raise Refused("repeat_interleave by a tensor")
        return func(*args, **kwargs)


@contextlib.contextmanager
def stream_rules() -> Iterator[None]:
    """Run a block under the rules of a stream capture."""
    rules, one_hot = _Rules(), F.one_hot

    def unchecked_one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        """A GPU does not look at the values where the number of classes is given."""
        rules.muted = num_classes >= 0
        try:
            return one_hot(tensor, num_classes)
        finally:
            rules.muted = False

    with contextlib.ExitStack() as stack:
        for name in ("tolist", "cpu", "numpy"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, _refusal(f"Tensor.{name}")))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _from_host(name, getattr(torch, name))))
        stack.enter_context(mock.patch.object(F, "one_hot", unchecked_one_hot))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True))
        stack.enter_context(rules)
        yield


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _fills(name: str, args: Any) -> bool:
    """Whether this is `x[mask] = number`, which runs as `masked_fill`."""
    return name != "index" and len(args) > 2 and args[2].dim() == 0


def _refusal(what: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Refused(what)

    return refuse


def _from_host(name: str, make: Any) -> Any:
    """Refuse a tensor made of host values on a device: the copy waits. Without a device it stays on the host."""

    def checked(data: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and not isinstance(data, torch.Tensor):
            raise Refused(f"torch.{name} onto a device")
        return make(data, *args, **kwargs)

    return checked


def _asking_line() -> str:
    """Return the innermost line outside of torch and this file, preferably of a modeling file."""
    frame: Any = sys._getframe(2)
    lines = []
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__:
            lines.append(f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    named = [line for line in lines if line.startswith("modeling_")]
    if lines[:1] != named[:1] and named:
        return f"{named[0]} → {lines[0]}"
    return (named or lines)[0]
