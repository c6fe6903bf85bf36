"""Who puts off norms and sums of a decode step, or of a captured forward, until it is known what reads them.

The operators for norms ask here first: a norm that is the first stage of the product that reads it, and a sum that is
the last stage of the product before it, are no kernels of their own. `lazy.step_products` answers; of a forward
`forward.functions`, where a norm is the last stage of the functions before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.compiler import is_compiling


class Puts(Protocol):
    """Something that puts off; each method returns what stands for the result, None where nothing is put off."""

    of_step: bool
    """Whether it is for steps of one token, which have kernels of their own."""

    def rms_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off an RMSNorm of `input`; the rest are the fields of a `Prologue`."""

    def layer_norm(self, input: Tensor, *prologue: Any) -> Tensor | None:
        """Put off a LayerNorm of `input`; the rest are the fields of a `LayerNormPrologue`."""

    def normed(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        """Return input and prologue of a norm that was put off."""

    def product(self, input: Tensor, *product: Any) -> Tensor | None:
        """Put off a product of `input`; the rest is weight, bias and prologue."""

    def sum(self, first: Tensor, second: Tensor) -> Tensor | None:
        """Put off a sum with something that is itself put off."""

    def write(self, write: Any, *places: Tensor) -> bool:
        """Put off a write into tensors that are there already, until something reads one of them."""

    def taken(self, *places: Tensor) -> Any:
        """Return a write that was put off into all of these, which the caller does; None where there is none."""


class _Thread(threading.local):
    puts: Puts | None = None


_THREAD = _Thread()


@contextlib.contextmanager
def to(puts: Puts) -> Iterator[None]:
    """Let `puts` have what this thread may put off."""
    before, _THREAD.puts = _THREAD.puts, puts
    try:
        yield
    finally:
        _THREAD.puts = before


def defers() -> bool:
    """Return whether this thread puts off what a step computes."""
    return _THREAD.puts is not None and _THREAD.puts.of_step


def rms_norm(input: Tensor, *prologue: Any) -> Tensor | None:
    """Return what stands for a norm that is computed later, None where it has to be computed now."""
    return None if is_compiling() or _THREAD.puts is None else _THREAD.puts.rms_norm(input, *prologue)


def layer_norm(input: Tensor, *prologue: Any) -> Tensor | None:
    """Return what stands for a norm that is computed later, None where it has to be computed now."""
    return None if is_compiling() or _THREAD.puts is None else _THREAD.puts.layer_norm(input, *prologue)


def sum(first: Tensor, second: Tensor) -> Tensor | None:
    """Return what stands for a sum that is computed later, None where it has to be computed now."""
    return None if is_compiling() or _THREAD.puts is None else _THREAD.puts.sum(first, second)


def write(write: Any, *places: Tensor) -> bool:
    """Put off a write into tensors until something reads one of them; False where it has to be done now."""
    return not is_compiling() and _THREAD.puts is not None and _THREAD.puts.write(write, *places)


def taken(*places: Tensor) -> Any:
    """Return a write that was put off into all of these, which the caller does; None where there is none."""
    return None if is_compiling() or _THREAD.puts is None else _THREAD.puts.taken(*places)


def normed(tensor: Tensor) -> tuple[Tensor, Any] | None:
    """Return what a norm that was put off is computed from, and its prologue; None for any other tensor."""
    return None if is_compiling() or _THREAD.puts is None else _THREAD.puts.normed(tensor)


def product(input: Tensor, *product: Any) -> Tensor | None:
    """Return what stands for a product that is computed later, None where it has to be computed now."""
    return None if is_compiling() or _THREAD.puts is None else _THREAD.puts.product(input, *product)
