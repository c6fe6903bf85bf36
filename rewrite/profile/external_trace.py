"""A trace that was made elsewhere, divided by category: the same record as that of a profile, with one side."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from rewrite.measure import categories

from . import accounts, origins
from .accounts import Account
from .read import read
from .trace import Trace

_STEP = re.compile(r"ProfilerStep#\d+")


def record_of(path: Path) -> dict[str, Any]:
    """Read a trace and divide its time.

    Where torch's profiler marked steps (`ProfilerStep#…`), times are of one step on average; else of the whole trace,
    from the first activity to the end of the last.

    Raises:
        TraceNotReadable: the file is no trace.
    """
    trace = read(path)
    windows = _windows(trace)
    steps = [_account(trace, window) for window in windows]
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(lambda: {"count": 0.0, "us": 0.0})
    for step in steps:
        for share in step.shares:
            kind = (categories.category if trace.activities else categories.operator_category)(share.item.name)
            row = rows[kind, origins.label(share.item)]
            row["us"] += share.taken / len(steps)
            row["count"] += trace.counts.get(share.item.name, 1) / len(steps)
    found: list[dict[str, Any]] = [
        {"category": kind, "name": name, "operator": "", "line": None, "where": None, "module": None}
        | {"bytes": None, "operations": None}
        | row
        for (kind, name), row in rows.items()
    ]
    found.sort(key=lambda row: -float(row["us"]))
    waits = {kind: sum(step.waited(kind) for step in steps) / len(steps) for kind in accounts.WAITS}
    by_kind: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "count": 0.0})
    for row in found:
        by_kind[row["category"]]["us"] += row["us"]
        by_kind[row["category"]]["count"] += row["count"]
    typical = sorted(steps, key=lambda step: step.length)[len(steps) // 2]
    side = {
        "sum_us": sum(step.length for step in steps) / len(steps),
        "steps": len(steps),
        "activities": sum(row["count"] for row in found),
        "categories": {kind: by_kind[kind] for kind in categories.CATEGORIES if kind in by_kind},
        "waits": {kind: us for kind, us in waits.items() if us},
        "rows": found,
        "modules": [],
        "lines": [],
        "timeline": [] if trace.totals else _timeline(typical),
        "notes": _notes(trace, len(steps)),
    }
    return {
        "schema": 1,
        "kind": "trace",
        "file": path.name,
        "source": trace.source,
        "device": trace.device,
        "sides": {"original": side},
    }


def _windows(trace: Trace) -> list[tuple[float, float]]:
    spans = trace.activities or trace.operators
    whole = (spans[0].start, max(span.end for span in spans))
    marks = sorted((m.start, m.end) for m in trace.marks if _STEP.fullmatch(m.name))
    if trace.totals or not marks:
        return [whole]
    inside = [window for window in marks if any(window[0] <= span.start < window[1] for span in spans)]
    return inside or [whole]


def _account(trace: Trace, window: tuple[float, float]) -> Account:
    if trace.activities:
        return accounts.of_device(trace.activities, *window)
    threads: dict[Any, float] = defaultdict(float)
    for operator in trace.operators:
        threads[operator.thread] += operator.duration
    busiest = max(threads, key=lambda thread: threads[thread])
    return accounts.of_host([o for o in trace.operators if o.thread == busiest], *window)


def _timeline(step: Account) -> list[list[Any]]:
    shares = [share for share in step.shares if share.taken > 0][:1500]
    kind = categories.category
    return [[s.start - step.start, s.taken, kind(s.item.name), origins.label(s.item)] for s in shares]


def _notes(trace: Trace, steps: int) -> list[str]:
    if trace.totals:
        return ["sums of a whole run: what the device waited for is not in this file"]
    said = [
        f"one of {steps} steps, on average" if steps > 1 else "the whole trace, from its first activity to its last"
    ]
    if trace.activities and not any(activity.launch for activity in trace.activities):
        said.append("the trace has no launches: why the device was idle cannot be said")
    return said
