"""`bench/forwards.py first`: each of the first calls of a process on its own, for what is compiled and what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_the_first_calls_of_a_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(BENCH / "forwards.py"), "first", str(tmp_path / "packages")]
    command += ["--rows", str(tmp_path / "rows"), "--names", "bert", "--tiny", "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for line, kind in zip(run.stdout.splitlines(), ("cold", "warm"), strict=True):
        assert line.startswith(f"bert, {kind}: first call "), line
        row = json.loads((tmp_path / "rows" / f"bert-first-{kind}.json").read_text("utf-8"))
        assert len(row["calls_s"]) == 4
        assert min(row["calls_s"]) > 0
