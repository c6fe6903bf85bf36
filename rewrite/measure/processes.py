"""Runs a module in several processes of this host, which find each other as torch's do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rewrite.errors import VerificationError


class RanksFailed(VerificationError):
    """The processes did not come to an end."""

    def __init__(self, what: str, code: int, output: str):
        lines = [line for line in output.strip().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line and "ChildFailed" not in line]
        said = (errors or lines or ["no message"])[-1]
        super().__init__(f"{what} on several ranks ended with code {code}: {said.strip()}")


def launch(module: str, ranks: int, arguments: Sequence[str], what: str) -> None:
    """Run `python -m module ARGUMENTS` in `ranks` processes under torchrun, and wait for them.

    Raises:
        RanksFailed: if one fails; torchrun ends the others.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        module,
    ]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RanksFailed(what, done.returncode, done.stderr)
