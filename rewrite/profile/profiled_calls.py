"""What is profiled: a decode step, a prompt, one forward call, or one forward and backward.

Each kind runs on both sides alike, and knows where in a recording its steps begin and end. A step of `generate()` that
replays a graph lasts from its first kernel to that of the next step; one that does not, from one call of `forward` to
the next. The other kinds are steps of their own, from before the call until the device has ended it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rewrite.benchmark.overhead import new_graph
from rewrite.benchmark.token_parity import keeping
from rewrite.measure import timing

from .parts import part_of
from .trace import Activity, Trace

if TYPE_CHECKING:
    from torch import Tensor

DECODE, PROMPT, FORWARD, TRAIN = "decode", "prompt", "forward", "train"
STEPS = {"cpu": 24, "eager": 8, "graph": 48}
"""Decode steps of a recording."""
CALLS = {"cpu": 8, "gpu": 16}
"""Calls of a recording; a call on a CPU may be thousands of operators."""
FEWEST = 2
"""Tokens of the shorter generation of two that are compared; of a graph 64, so that a rest of a chunk is no matter."""


@dataclass
class Clock:
    """When calls of a model's `forward` began, in ns of the system's clock.

    A recording of the host has an annotation around each besides: on a busy machine its clock and the system's are
    apart by more than a step is long.
    """

    begun: list[int] = field(default_factory=list)
    inside: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of each."""

    def begun_in(self, trace: Trace) -> list[float]:
        """When the calls began, in a trace's µs."""
        return [start for start, _ in spans(trace, FORWARD)] or [in_trace(trace, at) for at in self.begun]


FORWARD, STEP = "rewrite forward", "rewrite step"
"""Annotations around the calls of `forward`, and around steps that are one call."""


def spans(trace: Trace, name: str) -> list[tuple[float, float]]:
    """Begin and end of each annotation of that name; a recording of the device alone has none."""
    return [(mark.start, mark.end) for mark in trace.marks if mark.name == name]


@contextlib.contextmanager
def forwards_noted(model: Any) -> Iterator[Clock]:
    """Note each call of a model's `forward`. The class is wrapped for that time: an instance's own would be seen."""
    from torch.profiler import record_function

    kind, clock = type(model), Clock()
    own = kind.__dict__.get("forward")
    original = kind.forward

    @functools.wraps(original)
    def noted(self: Any, *given: Any, **named: Any) -> Any:
        if self is not model:
            return original(self, *given, **named)
        begun = time.time_ns()
        clock.begun.append(begun)
        try:
            with record_function(FORWARD):
                return original(self, *given, **named)
        finally:
            clock.inside.append((begun, time.time_ns()))

    kind.forward = noted
    try:
        yield clock
    finally:
        if own is None:
            del kind.forward
        else:
            kind.forward = own


@dataclass
class Call:
    """One kind of work on one model."""

    kind: str
    model: Any
    device: str
    inputs: Mapping[str, Tensor]
    """Of `forward`; of `generate()` the prompt."""

    @property
    def gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device != "cpu"

    @functools.cached_property
    def captured(self) -> bool:
        """Whether `generate()` replays a graph for each token; known after a call."""
        return self.kind == DECODE and self.gpu and bool(_programs(self.model))

    @property
    def steps(self) -> int:
        """Steps of a recording."""
        if self.kind != DECODE:
            return CALLS["gpu" if self.gpu else "cpu"]
        return STEPS["graph" if self.captured else "eager" if self.gpu else "cpu"]

    def run(self, steps: int) -> None:
        """Run the work: so many tokens after the first, or so many calls."""
        import torch

        if self.kind == DECODE:
            with torch.no_grad():
                self._generate(FEWEST + steps)
            return
        for _ in range(steps):
            self._once()

    def _once(self) -> None:
        import torch

        if self.kind == TRAIN:
            self.model(**self.inputs).loss.backward()
            self.model.zero_grad(set_to_none=True)
            return
        with torch.no_grad():
            if self.kind == PROMPT:
                self._read()
            else:
                self.model(**self.inputs)

    def _generate(self, new: int) -> None:
        self.model.generate(**self.inputs, max_new_tokens=new, do_sample=False, use_cache=True)

    @functools.cached_property
    def _graph(self) -> Any:
        """What a package reads a prompt with where it decodes in a graph; None where it does not."""
        rows, tokens = self.inputs["input_ids"].shape
        return new_graph(self.model, rows, tokens + 1) if self.gpu else None

    def _read(self) -> None:
        """Read a prompt as `generate()` does: up to the logits of the next token."""
        ids = self.inputs["input_ids"]
        if self._graph is not None:
            self._graph.prefill(ids)
        else:
            self.model(input_ids=ids, use_cache=True, **keeping(self.model, 1))

    def synchronise(self) -> None:
        """Wait for the device."""
        import torch

        if self.gpu:
            torch.cuda.synchronize(self.device)

    def timed(self) -> float:
        """ms of a step by the wall clock, unprofiled."""
        if self.kind != DECODE:
            return self._wall(self._once)
        import torch

        short, more = (64, 64) if self.captured else (FEWEST, self.steps)
        with torch.no_grad():
            before = self._wall(lambda: self._generate(short))
            return (self._wall(lambda: self._generate(short + more)) - before) / more

    def _wall(self, call: Callable[[], None]) -> float:
        self.synchronise()
        started = time.perf_counter()
        call()
        self.synchronise()
        return (time.perf_counter() - started) * 1e3

    def windows(self, record: Callable[[Callable[[], None]], Trace]) -> tuple[Trace, list[tuple[float, float]], Clock]:
        """Record the steps; return the trace, when each begins and ends in it, and the calls of `forward`."""
        from torch.profiler import record_function

        ends: list[tuple[int, int]] = []

        def work() -> None:
            if self.kind == DECODE:
                self.run(self.steps)
                self.synchronise()
                return
            for _ in range(self.steps):
                self.synchronise()
                begun = time.time_ns()
                with record_function(STEP):
                    self._once()
                    self.synchronise()
                ends.append((begun, time.time_ns()))

        with forwards_noted(self.model) as clock:
            trace = record(work)
        moment = functools.partial(in_trace, trace)
        if self.kind == DECODE:
            found = _replays(trace.activities) if self.captured else []
            if not found:
                found = list(itertools.pairwise(clock.begun_in(trace)[2:]))
            return trace, found, clock
        return trace, spans(trace, STEP) or [(moment(begun), moment(ended)) for begun, ended in ends], clock

    def rehearsals(self) -> list[Callable[[], Any]]:
        """Calls that do, kernel by kernel, what the graphs of this work hold; none where it replays none."""
        if not self.gpu or self.kind not in (DECODE, PROMPT):
            return []
        if self.kind == PROMPT:
            prompts = [] if self._graph is None else self._graph.prompts._graphs.values()
            return [functools.partial(_prompt, prompt) for prompt in prompts]
        found = _programs(self.model)
        return found

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Launch as in a graph."""
        part = part_of(self.model, "launching/launch")
        assert part is not None
        with part.rehearsing():
            yield


def in_trace(trace: Trace, moment_ns: int) -> float:
    """A moment of the system's clock in a trace's µs."""
    assert trace.base_ns is not None
    return (moment_ns - trace.base_ns) / 1e3


def _programs(model: Any) -> list[Callable[[], Any]]:
    """The step last captured of each graph that a package keeps for a model, the graph used last first."""
    store = part_of(model, "decode/graph_cache")
    found: list[Callable[[], Any]] = []
    for graph in reversed([] if store is None else list(store.store_of(model).graphs.values())):
        programs = [program for program in graph._programs.values() if program._graph is not None]
        found += [functools.partial(_step, graph, programs[-1])] if programs else []
    return found


def _step(graph: Any, program: Any) -> None:
    """Run a captured step without its graph; what the graph writes to stays where it is."""
    kept = program.logits, program.scores
    with graph.call.as_for_decoding(), graph.call.held():
        program._rehearse()
    program.logits, program.scores = kept


def _prompt(prompt: Any) -> None:
    """Read a prompt without its graph, likewise."""
    kept = prompt._logits
    prompt.run()
    prompt._logits = kept


def _replays(activities: Sequence[Activity]) -> list[tuple[float, float]]:
    """The steps of a generation that replays a graph: from the first kernel of a launch to that of the next.

    A prompt's graph is launched once, and is told from a step's by the number of its kernels.
    """
    launches: dict[int, list[Activity]] = {}
    for activity in activities:
        if activity.launch is not None and activity.launch.graph and activity.correlation is not None:
            launches.setdefault(activity.correlation, []).append(activity)
    if len(launches) < 3:
        return []
    usual = median(len(group) for group in launches.values())
    starts = sorted(min(a.start for a in group) for group in launches.values() if len(group) == usual)
    return list(itertools.pairwise(starts[1:]))


def turns(calls: Mapping[str, Call], rounds: tuple[int, int], seconds: float) -> dict[str, list[float]]:
    """Unprofiled ms of a step of each side, taken in turn."""
    timers = {name: (lambda number, call=call: call.timed()) for name, call in calls.items()}
    return timing.interleaved(timers, rounds, seconds)
