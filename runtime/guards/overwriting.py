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

from .tensor_version import version_of


class _Thread(threading.local):
    kept: frozenset[int] = frozenset()
    as_before: dict[int, int]
    """Versions of the states when the step began, of those that no operator has stepped since."""

    def __init__(self) -> None:
        self.as_before = {}


_THREAD = _Thread()


@contextlib.contextmanager
def overwriting(states: Iterable[Tensor]) -> Iterator[None]:
    """Let this thread's operators overwrite `states`."""
    states = list(states)
    before = _THREAD.kept, _THREAD.as_before
    versions = {state.data_ptr(): version for state in states if (version := version_of(state)) is not None}
    _THREAD.kept, _THREAD.as_before = frozenset(state.data_ptr() for state in states), versions
    try:
        yield
    finally:
        _THREAD.kept, _THREAD.as_before = before


def overwrites(state: Tensor) -> bool:
    """Return whether an operator is to write what comes after `state` over it."""
    return bool(_THREAD.kept) and state.data_ptr() in _THREAD.kept


def steps(state: Tensor) -> bool:
    """Return whether `state` is as it was before the step, which an operator says that it steps now.

    So its kernel may read it before the kernels ahead of it have ended: none of them writes there.
    """
    version = _THREAD.as_before.pop(state.data_ptr(), None)
    return version is not None and version_of(state) == version
