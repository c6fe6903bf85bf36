"""Runs the examination of many files, each in a process forked from one that has torch and transformers loaded.

A fork starts in milliseconds where an import takes six seconds, and a crash or a hang is a row and not the end.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from rewrite.sweep.sweep_row import Row

if TYPE_CHECKING:
    from rewrite.sweep.examine import Depth

LIMIT_S = 600
_POLL_S = 0.05


@dataclass(frozen=True)
class Task:
    """One modeling file to examine; the row goes to a file of its own."""

    file: Path
    name: str
    result: Path
    depth: Depth
    device: str = "cpu"
    """Where its classes run: a device as torch names it."""


def run(tasks: Sequence[Task], jobs: int) -> Iterator[Row]:
    """Yield the rows of the tasks as they end. A row that is there from a run before is not made again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rewrite.sweep.loaded"])
    waiting, running = list(tasks), dict[Task, tuple[BaseProcess, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop(0)
            if task.result.exists():
                yield read(task)
                continue
            process: BaseProcess = context.Process(target=_examine, args=(task,))
            process.start()
            running[task] = process, time.monotonic()
        for task, (worker, started) in list(running.items()):
            late = time.monotonic() - started > LIMIT_S
            if worker.is_alive() and not late:
                continue
            if late:
                worker.kill()
            worker.join()
            del running[task]
            if not task.result.exists():
                error = f"no end after {LIMIT_S} s" if late else f"its process ended with {worker.exitcode}"
                _write(task, Row(task.name, error=error))
            yield read(task)
        time.sleep(_POLL_S)


def read(task: Task) -> Row:
    """The row that a task left."""
    return Row.from_json(json.loads(task.result.read_text("utf-8")))


def _examine(task: Task) -> None:
    import contextlib
    import os

    from rewrite.sweep.examine import examine

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        row = examine(task.file, task.name, task.depth, task.device)
    _write(task, row)


def _write(task: Task, row: Row) -> None:
    """Write a row at once, so that a run that is cut off leaves none by half."""
    task.result.parent.mkdir(parents=True, exist_ok=True)
    part = task.result.with_suffix(".part")
    part.write_text(json.dumps(row.to_json(), indent=1, sort_keys=True) + "\n", "utf-8")
    part.replace(task.result)
