"""Standard streams as they may be found: closed, full, or without the characters that we print."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rewrite.errors import StreamLost

SHOWN = "rewrite.shown"
"""The error handler that shows a character which an encoding does not have."""
_NAMES = {1: "standard output", 2: "standard error"}
_PLAIN = {"·": "-", "…": "...", "–": "-", "→": "->", "×": "x", "│": "|", "─": "-"}


class ReaderGone(Exception):
    """The reader of our standard output has seen enough; click would exit with 1 for the OSError itself."""


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Write out what the body prints.

    Raises:
        ReaderGone: if nobody reads it any more.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error


class _Stream(io.FileIO):
    """A standard stream whose failure is an error of its own, and no OSError that could come from any file."""

    def __init__(self, number: int):
        super().__init__(number, "w", closefd=False)
        self.number = number

    def write(self, data: Any) -> int:
        """Write some bytes.

        Raises:
            BrokenPipeError: if nobody reads any more.
            StreamLost: if they cannot be written.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            discard(self.number)  # what is still buffered would fail once more at exit
            raise StreamLost(_NAMES[self.number], error.strerror or str(error)) from error


def prepare() -> None:
    """Put streams in place that are open, show every character, and fail with an error that says which they are."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which no other file gets then
    codecs.register_error(SHOWN, _shown)
    sys.stdout, sys.stderr = _opened(1, sys.stdout), _opened(2, sys.stderr)


def discard(number: int) -> None:
    """Let everything that is written to a standard stream from now on go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


def _opened(number: int, before: TextIO | None) -> TextIO:
    raw = _Stream(number)
    encoding = before.encoding if before is not None else "utf-8"
    buffered = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffered, encoding, SHOWN, line_buffering=number == 2 or raw.isatty())


def _shown(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in letters), error.end
