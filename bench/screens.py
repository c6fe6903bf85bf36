"""Commands run as on a terminal of 80 columns, and what is left on its screen."""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import pty
import re
import resource
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

COLUMNS, ROWS = 80, 4000
_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]|\x1b[=>78]")


@dataclass(frozen=True)
class Screen:
    """What a command left behind."""

    command: str
    code: int
    seconds: float
    processor: float
    """Seconds of all processors that it and what it started took."""
    text: str
    """The lines of the screen when it ended."""
    progress: str
    """The last line that was shown while it ran and is gone."""
    cut: int
    """Lines that did not fit, which the terminal continued on the next one."""


def run(command: str, folder: Path, environment: Mapping[str, str], limit: float = 1800.0) -> Screen:
    """Run a command line of a shell on a terminal of its own, and return its screen.

    Raises:
        TimeoutError: if it takes longer than `limit` seconds.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    started, before = time.monotonic(), _processor()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown, decoder = Terminal(), codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := _read(controller):
        shown.write(decoder.decode(data))
        if time.monotonic() - started > limit:
            process.kill()
            raise TimeoutError(f"{command} ran for more than {limit:.0f} s")
    os.close(controller)
    code = process.wait()
    return Screen(
        command, code, time.monotonic() - started, _processor() - before, shown.text(), shown.gone, shown.cut
    )


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(controller: int) -> bytes:
    """Return what was written, nothing once every writer has closed the terminal."""
    try:
        return os.read(controller, 65536)
    except OSError as error:
        if error.errno != errno.EIO:  # how Linux says that the other end is closed
            raise
        return b""


class Terminal:
    """As much of a terminal as lines, erasing and moving the cursor need; colours are dropped."""

    def __init__(self, columns: int = COLUMNS):
        self.columns = columns
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.gone = ""
        self.cut = 0
        self._rest = ""

    def write(self, text: str) -> None:
        """Show what a program writes."""
        text, self._rest = self._rest + text, ""
        position = 0
        while position < len(text):
            if text[position] == "\x1b":
                found = _CONTROL.match(text, position)
                if found is None:
                    self._rest = text[position:]  # the end of the sequence is still to come
                    return
                self._control(found)
                position = found.end()
            else:
                self._character(text[position])
                position += 1

    def text(self) -> str:
        """Return the screen, without blanks at the ends of lines and lines at the end."""
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip()

    def _character(self, character: str) -> None:
        if character == "\n":
            self._down()
        elif character == "\r":
            self.column = 0
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\t":
            self.column = min(self.column // 8 * 8 + 8, self.columns - 1)
        elif character >= " ":
            if self.column == self.columns:
                self.cut += 1
                self._down()
                self.column = 0
            line = self.lines[self.row]
            line += " " * (self.column - len(line))
            line[self.column : self.column + 1] = character
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _control(self, found: re.Match[str]) -> None:
        given, what = found[1] or "", found[2]
        count = int(given) if given.isdigit() else 0
        if what == "A":
            self.row = max(0, self.row - max(count, 1))
        elif what == "B":
            self.row = min(len(self.lines) - 1, self.row + max(count, 1))
        elif what == "G":
            self.column = max(count, 1) - 1
        elif what == "K":
            line = self.lines[self.row]
            self.gone = "".join(line).strip() or self.gone
            del line[0 if count == 2 else self.column :]
        elif what == "J":
            del self.lines[self.row + 1 :]
            del self.lines[self.row][self.column :]
