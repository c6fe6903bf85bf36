"""Who multiplies by a copy of a weight: a graph would keep the copy's address, and nobody would renew it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    noted: bool = False


_THREAD = _Thread()


def note() -> None:
    """Say that something computed from a weight is used in its place, and is renewed when that changes."""
    _THREAD.noted = True


class Seen:
    """Whether a copy was used."""

    copies: bool = False


@contextlib.contextmanager
def watching() -> Iterator[Seen]:
    """Notice copies that this thread uses inside; what is yielded knows them at the end."""
    seen, before = Seen(), _THREAD.noted
    _THREAD.noted = False
    try:
        yield seen
    finally:
        seen.copies, _THREAD.noted = _THREAD.noted, before
