"""Puts processes to work on all chips at once and gathers their rows. Imports neither torch nor triton."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from rewrite.console.progress_steps import Step
from rewrite.errors import MissingLibrary, UsageError

from .assembly import Row
from .compile_work import COUNT, MARK

LIMIT_S = 300
"""For one launch: a compiler that hangs is a row too."""
_START = (
    "import json, sys; asked = json.load(sys.stdin); sys.path[:] = asked.pop('path'); "
    "from rewrite.kernels.compile_work import work; work(**asked)"
)
_RUNTIME = Path(__file__).parents[1] / "runtime"


@dataclass(frozen=True)
class Task:
    """A share of the launches for one chip."""

    arch: str
    module: str
    kernels: tuple[str, ...]
    one_of_each: bool
    part: int
    parts: int


@dataclass
class _Counted:
    """Tells progress of every row, and how many there will be: the shares that have not begun are like the others."""

    progress: Callable[[str], None]
    shares: int
    done: int = 0
    counts: dict[Task, int] = field(default_factory=dict)

    def expect(self, task: Task, count: int) -> None:
        """Take how many rows a share has."""
        self.counts[task] = count

    def __call__(self, name: str) -> None:
        """Say that a row is there."""
        self.done += 1
        known = list(self.counts.values())
        self.progress(Step(name, self.done, max(round(sum(known) / len(known) * self.shares), self.done)))


def known_kernels() -> list[str]:
    """Return the names of the kernels of `runtime/`."""
    texts = (path.read_text("utf-8") for path in _RUNTIME.rglob("*.py"))
    return sorted(name for text in texts for name in re.findall(r"(\w+)_kernel = Kernel\(", text))


def compile_all(
    archs: Sequence[str],
    kernels: Sequence[str] = (),
    *,
    one_of_each: bool = False,
    jobs: int = 1,
    module: str = "rewrite.kernels.catalogue",
    progress: Callable[[str], None] = lambda message: None,
) -> list[Row]:
    """Compile the launches of `module.cases()` for each chip; a row for each, in the order of the catalogue.

    Args:
        archs: of `chips.CHIPS`.
        kernels: names of those wanted; none for all.
        one_of_each: only the first launch of each kernel.
        jobs: processes at a time.
        module: where the cases are.
        progress: told of every row.

    Raises:
        MissingLibrary: torch, transformers or triton is not installed.
        UsageError: a name is not one of `known_kernels()`.
    """
    for library in ("torch", "transformers", "triton"):
        if importlib.util.find_spec(library) is None:
            raise MissingLibrary(library, "compiling kernels")
    known = known_kernels()
    for name in kernels:
        if name not in known:
            raise UsageError(f"no kernel '{name}': there are {', '.join(known)}.")
    parts = min(jobs, 2) if len(archs) >= jobs else -(-jobs // len(archs))
    tasks = [Task(arch, module, tuple(kernels), one_of_each, part, parts) for arch in archs for part in range(parts)]
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(jobs) as pool:
        counted = _Counted(progress, len(tasks))
        shares = list(pool.map(lambda task: _run(task, cache, counted), tasks))
    rows = []
    for number in range(0, len(tasks), parts):
        chip = shares[number : number + parts]
        rows += [chip[i % parts][i // parts] for i in range(sum(map(len, chip)))]
    return rows


def _run(task: Task, cache: str, progress: _Counted) -> list[Row]:
    rows: list[Row] = []
    while True:
        done, unfinished, complaint = _once(task, len(rows), cache, progress)
        rows += done
        if unfinished is not None:
            rows.append(replace(unfinished, error=complaint))
        elif complaint:
            raise RuntimeError(f"no kernel was compiled for {task.arch}: {complaint}")
        else:
            return rows


def environment(cache: str) -> dict[str, str]:
    """Return the variables of a process that compiles: this one's, with a cache of its own."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    # Triton 3.4's wheel has no linker for AMD: what is judged is the assembly, so a program that does nothing serves.
    found.setdefault("TRITON_HIP_LLD_PATH", "/usr/bin/true")
    return found


def _once(task: Task, start: int, cache: str, progress: _Counted) -> tuple[list[Row], Row | None, str]:
    """Start a process; return its rows, the launch that it died of, and what it said then."""
    rows: list[Row] = []
    begun: Row | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        command = [sys.executable, "-c", _START]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=environment(cache)
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            json.dump({**vars(task), "start": start, "path": sys.path}, process.stdin)
            process.stdin.close()
            for row in _rows(process, process.stdout, lambda count: progress.expect(task, count)):
                if row.figures is None:
                    begun = row
                else:
                    begun = None
                    rows.append(row)
                    progress(row.name)
        return rows, begun, "" if process.returncode == 0 else _complaint(said, process.returncode)


def _rows(process: subprocess.Popen[str], lines: IO[str], expect: Callable[[int], None]) -> Iterator[Row]:
    """Yield the rows that a process prints; one that says nothing for long is ended."""
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    for line in lines:
        if line.startswith(COUNT):
            expect(int(line.removeprefix(COUNT)))
        elif line.startswith(MARK):
            limit.cancel()
            limit = threading.Timer(LIMIT_S, process.kill)
            limit.start()
            yield Row.from_json(json.loads(line.removeprefix(MARK)))
    limit.cancel()


def _complaint(said: IO[str], code: int) -> str:
    """Return the line of an error output that says the most: the first of a compiler's errors, else the last line."""
    said.seek(0)
    lines = [line.strip() for line in said if line.strip()]
    telling = [line for line in lines if re.search(r"Assertion|LLVM ERROR|fatal error|: error: ", line)]
    return (telling[:1] or lines[-1:] or [f"its process ended with {code}"])[0][:500]
