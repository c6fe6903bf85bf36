"""Python's collector of cycles, kept from walking again and again what is large and stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing while the block, or the decorated function, runs.

    Trees of syntax, and what an import of torch brings, are hundreds of thousands of objects that stay: a third of a
    rewrite's time, and a sixth of that import's, went into looking at them. What counts references is freed as ever.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
