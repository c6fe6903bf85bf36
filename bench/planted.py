"""Bugs planted by hand into what was generated, and whether `verify` catches each, by the gate that should.

    python bench/planted.py [MODEL ...] [--bugs FILE …] [--name PART] [--full] [--device cpu] [--seed 0]

The bugs are data: every tuple of `Bug` in tests/verify/<bugs>.py. Those of `argument_bugs` show in what `forward` is
given and returns, those of `config_bugs` away from the values that small configurations have by default; those of
`generation_bugs` name the check that has to catch them, which runs alone. Each model
is rewritten once; each bug is planted into a copy of that package and verified in a process of its own, until its
first failed check.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rewrite.verify import Options, verify

ROOT = Path(__file__).resolve().parent.parent


def bugs_of(name: str) -> list[Any]:
    """The bugs of a file of tests/verify, each once."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(f"tests.verify.{name}")
    bug_class = importlib.import_module("tests.verify.bugs").Bug
    lists = [value for value in vars(module).values() if isinstance(value, tuple)]
    return list(dict.fromkeys(bug for found in lists for bug in found if isinstance(bug, bug_class)))


def planted(bug: Any, package: Path, folder: Path) -> Path:
    """Copy a package and plant a bug into it."""
    copy = folder / f"{bug.model}_planted"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package, copy)
    for name, old, new in ((bug.file or f"modeling_{bug.model}.py", bug.old, bug.new), *getattr(bug, "also", ())):
        file = copy / name
        text = file.read_text("utf-8")
        if old not in text:
            sys.exit(f"{bug.id}: nothing to plant it in: {old!r} is not in {file.name}")
        file.write_text(text.replace(old, new, bug.count), "utf-8")
    return copy


def judged(bug: Any, package: Path, options: Options, answer: Any) -> None:
    """Verify a package with a bug in it, and send back the gate and the check that failed, or two empty texts."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    if hasattr(bug, "check"):
        found = importlib.import_module("tests.verify.generation_bugs").result_of(bug, package)
        missed = found.status != ("not run" if bug.refuses else "failed")
        answer.send(("", found.detail) if missed else (bug.gate, found.name))
        return
    verdict = verify(f"transformers.models.{bug.model}.modeling_{bug.model}", package, options)
    failed = verdict.failed_gate
    answer.send((failed.name, failed.failures[0].name) if failed is not None else ("", verdict.reason))


def main() -> None:
    """Plant the bugs one after the other, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--bugs", nargs="*", default=["argument_bugs", "config_bugs"])
    parser.add_argument("--name", default="")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    gates = ("structure", "parity", "generation")
    options = Options(
        device=arguments.device, seed=arguments.seed, quick=not arguments.full, fail_fast=True, gates=gates,
        compile=arguments.full, clean_process=arguments.full, reach=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    bugs = [bug for name in arguments.bugs for bug in bugs_of(name) if arguments.name in bug.id]
    bugs = [bug for bug in bugs if bug.model in (arguments.models or (bug.model,))]
    caught, context = 0, multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        packages: dict[str, Path] = {}
        for bug in bugs:
            if bug.model not in packages:
                packages[bug.model] = Path(folder) / f"{bug.model}_rewritten"
                command = [sys.executable, "-m", "rewrite.cli", bug.model, "--out", str(packages[bug.model])]
                subprocess.run([*command, "--no-verify", "--diff", "none"], check=True, capture_output=True)
                importlib.import_module(f"transformers.models.{bug.model}.modeling_{bug.model}")
            started, (ours, theirs) = time.perf_counter(), context.Pipe()
            copy = planted(bug, packages[bug.model], Path(folder))
            process = context.Process(target=judged, args=(bug, copy, options, theirs))
            process.start()
            theirs.close()
            try:
                gate, by = ours.recv()
            except EOFError:
                gate, by = "", "the verifier raised"
            process.join()
            status = "PASSED" if not gate else "caught" if gate == bug.gate else f"caught, not by {bug.gate}"
            caught += bool(gate)
            print(f"{status:<8} {time.perf_counter() - started:4.0f} s  {bug.id} · {gate}: {by}", flush=True)
    print(f"{caught} of {len(bugs)} caught")


if __name__ == "__main__":
    main()
