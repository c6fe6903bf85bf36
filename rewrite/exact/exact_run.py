"""Puts processes to work on both vendors' launches and gathers what they say. Imports neither torch nor triton."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rewrite.console.progress_steps import Step
from rewrite.errors import MissingLibrary, RewriteError, UsageError
from rewrite.kernels import kernel_run

from .exact_work import CHIPS, COUNT, MARK

BACKENDS = tuple(CHIPS)
_START = (
    "import json, sys; asked = json.load(sys.stdin); sys.path[:] = asked.pop('path'); "
    "from rewrite.exact.exact_work import work; work(**asked)"
)


@dataclass(frozen=True)
class Compared:
    """How one launch ended."""

    backend: str
    kernel: str
    shape: str
    differs: str = ""
    """What differs, if anything does."""
    unseen: str = ""
    """Why it has no meaning in the ring, if it has none."""

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return asdict(self)


def compare_all(
    kernels: Sequence[str] = (),
    backends: Sequence[str] = BACKENDS,
    *,
    jobs: int = 1,
    every: int = 1,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Compared]:
    """Compare the launches of kernels with their references.

    Args:
        kernels: names of those wanted; none for all.
        backends: `cuda`, `hip`.
        jobs: processes at a time.
        every: of each kernel's launches only every so manieth: a sample.
        progress: told of every row.

    Raises:
        MissingLibrary: torch, transformers or triton is not installed.
        UsageError: a name is not one of `kernel_run.known_kernels()`.
        RewriteError: a process failed.
    """
    for library in ("torch", "transformers", "triton"):
        if importlib.util.find_spec(library) is None:
            raise MissingLibrary(library, "interpreting kernels")
    known = kernel_run.known_kernels()
    for name in kernels:
        if name not in known:
            raise UsageError(f"no kernel '{name}': there are {', '.join(known)}.")
    parts = max(1, jobs // len(backends))
    tasks = [
        {"backend": backend, "kernels": list(kernels), "part": part, "parts": parts, "every": every}
        for backend in backends
        for part in range(parts)
    ]
    told = _Told(progress)
    with ThreadPoolExecutor(jobs) as pool:
        return [row for rows in pool.map(lambda task: _run(task, told), tasks) for row in rows]


@dataclass
class _Told:
    progress: Callable[[str], None]
    done: int = 0
    count: int = 0

    def __call__(self, row: Compared) -> None:
        self.done += 1
        self.progress(Step(f"{row.backend} · {row.kernel} · {row.shape}", self.done, max(self.count, self.done)))


def _run(task: dict[str, Any], told: _Told) -> list[Compared]:
    rows = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", _START]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True, env=environment) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            json.dump({**task, "path": sys.path}, process.stdin)
            process.stdin.close()
            for line in process.stdout:
                if line.startswith(COUNT):
                    told.count += int(line.removeprefix(COUNT))
                elif line.startswith(MARK):
                    rows.append(Compared(**json.loads(line.removeprefix(MARK))))
                    told(rows[-1])
        if process.returncode:
            said.seek(0)
            last = [line.strip() for line in said if line.strip()][-1:] or [f"it ended with {process.returncode}"]
            raise RewriteError(f"the kernels of {task['backend']} could not be interpreted: {last[0]}")
    return rows


def equal_by_kernel(rows: Sequence[Compared]) -> dict[str, dict[str, int]]:
    """Return by kernel how many launches were equal, differed and were not seen."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = found.setdefault(row.kernel, {"equal": 0, "differ": 0, "unseen": 0})
        counts["differ" if row.differs else "unseen" if row.unseen else "equal"] += 1
    return dict(sorted(found.items()))
