"""Ends a check in which the rewritten side never comes back: a loop without progress, a forward without a return.

What is counted is the processor time that the rewritten side uses, in slices of `SLICE_S`, beside the original's in
the same check. A machine that stalls, or that others use, makes no slice of it; a slow one makes the original's slices
too; a slice counts once however long Python was away, and however many threads used it up.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

SLICE_S = 2.0
"""Processor seconds from one look to the next; nearly every check takes less."""
LEAST = 150
"""Slices that every check has. The longest of llama takes two (4.2 s, `torch.compile`; 2 cores that others used)."""
TIMES = 20
"""Slices for each one that the original used in the same check."""


class Hung(BaseException):
    """The rewritten side does not come back. No `except Exception` of the code under test can take it for its own."""

    def __init__(self, own: float, original: float, where: str):
        super().__init__(
            f"it does not end: the rewritten side has computed for {own:.0f} s (processor time), the original in the "
            f"same check for {original:.0f} s; it goes round in {where}"
        )


@dataclass
class _Watch:
    """What is known of the check that runs."""

    own: int = 0
    original: int = 0
    of_original: int = 0
    """How many calls of the original are on the stack."""
    counted: float = field(default_factory=time.monotonic)
    """When the last slice was."""
    lasting: list[FrameType] = field(default_factory=list)
    """The calls that have been there ever since half of the patience was gone, the outermost first."""

    def look(self, frame: FrameType | None) -> None:
        """Count a slice.

        Raises:
            Hung: there were too many; raised again at each further look, for code that swallows it.
        """
        now = time.monotonic()
        if now - self.counted < 0.9 * SLICE_S:  # several threads use up a slice together, faster than one
            return
        self.counted = now
        if self.of_original:
            self.original += 1
            return
        self.own += 1
        allowed = LEAST + TIMES * self.original
        if self.own > allowed // 2:  # frames hold what they compute with, so none is kept of a check that is right
            stack = _stack(frame)
            kept = [one for one, now in zip(self.lasting, stack, strict=False) if one is now]
            self.lasting = kept or stack
        if self.own > allowed:
            where = _place(self.lasting)
            self.lasting = []
            raise Hung(self.own * SLICE_S, self.original * SLICE_S, where)


_watches: list[_Watch] = []
"""The check that this process runs; none, or one."""


def _look(signum: int, frame: FrameType | None) -> None:
    """Take a signal of the timer; it stays where it is, since one that is on its way would else end the process."""
    for watch in _watches:
        watch.look(frame)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Run the checked code, and end it where it does not end.

    Only a process's first thread can, where there is such a timer and nobody else (a profiler) uses it.

    Raises:
        Hung: the rewritten side used up its time.
    """
    if _watches or not _able():
        yield
        return
    signal.signal(signal.SIGPROF, _look)
    signal.siginterrupt(signal.SIGPROF, False)
    _watches.append(_Watch())
    signal.setitimer(signal.ITIMER_PROF, SLICE_S, SLICE_S)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_PROF, 0)
        finally:  # also where it went off just then
            signal.setitimer(signal.ITIMER_PROF, 0)
            _watches.clear()


def _able() -> bool:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGPROF) in (signal.SIG_DFL, _look) and not signal.getitimer(signal.ITIMER_PROF)[0]


@contextlib.contextmanager
def of_original() -> Iterator[None]:
    """Count what runs in here as the original's time."""
    if not _watches:
        yield
        return
    watch = _watches[0]
    watch.of_original += 1
    try:
        yield
    finally:
        watch.of_original -= 1


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The calls that lead to a frame, the outermost first."""
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _place(frames: list[FrameType]) -> str:
    """Name the innermost call that was there at every look: the function whose loop or callee does not end."""
    frame = frames[-1]
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    file = Path(code.co_filename)
    return f"{name} ({file.parent.name}/{file.name}:{frame.f_lineno})"
