"""Divides a span of time among what the device did in it, so that every µs is somewhere exactly once.

Where activities overlap (streams, dependent launches), the one that began first has the time. Where nothing runs, the
device waits: for the host, if the call that launched the next activity ended only then; else between kernels, for
what starting one after another takes. On a CPU operators take the place of activities, each with what its own inner
operators do not take, and the rest is Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .trace import Activity, Operator

HOST = "host"
"""The device waits for the host; on a CPU, Python and dispatching."""
BETWEEN = "between"
"""The device starts what was launched long ago."""
UNKNOWN = "idle"
"""Nothing runs, and the trace does not say when what follows was launched."""
WAITS = {HOST: "waiting for the host", BETWEEN: "between kernels", UNKNOWN: "idle, cause not recorded"}


@dataclass(frozen=True)
class Share:
    """What one activity has of a span: `taken` µs from `start` on."""

    item: Activity | Operator
    start: float
    taken: float


@dataclass(frozen=True)
class Wait:
    """A time without activity."""

    kind: str
    start: float
    taken: float


@dataclass(frozen=True)
class Account:
    """A span, divided."""

    start: float
    end: float
    shares: tuple[Share, ...]
    waits: tuple[Wait, ...]

    @property
    def length(self) -> float:
        """µs of the span."""
        return self.end - self.start

    @property
    def busy(self) -> float:
        """µs in which something ran."""
        return sum(share.taken for share in self.shares)

    def waited(self, kind: str) -> float:
        """µs of one kind of waiting."""
        return sum(wait.taken for wait in self.waits if wait.kind == kind)


def of_device(activities: Iterable[Activity], start: float, end: float) -> Account:
    """Divide a span among activities in order of their starts; one that begins before the span has its part in it."""
    shares: list[Share] = []
    waits: list[Wait] = []
    cursor = start
    for activity in activities:
        if activity.end <= start or activity.start >= end:
            continue
        if activity.start > cursor:
            waits += _waits(activity, cursor, activity.start)
            cursor = activity.start
        ended = min(activity.end, end)
        taken = max(ended - cursor, 0.0)
        shares.append(Share(activity, cursor, taken))
        cursor = max(cursor, ended)
    if cursor < end:
        waits.append(Wait(HOST, cursor, end - cursor))
    return Account(start, end, tuple(shares), tuple(waits))


def _waits(following: Activity, start: float, end: float) -> list[Wait]:
    if following.launch is None:
        return [Wait(UNKNOWN, start, end - start)]
    host = min(max(following.launch.end - start, 0.0), end - start)
    found = [Wait(HOST, start, host), Wait(BETWEEN, start + host, end - start - host)]
    return [wait for wait in found if wait.taken > 0]


def of_host(operators: Sequence[Operator], start: float, end: float) -> Account:
    """Divide a span of one thread among the operators that begin in it, by their starts; the rest is `HOST`."""
    inside = [operator for operator in operators if start <= operator.start < end]
    inner = [0.0] * len(inside)
    top = 0.0
    stack: list[int] = []
    for number, operator in enumerate(inside):
        while stack and inside[stack[-1]].end <= operator.start:
            stack.pop()
        if stack:
            inner[stack[-1]] += operator.duration
        else:
            top += operator.duration
        stack.append(number)
    shares = [
        Share(operator, operator.start, max(operator.duration - below, 0.0))
        for operator, below in zip(inside, inner, strict=True)
    ]
    rest = max(end - start - top, 0.0)
    return Account(start, end, tuple(shares), (Wait(HOST, start, rest),) if rest else ())
