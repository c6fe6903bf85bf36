"""torch's attention kernels by name, which `backends` has: for the process, or for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..core import backend
from .backends import check


def set_attention_backend(name: str | None) -> None:
    """Let attention outside captured decode steps run by one of `BACKENDS`; None is the table's choice again.

    With `own` it is the ordinary way, and no table is asked.

    Raises:
        ValueError: if `name` is none of these.
        AttentionBackendUnavailable: if it cannot run on this machine.
    """
    if name not in (None, backend.OWN_ATTENTION):
        check(str(name))
    backend.named_besides["attention"] = name


def get_attention_backend() -> str | None:
    """Return the last `set_attention_backend`, else `REWRITE_ATTENTION`, else None."""
    return backend.named_besides["attention"]


@contextlib.contextmanager
def use_attention_backend(name: str | None) -> Iterator[None]:
    """Choose an attention backend for the length of a `with` block; raises as `set_attention_backend`."""
    before = get_attention_backend()
    set_attention_backend(name)
    try:
        yield
    finally:
        set_attention_backend(before)


def is_named() -> bool:
    """Return whether a kernel was asked for by name."""
    return get_attention_backend() not in (None, backend.OWN_ATTENTION)
