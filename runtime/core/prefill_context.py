"""What a graph that reads a prompt tells the functions of a step: they read its tokens, and not one token a row.

B rows, N tokens of the graph, n <= N tokens of the prompt. What the operators of a step fuse, a prompt wants as well:
rotation and cache write as one kernel, a sum beside the norm that reads it. And behind the attention of the last layer
only the token n - 1 is needed: from there on one row is computed.

The functions ask `current()`; outside of such a prompt it is None.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..guards.tensor_version import version_of

AddNorm = Callable[[Tensor, Tensor, nn.Module], tuple[Tensor, Tensor]]


class NoPromptForm(RuntimeError):
    """A function of a step cannot read several tokens, or not so that a prompt means the same."""

    def __init__(self, function: str, why: str):
        super().__init__(f"{function} reads no prompt here: {why}")


class Reading:
    """One prompt as it is read, the same for every run of its graph.

    Args:
        cache: that it is read into, from its first slot on.
        tokens: N.
        last: `[1]` int64, n - 1.
        narrows: whether the last layer computes that token alone.
        add_norm: `norms.add_norm`, by which a sum comes with the norm that reads it.
    """

    def __init__(self, cache: Any, tokens: int, last: Tensor, narrows: bool, add_norm: AddNorm):
        self.cache, self.tokens, self.last, self.narrows = weakref.ref(cache), tokens, last, narrows
        self.needs_mask = True
        """Until the model has asked for no mask; its layers have no step that heeds one."""
        self._add_norm = add_norm
        self._readers: dict[int, weakref.ref[nn.Module]] = {}
        """Which norm read which sum in the run before."""
        self._begin()

    def _begin(self) -> None:
        self.needs_mask = True
        self._narrows_next = False
        self._sums = 0
        self._sum: Tensor | None = None
        self._normed: Tensor | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the functions of a step read the prompt in a `with` block."""
        before, _THREAD.reading = _THREAD.reading, self
        self._begin()
        try:
            yield
        finally:
            _THREAD.reading = before
            self._sum = self._normed = None

    def is_last(self, layer_idx: int) -> bool:
        """Return whether only one token is computed behind the keys of a layer."""
        cache = self.cache()
        return self.narrows and cache is not None and layer_idx == len(cache.layers) - 1

    def of_last(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the token n - 1 of a tensor with N of them, its dimension kept.

        Raises:
            NoPromptForm: if that dimension is not of the tokens; a GPU would stop for good at a row that is not there.
        """
        if tensor.dim() <= dim or tensor.shape[dim] != self.tokens:
            raise NoPromptForm("a layer", f"{tuple(tensor.shape)} has not {self.tokens} tokens in dimension {dim}")
        return tensor.index_select(dim, self.last)

    def written(self, layer_idx: int) -> None:
        """Take note that the keys and values of a layer are written: behind the last ones, one token is left."""
        self._narrows_next = self.is_last(layer_idx)

    def narrowed(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return a product's input `[B, N or 1, I]` and residual `[B, N, O]`: of one token behind the last keys."""
        if self._narrows_next and input.shape[1] == self.tokens:
            self._narrows_next = False
            input = self.of_last(input)
        return input, self.beside(input, residual)

    def beside(self, input: Tensor, residual: Tensor) -> Tensor:
        """Return the residual `[B, N, O]` of a product of `input` `[B, N or 1, I]`: of the tokens of that."""
        return residual if residual.shape[:-1] == input.shape[:-1] else self.of_last(residual)

    def added(self, product: Tensor, residual: Tensor) -> Tensor:
        """Return `residual + product`, and keep the norm of it where a norm read it in the run before.

        Args:
            product: `[B, N, O]`.
            residual: likewise.
        """
        reader = self._readers.get(self._sums)
        norm = None if reader is None else reader()
        self._sums += 1
        if norm is None or product.shape != residual.shape:
            self._normed, self._sum = None, residual + product
        else:
            self._normed, self._sum = self._add_norm(product, residual, norm)
        return self._sum

    def normed(self, hidden_states: Tensor, norm: nn.Module) -> Tensor:
        """Return `norm(hidden_states)`, which may have been computed with the sum; else remember who reads that."""
        number = self._sums - 1
        if hidden_states is self._sum and version_of(hidden_states) == 0:
            reader = self._readers.get(number)
            if self._normed is not None and reader is not None and reader() is norm:
                return self._normed
            self._readers[number] = weakref.ref(norm)
        normed: Tensor = norm(hidden_states)
        return normed


class _Thread(threading.local):
    reading: Reading | None = None


_THREAD = _Thread()


def current() -> Reading | None:
    """Return the prompt that this thread reads by the functions of a step; None for none."""
    return _THREAD.reading


def of(cache: object) -> Reading | None:
    """Return the prompt that is read into a cache by the functions of a step; None for none."""
    reading = _THREAD.reading
    return reading if reading is not None and reading.cache() is cache else None


def refuse(cache: object, function: str) -> None:
    """Refuse to read a prompt: the function is of one token a row.

    Raises:
        NoPromptForm: if a prompt is being read into the cache.
    """
    if of(cache) is not None:
        raise NoPromptForm(function, "it is of one token a row")
