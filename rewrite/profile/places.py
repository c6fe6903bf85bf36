"""Notes which line of a modeling file, and which module, the host is at while a profiler records.

Python's own tracing marks each line of the watched files, and each `forward` of a module of the model, with an
annotation that the profiler records like any other. So whatever is launched (by torch, Triton or a library) has the
line and the module that asked for it, and nothing of the model is changed: no hook, no wrapped class, no dispatch
mode, each of which a package would see and go another way. It is slow, so times are taken from another run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "rewrite line #"


@dataclass(frozen=True)
class Place:
    """Where the host was. `line` is 0 for a module's `forward` outside the watched files."""

    file: str
    line: int
    function: str
    module: str
    """The path of the module, `model.layers.3.mlp`; the model itself is `""`."""


class Places:
    """The places of one recording; an annotation's name ends with the number of its place."""

    def __init__(self, model: Any, files: set[str]):
        self._names = {id(module): name for name, module in model.named_modules()}
        self._files = files
        self._numbers: dict[Place, int] = {}
        self.list: list[Place] = []

    def of(self, annotation: str) -> Place | None:
        """Return the place that an annotation stands for; None where it is somebody else's."""
        if not annotation.startswith(PREFIX):
            return None
        return self.list[int(annotation[len(PREFIX) :])]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Annotate lines and modules in this thread.

        Whoever traces already (a debugger, coverage) sees nothing of what runs inside.
        """
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(before)

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        watched = code.co_filename in self._files
        if not watched and code.co_name != "forward":
            return None
        module = self._names.get(id(frame.f_locals.get("self")))
        if watched:
            return _Lines(self, code.co_name, _shown(code.co_filename), module).traced
        if module is None:
            return None
        frame.f_trace_lines = False
        span = self.opened(Place("", 0, code.co_name, module))
        return _Until(span).traced

    def opened(self, place: Place) -> Any:
        """Begin an annotation."""
        from torch.autograd.profiler import record_function

        number = self._numbers.setdefault(place, len(self.list))
        if number == len(self.list):
            self.list.append(place)
        span = record_function(f"{PREFIX}{number}")
        span.__enter__()
        return span


class _Lines:
    """Follows one call of a function in a watched file."""

    def __init__(self, places: Places, function: str, file: str, module: str | None):
        self._places, self._function, self._file, self._module = places, function, file, module
        self._span: Any = None

    def traced(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event in ("line", "return") and self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        if event == "line":
            place = Place(self._file, frame.f_lineno, self._function, self._module or "?")
            self._span = self._places.opened(place)
        return self.traced


class _Until:
    """Ends an annotation with the function that it began with."""

    def __init__(self, span: Any):
        self._span = span

    def traced(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "return" and self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        return self.traced


def _shown(file: str) -> str:
    return Path(file).name
