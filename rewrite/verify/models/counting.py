"""Lines of the rewritten side are counted while it may run, and not while the original does: counting takes time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coverage import Coverage

_counting: list[Coverage] = []
"""What counts the lines that this process runs."""


@contextlib.contextmanager
def counted(counter: Coverage) -> Iterator[None]:
    """Count what runs in here."""
    counter.start()
    _counting.append(counter)
    try:
        yield
    finally:
        _counting.pop()
        counter.stop()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Run what is not of the rewritten side: without a tracer that every call of a function has to ask.

    Where Python itself counts (`sys.monitoring`), other code costs nothing, and a pause would.
    """
    if not _counting or sys.gettrace() is None:
        yield
        return
    _counting[-1].stop()
    try:
        yield
    finally:
        _counting[-1].start()
