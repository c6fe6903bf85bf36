"""Whether operators may lay out what they return as suits them, and not as torch would.

An encoder whose first product is a convolution hands on hidden states whose dimensions are permuted, and every sum
after it stays so: each norm reads across its rows. Somebody may rely on that layout (`.view`), so an operator keeps
it, but not while a forward is captured: that is compared with the forward as it is, and captured once more where it
fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    free: bool = False


_THREAD = _Thread()


@contextlib.contextmanager
def free(wanted: bool = True) -> Iterator[None]:
    """Let the operators of this thread return contiguous tensors in place of permuted ones."""
    before, _THREAD.free = _THREAD.free, wanted
    try:
        yield
    finally:
        _THREAD.free = before


def is_free() -> bool:
    """Return whether this thread is inside `free`."""
    return _THREAD.free
