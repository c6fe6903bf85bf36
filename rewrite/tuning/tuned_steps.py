"""Decode steps of a package on a GPU: captured with different tables, and timed by the device's own clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewrite.errors import NothingToTune
from rewrite.measure.runtime_part import runtime_part

from .candidates import Entry

ROUNDING = 256
"""As in `runtime/decode/graph_cache.py`: capacities are multiples of this."""
ROOM = 128
BLOCK_MS = 5.0
"""Length of a block of replays, which is one figure."""


class Steps:
    """A model of the package, and graphs of its step after `context` tokens in each of `batch` rows."""

    def __init__(self, model: Any, batch: int, context: int):
        import torch

        package = type(model).__module__.rpartition(".")[0]
        names = ("launching/card_tables", "launching/tiles", "device/compile_ahead", "decode/step_graph")
        self.tables, self.tiles, self.ahead, graphs = (runtime_part(package, name) for name in names)
        capacity = -(-(context + ROOM) // ROUNDING) * ROUNDING
        self.device = model.device
        self.decode = graphs.DecodeGraph(model, batch, capacity)
        generator = torch.Generator().manual_seed(0)
        vocabulary = int(model.config.get_text_config().vocab_size)
        prompt = torch.randint(4, vocabulary, (batch, context), generator=generator).to(self.device)
        self.tokens = self.decode.prefill(prompt).argmax(-1)
        self.next = prompt.new_full((batch, 1), context)
        self.replays = 8
        self.replays = self._replays_in_a_block()

    def in_use(self, table: Mapping[str, Entry]) -> dict[str, tuple[Entry, int]]:
        """Return what a step asks for with `table`: by name, what it got and how often."""
        import torch

        found: dict[str, tuple[Entry, int]] = {}

        def heard(name: str, entry: Entry) -> None:
            found[name] = (entry, found[name][1] + 1 if name in found else 1)

        self.tiles.try_out(table)
        self.tiles.listen(heard)
        try:
            with torch.no_grad():
                self._begin()
                self.decode.call.forward()
        finally:
            self.tiles.listen(None)
            self.tiles.try_out({})
        return found

    def compile_ahead(self, tables: Sequence[Mapping[str, Entry]]) -> int:
        """Compile in threads what steps with these tables launch. Returns how many variants."""
        jobs: dict[Any, Callable[[], object]] = {}
        for table in tables:
            self.tiles.try_out(table)
            with self.decode.model._optimize_model_for_decode():
                jobs |= self.ahead.variants(self.decode.call.forward, self.device)
            self.tiles.try_out({})
        self.ahead.compile_all(jobs, self.device)
        return len(jobs)

    def times(self, tables: Sequence[Mapping[str, Entry]], blocks: int) -> list[list[float] | None]:
        """Return ms of a step for each table, `blocks` figures each, taken in turn; None where it cannot run."""
        programs = {number: self._captured(table) for number, table in enumerate(tables)}
        running = [number for number, program in programs.items() if program is not None]
        values: dict[int, list[float]] = {number: [] for number in running}
        for number in running:
            self._block(programs[number])
        for turn in range(blocks):
            cut = turn % len(running)
            for number in running[cut:] + running[:cut]:
                values[number].append(self._block(programs[number]))
        return [values.get(number) for number in programs]

    def _captured(self, table: Mapping[str, Entry]) -> Any:
        """Return a graph of a step with a table; None if a kernel cannot be compiled or launched with it."""
        import torch

        self.tiles.try_out(table)
        try:
            with torch.no_grad():
                self._begin()
                return self.decode.captured(None)
        except _failures():
            return None
        finally:
            self.tiles.try_out({})

    def _begin(self) -> None:
        self.decode.begin(self.next, None)
        self.decode.state.input_ids.copy_(self.tokens[:, None])

    def _block(self, program: Any) -> float:
        import torch

        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin()
        start.record()
        for _ in range(self.replays):
            program.replay()
        stop.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(stop)) / self.replays

    def _replays_in_a_block(self) -> int:
        program = self._captured({})
        if program is None:
            raise NothingToTune(type(self.decode.model).__name__, "its step cannot be captured")
        self._block(program)
        return max(4, min(ROOM // 2, int(BLOCK_MS / self._block(program))))


def _failures() -> tuple[type[Exception], ...]:
    from triton import TritonError

    return RuntimeError, TritonError
