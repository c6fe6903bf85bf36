"""Runs a call under torch's profiler: once lightly, for times, and once in full, for lines, modules and shapes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .read import chrome
from .trace import Trace

if TYPE_CHECKING:
    from .profiled_calls import Call


def lightly(call: Call, keep: Path | None = None) -> Callable[[Callable[[], None]], Trace]:
    """A recorder of what the device does and when it was launched; on a CPU of torch's operators.

    Args:
        call: tells the device.
        keep: where the trace is kept, for Perfetto or chrome://tracing.
    """

    def record(work: Callable[[], None]) -> Trace:
        from torch.profiler import ProfilerActivity

        return _recorded(work, [ProfilerActivity.CUDA if call.gpu else ProfilerActivity.CPU], False, keep)

    return record


def fully(call: Call) -> Callable[[Callable[[], None]], Trace]:
    """A recorder of operators with their shapes, annotations, and what they launched."""

    def record(work: Callable[[], None]) -> Trace:
        from torch.profiler import ProfilerActivity

        wanted = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if call.gpu else [])]
        return _recorded(work, wanted, True, None)

    return record


def _recorded(work: Callable[[], None], wanted: list[Any], shapes: bool, keep: Path | None) -> Trace:
    from torch.profiler import profile

    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        with _without_advice(), profile(activities=wanted, record_shapes=shapes) as profiler:
            work()
        profiler.export_chrome_trace(str(path))
        return chrome(json.loads(path.read_text(encoding="utf-8")))


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Without torch's warning that it warms up for the next cycle of a profile, and without the library's own log."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler.*")
        yield
