"""The sum behind a block and the norm that the next block computes of it: one kernel, once it is known which norm.

Blocks hand a residual to their last product and a norm to their first one, and neither knows of the other. Which norm
read the sum of a product is remembered; from the next time on the sum comes with it. A sum that somebody changes or
replaces on the way is another tensor, and its norm is computed of that.
"""

from __future__ import annotations

import threading
import weakref

from torch import Tensor, nn
from torch.compiler import is_compiling

from ..core import backend, prefill_context
from ..guards.tensor_version import version_of
from .add_norm import add_norm

_READERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Of each last product the norm that read its sum."""


class _Last(threading.local):
    """The sum that was computed last, and its norm: of a thread, and no longer than the sum lives."""

    total: weakref.ref[Tensor] | None = None
    projection: weakref.ref[nn.Module] | None = None
    version: int | None = None
    norm: weakref.ref[nn.Module] | None = None
    normed: Tensor | None = None

    def keep(self, total: Tensor, projection: nn.Module, norm: nn.Module | None, normed: Tensor | None) -> None:
        """Keep what is known of a sum."""
        self.total, self.version = weakref.ref(total, self._forget), version_of(total)
        self.projection, self.norm = weakref.ref(projection), None if norm is None else weakref.ref(norm)
        self.normed = normed

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is that sum, unchanged as far as torch counts writes; it is forgotten then."""
        if self.total is None or self.total() is not tensor:
            return False
        unchanged = self.version is not None and self.version == version_of(tensor)
        self.total = None
        return unchanged

    def _forget(self, total: weakref.ref[Tensor]) -> None:
        if self.total is total:
            self.total = self.projection = self.norm = self.normed = None


_LAST = _Last()


def added(product: Tensor, residual: Tensor, projection: nn.Module) -> Tensor:
    """Return `residual + product`, with the norm of it where one read the sum of this projection before.

    Args:
        product: `[B, S, O]`.
        residual: likewise.
        projection: that computed the product.
    """
    if (prompt := prefill_context.current()) is not None:
        return prompt.added(product, residual)
    if not _is_plain(product, residual):
        return residual + product
    reader = _READERS.get(projection)
    norm = None if reader is None else reader()
    normed: Tensor | None = None
    if norm is None:
        total = residual + product
    else:
        normed, total = add_norm(product, residual, norm)
    _LAST.keep(total, projection, norm, normed)
    return total


def normed(hidden_states: Tensor, norm: nn.Module) -> Tensor:
    """Return `norm(hidden_states)`, which may have been computed with the sum; else remember who reads that."""
    if (prompt := prefill_context.current()) is not None:
        return prompt.normed(hidden_states, norm)
    if not is_compiling() and type(hidden_states) is Tensor and _LAST.knows(hidden_states):
        found, projection, reader = _LAST.normed, _LAST.projection, _LAST.norm
        _LAST.projection = _LAST.norm = _LAST.normed = None
        if found is not None and reader is not None and reader() is norm:
            return found
        if projection is not None and (known := projection()) is not None:
            _READERS[known] = weakref.ref(norm)
    result: Tensor = norm(hidden_states)
    return result


def _is_plain(product: Tensor, residual: Tensor) -> bool:
    """Return whether a sum may be noted: two tensors of one shape and dtype, no gradients, nobody who watches."""
    same = type(residual) is Tensor and product.shape == residual.shape and product.dtype == residual.dtype
    return same and backend.nothing_watches(product) and not backend.wants_gradient(product, residual)
