"""Whether forwards are captured: chosen by the environment or by a call, for the whole process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

MODES = ("auto", "exact", "never", "always")
ENVIRONMENT_VARIABLE = "REWRITE_FORWARD_GRAPHS"

RAGGED_VARIABLE = "REWRITE_RAGGED_BATCHES"

_chosen: str | None = None
_ragged: bool | None = None


def set_forward_graphs(mode: str) -> None:
    """Choose when the forward of a model replays a graph: one of `MODES`.

    `auto` captures the second call with inputs of the same shapes and keeps the graph where it was faster, and pads
    texts of several lengths where that is proved to change nothing; `exact` pads nothing; `always` captures the first
    call and does not measure; `never` runs every forward as the model's code does.

    Raises:
        ValueError: if `mode` is not one of `MODES`.
    """
    global _chosen
    _chosen = _checked(mode)


def get_forward_graphs() -> str:
    """Return the mode in force: the last `set_forward_graphs`, else `REWRITE_FORWARD_GRAPHS`, else `"auto"`."""
    return _chosen if _chosen is not None else _checked(os.environ.get(ENVIRONMENT_VARIABLE, "auto"))


@contextlib.contextmanager
def use_forward_graphs(mode: str) -> Iterator[None]:
    """Choose a mode for the length of a `with` block."""
    global _chosen
    previous, _chosen = _chosen, _checked(mode)
    try:
        yield
    finally:
        _chosen = previous


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"unknown mode '{mode}' of {ENVIRONMENT_VARIABLE}: choose one of {', '.join(MODES)}")
    return mode


def set_ragged_batches(wanted: bool) -> None:
    """Choose whether layers run on the tokens alone that a mask shows, where it hides a quarter of a batch or more.

    What stands at hidden positions of the outputs is another number then, mostly zero. It is off by default.
    """
    global _ragged
    _ragged = wanted


def get_ragged_batches() -> bool:
    """Return the choice in force: the last `set_ragged_batches`, else whether `REWRITE_RAGGED_BATCHES` is `1`."""
    return _ragged if _ragged is not None else os.environ.get(RAGGED_VARIABLE, "0") == "1"


@contextlib.contextmanager
def use_ragged_batches(wanted: bool = True) -> Iterator[None]:
    """Choose that for the length of a `with` block."""
    global _ragged
    previous, _ragged = _ragged, wanted
    try:
        yield
    finally:
        _ragged = previous
