"""What a profiler recorded: activities of the device, calls that launched them, operators and marks of the host.

Times are µs from an origin that the trace chooses; `base_ns` is that origin in ns of the system's clock, where known.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A call of the driver or runtime by the host, which may have started activities."""

    name: str
    start: float
    end: float
    thread: Any
    correlation: int | None

    @property
    def graph(self) -> bool:
        """Whether it launched a captured graph."""
        return "GraphLaunch" in self.name


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill on a device."""

    name: str
    start: float
    end: float
    stream: Any = None
    correlation: int | None = None
    launch: Launch | None = None

    @property
    def duration(self) -> float:
        """µs."""
        return self.end - self.start


@dataclass(frozen=True)
class Operator:
    """An operator of torch on the host, with what it was given where shapes were recorded."""

    name: str
    start: float
    end: float
    thread: Any
    shapes: Sequence[Any] = ()
    dtypes: Sequence[str] = ()
    strides: Sequence[Any] = ()
    values: Sequence[Any] = ()
    """Its arguments that are no tensors, as text."""
    sequence: int | None = None
    """torch's number that a forward operator and its backward share."""

    @property
    def duration(self) -> float:
        """µs."""
        return self.end - self.start


@dataclass(frozen=True)
class Mark:
    """A named span of the host: an annotation, or a function of Python."""

    name: str
    start: float
    end: float
    thread: Any


@dataclass
class Trace:
    """Everything, each list by start."""

    activities: list[Activity] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    functions: list[Mark] = field(default_factory=list)
    device: str = ""
    source: str = ""
    """Which profiler wrote it."""
    base_ns: int | None = None
    totals: bool = False
    """Whether times are sums over a run without starts: `activities` then has one entry a kernel, and no timeline."""
    counts: dict[str, int] = field(default_factory=dict)
    """How often each kernel ran, where times are sums."""

    def sort(self) -> Trace:
        """Put every list in order of starts; what is longer goes first among equals."""
        spans: tuple[list[Any], ...] = (
            self.activities,
            self.launches,
            self.operators,
            self.marks,
            self.functions,
        )
        for each in spans:
            each.sort(key=lambda span: (span.start, -span.end))
        return self


class Enclosing:
    """Finds which spans of a thread enclose a moment: spans of one thread are nested or apart."""

    def __init__(self, spans: Iterable[Any]):
        self._threads: dict[Any, tuple[list[float], list[tuple[Any, ...]]]] = {}
        by_thread: dict[Any, list[Any]] = {}
        for span in spans:
            by_thread.setdefault(span.thread, []).append(span)
        for thread, own in by_thread.items():
            self._threads[thread] = _flattened(sorted(own, key=lambda span: (span.start, -span.end)))

    def at(self, thread: Any, moment: float) -> tuple[Any, ...]:
        """Return the spans around a moment, the outermost first."""
        times, stacks = self._threads.get(thread, ([], []))
        place = bisect.bisect_right(times, moment) - 1
        return stacks[place] if place >= 0 else ()


def _flattened(spans: Sequence[Any]) -> tuple[list[float], list[tuple[Any, ...]]]:
    """The moments at which the innermost span changes, and the stack from each on."""
    times: list[float] = []
    stacks: list[tuple[Any, ...]] = []
    stack: list[Any] = []

    def note(moment: float) -> None:
        times.append(moment)
        stacks.append(tuple(stack))

    for span in spans:
        while stack and stack[-1].end <= span.start:
            ended = stack.pop().end
            note(ended)
        stack.append(span)
        note(span.start)
    while stack:
        ended = stack.pop().end
        note(ended)
    return times, stacks
