"""Which states a step may overwrite while it computes what comes after them.

An operator that returns the state after a token writes it into memory of its own, and its caller copies it to where
the state is kept. In a step of the decode loop the cache says which states it keeps: of these the operator writes the
new one over the old one, and the copy has nothing to do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from torch import Tensor


class _Thread(threading.local):
    kept: frozenset[int] = frozenset()


_THREAD = _Thread()


@contextlib.contextmanager
def overwriting(states: Iterable[Tensor]) -> Iterator[None]:
    """Let this thread's operators overwrite `states`."""
    before, _THREAD.kept = _THREAD.kept, frozenset(state.data_ptr() for state in states)
    try:
        yield
    finally:
        _THREAD.kept = before


def overwrites(state: Tensor) -> bool:
    """Return whether an operator is to write what comes after `state` over it."""
    return bool(_THREAD.kept) and state.data_ptr() in _THREAD.kept
