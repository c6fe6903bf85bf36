"""Faults that are planted in kernels' assembly are seen; of the rest `docs/amd.md` says what survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .results import ROOT

pytest.importorskip("triton")


def planted(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return what became of the faults that the command planted."""
    results = folder / "faults.jsonl"
    command = [sys.executable, "-m", "tests.emulator.faults", "--json", str(results), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.setdefault("TRITON_HIP_LLD_PATH", "/usr/bin/true")
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def test_faults_of_every_kind(tmp_path: Path) -> None:
    found = planted(tmp_path, "--kernels", "decode_attention", "fp8_rows", "--each", "2")
    assert len(found) >= 40
    assert sum(one["seen"] for one in found) >= 0.6 * len(found)
    seen = {one["fault"] for one in found if one["seen"]}
    assert seen >= {
        "a wait removed", "a wait for one instruction less", "the wrong lanes", "another shift", "another register",
        "matrices of another place", "8-bit floats of the other chip", "the least for the largest",
    }  # fmt: skip


def test_programs_that_count_themselves_in_a_weak_memory(tmp_path: Path) -> None:
    """Right as compiled, in several orders; what is taken out shows."""
    found = planted(tmp_path, "--weak", "--kernels", "skinny_linear")
    for fault in ("a wait removed", "a barrier removed", "a write-back removed", "an invalidation removed"):
        mine = [one for one in found if one["fault"] == fault]
        assert any(one["seen"] for one in mine), f"{fault}: {mine}"
