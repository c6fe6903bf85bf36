"""Runs many trials, each in a process forked from one that has torch and the originals loaded, and keeps their rows.

A fork starts in milliseconds where an import takes seconds, and a crash or a hang is a row and not the end. A row is
written as soon as its trial ends, so that a later call goes on where an earlier one was cut off. Rows are of one state
of the tool and one set of options: what has changed since needs a folder of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rewrite.verify import Options, Verdict, verify
from rewrite.verify.preload import preload

Row = dict[str, Any]
Tell = Callable[[str], None]
PATIENCE_S = 120
"""For how long a trial may say nothing; the longest check of a package that is right took 30 s (2 slow cores)."""


@dataclass(frozen=True)
class Trial:
    """`run` returns what is kept, with what is known `about` it; it is given a function to call when it gets on."""

    name: str
    run: Callable[[Tell], Row]
    about: Row = field(default_factory=dict)


@dataclass
class _Running:
    trial: Trial
    process: BaseProcess
    started: float
    heard: float
    last: str = ""


def results(trials: Iterable[Trial], folder: Path, jobs: int, deadline: float) -> Iterator[Row]:
    """Yield the rows that are kept in `folder`, and those of the other trials as they end.

    At the `deadline` (of `time.monotonic`) what still runs is ended and leaves no row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting: list[Trial] = []
    for trial in trials:
        if (kept := folder / f"{trial.name}.json").exists():
            yield json.loads(kept.read_text("utf-8"))
        else:
            waiting.append(trial)
    waiting.reverse()
    running: dict[Connection, _Running] = {}
    while waiting or running:
        if time.monotonic() > deadline:
            _ended(running.values())
            return
        while waiting and len(running) < jobs:
            pipe, one = _started(waiting.pop())
            running[pipe] = one
        for pipe in [*wait(list(running), timeout=1), *_silent(running)]:
            if (row := _heard(pipe, running[pipe])) is not None:
                one = running.pop(pipe)
                _ended([one])
                row = {"name": one.trial.name, "seconds": round(time.monotonic() - one.started, 1), **row}
                _write(folder / f"{one.trial.name}.json", one.trial.about | row)
                yield one.trial.about | row


def _started(trial: Trial) -> tuple[Connection, _Running]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(trial, theirs), daemon=True)
    process.start()
    theirs.close()
    now = time.monotonic()
    return ours, _Running(trial, process, now, now)


def _run(trial: Trial, answer: Connection) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    row = trial.run(answer.send)
    used = resource.getrusage(resource.RUSAGE_SELF)
    answer.send({**row, "processor": round(used.ru_utime + used.ru_stime, 1)})


def _heard(pipe: Connection, one: _Running) -> Row | None:
    """The row of a trial that is over; `None` if it only got on."""
    if time.monotonic() - one.heard > PATIENCE_S and not pipe.poll():
        _ended([one])
        return {"status": "broke off", "by": f"does not end: {one.last}"}
    try:
        said = pipe.recv()
    except EOFError:
        one.process.join()
        return {"status": "broke off", "by": f"its process ends with {one.process.exitcode}: {one.last}"}
    if isinstance(said, dict):
        return said
    one.heard, one.last = time.monotonic(), said
    return None


def _silent(running: dict[Connection, _Running]) -> list[Connection]:
    return [pipe for pipe, one in running.items() if time.monotonic() - one.heard > PATIENCE_S and not pipe.poll()]


def _ended(running: Iterable[_Running]) -> None:
    for one in running:
        one.process.kill()
        one.process.join()


def _write(file: Path, row: Row) -> None:
    """Write a row at once, so that none is left by half."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(row, indent=1, sort_keys=True) + "\n", "utf-8")
    part.replace(file)


def arguments_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, with the options of everything that runs trials."""
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--rows", type=Path, help="keep rows and packages here, and go on with those that are there")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def original(model: str) -> str:
    """The dotted name of transformers' file."""
    return f"transformers.models.{model}.modeling_{model}"


def packages(models: Iterable[str], folder: Path, jobs: int, vendored: bool = False) -> dict[str, Path]:
    """Rewrite models, those that `folder` does not have yet, and import their originals for the forks to share.

    Vendored, each has a runtime of its own.
    """
    found = {model: folder / f"{model}_rewritten" for model in models}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(_rewritten, vendored=vendored), found, found.values()))
    preload()
    for model in found:
        importlib.import_module(original(model))
    return found


def _rewritten(model: str, package: Path, vendored: bool) -> None:
    if package.exists():
        return
    package.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        part = Path(folder) / package.name
        tool = [sys.executable, "-m", "rewrite.cli"]
        command = [*tool, model, "--out", str(part), "--no-verify", "--diff", "none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if vendored:
            subprocess.run([*tool, "vendor", str(part)], check=True, stdout=subprocess.DEVNULL)
        part.replace(package)


def judged(model: str, package: Path, options: Options, tell: Tell) -> tuple[Row, Verdict]:
    """Verify a package until its first failed check, and say which that was."""
    verdict = verify(original(model), package, options, tell)
    failed = verdict.failed_gate
    row = {"gate": failed.name if failed else "", "by": failed.failures[0].name if failed else verdict.reason}
    return {"status": "survived" if verdict.passed else "caught", **row}, verdict
