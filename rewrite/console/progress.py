"""Long work: what it is, n of N, the time it took and about the time that is left.

On a terminal that is one line, replaced a few times a second, whose left part never moves; its last state stays. In a
pipe it is a line now and then, ever more seldom.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rewrite.console.progress_steps import Step

SHORT_SECONDS = 1.0
"""Work that ends sooner leaves nothing behind."""
PLAIN_SECONDS = (5.0, 10.0, 20.0, 40.0)
"""From one line to the next in a pipe; the last one goes on."""
ESTIMATED_SECONDS = 5.0
"""What the time that is left is told from at least, once it is known how many parts there are."""
REFRESHES = 4
"""Of the line on a terminal in a second."""


class Work:
    """One piece of work as it goes on; called with messages, and with `Step`s where it knows how far it is."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic):
        self.what = what
        self.clock = clock
        self.started = clock()
        self.message = ""
        self.done = self.total = 0
        self.first: tuple[int, float] | None = None
        """How many parts were done when it was first known how many there are, and when that was: what prepares the
        parts says nothing of how long they take."""
        self.end: float | None = None
        """When it is estimated to end, by `clock`."""

    def __call__(self, message: str) -> None:
        """Take what is done now."""
        self.message = str(message)
        if not isinstance(message, Step) or not message.total:
            return
        if (message.done, message.total) != (self.done, self.total):
            self.done, self.total = message.done, message.total
            self.first = self.first or (self.done, self.clock())
            self.end = self._estimated(self.done - self.first[0], message.beside, self.clock() - self.first[1])

    def _estimated(self, done: int, beside: int, seconds: float) -> float | None:
        """Return when it may end, by how long some parts took; of those that run beside, half is done on average."""
        if not done or seconds < ESTIMATED_SECONDS:
            return None
        part = seconds / (done + beside / 2)
        return self.clock() + part * (self.total - self.done - beside / 2)

    @property
    def seconds(self) -> float:
        """How long it has gone on."""
        return self.clock() - self.started

    def facts(self) -> str:
        """Say how far it is: `12 of 24, 0:42, about 0:40 left`."""
        counted = [f"{self.done} of {self.total}"] if self.total else []
        left = self.end - self.clock() if self.end is not None and self.done < self.total else 0.0
        return ", ".join([*counted, duration(self.seconds), *([f"about {duration(left)} left"] if left >= 1 else [])])

    def __rich__(self) -> Text:
        """Return the line for a terminal, cut off at its end where it is too long."""
        line = Text(no_wrap=True, overflow="ellipsis").append(self.what, "bold").append(f"  {self.facts()}")
        return line.append(f"  {self.message}", "dim") if self.message else line


def duration(seconds: float) -> str:
    """Return a duration as minutes and seconds, from an hour on with hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def on_terminal(console: Console, work: Work) -> Iterator[Work]:
    """Show work in one line that is replaced; it stays if the work was long, or was given up."""
    with Live(work, console=console, refresh_per_second=REFRESHES, transient=False) as live:
        yield work
        work.message = ""
        work.done = work.total
        live.transient = work.seconds < SHORT_SECONDS


@contextlib.contextmanager
def in_pipe(say: Callable[[str], None], work: Work) -> Iterator[Callable[[str], None]]:
    """Say a line after a second, then one now and then, and one at the end of what was long."""
    timer = threading.Timer(SHORT_SECONDS, say, (f"{work.what} …",))
    timer.daemon = True
    timer.start()
    try:
        yield _Occasionally(say, work)
    finally:
        timer.cancel()
    if work.seconds >= SHORT_SECONDS:
        work.done = work.total
        say(f"{work.what} … done: {work.facts()}")


class _Occasionally:
    """Passes a message on if the last one is long enough ago."""

    def __init__(self, say: Callable[[str], None], work: Work):
        self.say = say
        self.work = work
        self.lines = 0
        self.last = work.clock()

    def __call__(self, message: str) -> None:
        self.work(message)
        if self.work.clock() - self.last >= PLAIN_SECONDS[min(self.lines, len(PLAIN_SECONDS) - 1)]:
            self.last = self.work.clock()
            self.lines += 1
            self.say(f"{self.work.what} … {self.work.facts()}: {self.work.message}")
