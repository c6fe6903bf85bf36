"""Models that are called: the original, eager and compiled, beside its rewritten package, eager and compiled.

    python bench/forwards.py measure PACKAGES --rows ROWS [--device cuda] [--names bert,vit] [--batches 1,32]
    python bench/forwards.py measure PACKAGES --rows ROWS --tiny --device cpu --names bert
    python bench/forwards.py lengths PACKAGES --rows ROWS [--names bert,modernbert] [--calls 60]
    python bench/forwards.py first PACKAGES --rows ROWS [--names bert,vit] [--batch 1]
    python bench/forwards.py render

`measure` writes the packages that are missing and starts a process for each model. They build, compile and capture
side by side; then they are timed one after the other, so that nothing else runs meanwhile. `lengths` does the same
with texts of many lengths. `first` times the first calls of a process, each on its own; the second one captures. There
is one process at a time: one that finds no kernel compiled, and then one that finds what the first compiled. `render`
writes docs/forwards.md from the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forward_page
from families import environment, package
from forward_sizes import BY_NAME, MODELS, Model

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_SIDES = "original,compiled,ours_plain,ours,ours_compiled"
ROUNDS = (8, 60)


def main() -> None:
    """Take the subcommand."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("packages", type=Path)
    child = commands.add_parser("child", help=argparse.SUPPRESS)
    child.add_argument("name")
    child.add_argument("package", type=Path)
    child.add_argument("row", type=Path)
    for parser in (measured, child):
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--batches", default="1,32")
        parser.add_argument("--sides", default=DEFAULT_SIDES)
        parser.add_argument("--compiled-batches", default="1,32", help="where the compiled sides are measured")
        parser.add_argument("--seconds", type=float, default=1.5)
        parser.add_argument("--tiny", action="store_true")
    measured.add_argument("--rows", type=Path, required=True)
    measured.add_argument("--names", default=",".join(model.name for model in MODELS))
    measured.add_argument("--limit-seconds", type=float, default=540)
    many = commands.add_parser("lengths")
    many.add_argument("packages", type=Path)
    many.add_argument("--rows", type=Path, required=True)
    many.add_argument("--names", default="bert,modernbert,xlm_roberta")
    many.add_argument("--limit-seconds", type=float, default=180)
    one = commands.add_parser("lengths-child", help=argparse.SUPPRESS)
    one.add_argument("name")
    one.add_argument("package", type=Path)
    one.add_argument("row", type=Path)
    for parser in (many, one):
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--calls", type=int, default=60)
        parser.add_argument("--warm-seconds", type=float, default=60, help="after which no more is captured")
        parser.add_argument("--seconds", type=float, default=6, help="after which a batch size is no longer timed")
        parser.add_argument("--tiny", action="store_true")
    alone = commands.add_parser("first")
    alone.add_argument("packages", type=Path)
    alone.add_argument("--rows", type=Path, required=True)
    alone.add_argument("--names", default=",".join(model.name for model in MODELS))
    alone.add_argument("--limit-seconds", type=float, default=180, help="after which no process is started")
    only = commands.add_parser("first-child", help=argparse.SUPPRESS)
    only.add_argument("name")
    only.add_argument("package", type=Path)
    only.add_argument("row", type=Path)
    for parser in (alone, only):
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--batch", type=int, default=1)
        parser.add_argument("--tiny", action="store_true")
    commands.add_parser("render")
    given = made.parse_args()
    {
        "measure": measure,
        "child": run_child,
        "lengths": measure,
        "lengths-child": run_lengths,
        "first": measure_first,
        "first-child": run_first,
        "render": lambda _: forward_page.write(),
    }[given.command](given)


def written(given: argparse.Namespace) -> list[str]:
    """Write the packages that are missing, and return the names of the models."""
    names = str(given.names).split(",")
    files = sorted({BY_NAME[name].file for name in names})
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for file, error in zip(files, pool.map(lambda file: package(given.packages, file), files), strict=True):
            if error:
                print(f"{file}: {error}", flush=True)
    given.rows.mkdir(parents=True, exist_ok=True)
    return names


def measure(given: argparse.Namespace) -> None:
    """Start every model's process, wait until all are warm, and let them measure in turn."""
    deadline = time.monotonic() + given.limit_seconds
    names = written(given)
    children = {name: Child(given, name) for name in names}
    for child in children.values():
        child.wait_ready(deadline)
    for name, child in children.items():
        print(f"{name}: {child.measured(deadline)}", flush=True)


class Child:
    """The process of a model; what it says goes beside its row.

    Args:
        given: the options of `measure`.
        name: of the model.
    """

    def __init__(self, given: argparse.Namespace, name: str):
        row = given.rows / f"{name}.json"
        self.log, self.ready = row.with_suffix(".log"), row.with_suffix(".ready")
        for path in (row, self.ready):
            path.unlink(missing_ok=True)
        lengths = given.command == "lengths"
        command = [sys.executable, str(ROOT / "bench" / "forwards.py"), "lengths-child" if lengths else "child", name]
        command += [str(given.packages / BY_NAME[name].file), str(row)]
        command += ["--device", given.device, "--seconds", str(given.seconds)]
        if lengths:
            command += ["--calls", str(given.calls), "--warm-seconds", str(given.warm_seconds)]
        else:
            command += ["--batches", given.batches, "--sides", given.sides]
            command += ["--compiled-batches", given.compiled_batches]
        command += ["--tiny"] if given.tiny else []
        found = {**environment(given.device), "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True, env=found
            )

    def wait_ready(self, deadline: float) -> None:
        """Wait until everything is compiled and captured, the process has ended, or time is over."""
        while not self.ready.exists() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)

    def measured(self, deadline: float) -> str:
        """Let the process measure; return what it printed, or the end of that where it failed."""
        try:
            if not self.ready.exists():
                raise subprocess.TimeoutExpired(self.process.args, 0)
            self.process.communicate("go\n", timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return f"too slow, or failed: {self.log.read_text('utf-8')[-1500:]}"
        return self.log.read_text("utf-8")[-2500:]


def run_child(given: argparse.Namespace) -> None:
    """Build one model, warm it up, wait for the parent's word, and measure."""
    from forward_run import Cells

    model: Model = BY_NAME[given.name]
    cells = Cells(model, given)
    cells.prepare()
    given.row.with_suffix(".ready").touch()
    sys.stdin.readline()
    row: dict[str, Any] = {"name": model.name, "error": ""}
    try:
        row = cells.measured()
    except Exception as error:  # a model that fails must not take the others with it
        row["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    given.row.parent.mkdir(parents=True, exist_ok=True)
    given.row.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    print(forward_page.told(row), flush=True)


def run_lengths(given: argparse.Namespace) -> None:
    """Build one model, give it texts of many lengths until their graphs are there, wait, and measure."""
    import forward_lengths
    from forward_run import Cells

    lengths = forward_lengths.Lengths(Cells(BY_NAME[given.name], given), given)
    lengths.prepare()
    given.row.with_suffix(".ready").touch()
    sys.stdin.readline()
    row = lengths.measured()
    given.row.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    print(forward_lengths.told(row), flush=True)


CALLS = 4
"""Of a process, in `first`: the model's own, the one that captures, and two that replay."""


def measure_first(given: argparse.Namespace) -> None:
    """Run each model in a process of its own, one after the other: with no kernel compiled before, and once more."""
    deadline = time.monotonic() + given.limit_seconds
    for name in written(given):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("cold", "warm"):
                if time.monotonic() > deadline:
                    print(f"{name}, {kind}: no time was left", flush=True)
                    continue
                row = given.rows / f"{name}-first-{kind}.json"
                command = [sys.executable, str(ROOT / "bench" / "forwards.py"), "first-child", name]
                command += [str(given.packages / BY_NAME[name].file), str(row), "--device", given.device]
                command += ["--batch", str(given.batch), *(["--tiny"] if given.tiny else [])]
                found = {**environment(given.device), "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
                run = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
                said = run.stdout if run.returncode == 0 else run.stdout + run.stderr[-1500:]
                print(f"{name}, {kind}: {said.strip()}", flush=True)


def run_first(given: argparse.Namespace) -> None:
    """Build one model and time its first calls."""
    from forward_run import Cells

    cells = Cells(BY_NAME[given.name], given)
    seconds = cells.first_calls(given.batch, CALLS)
    row = {"name": given.name, "batch": given.batch, "calls_s": seconds, "explain": str(cells.explain(cells.ours))}
    given.row.write_text(json.dumps(row, indent=1) + "\n", "utf-8")
    called, captured, *replayed = seconds
    print(f"first call {called:.2f} s, the one that captures {captured:.2f} s, then {min(replayed) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
