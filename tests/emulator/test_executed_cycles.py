"""What the speed model reads from AMD's assembly is what is executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .results import ROOT

pytest.importorskip("triton")
NEAR = 0.2
"""Part of the executed cycles by which those that were read may miss them: what a loop's last turn does apart."""


def test_what_is_read_is_executed() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_HIP_LLD_PATH": "/usr/bin/true"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.emulator.executed_cycles"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    straight, *looped = json.loads(done.stdout)
    assert straight["read"] == straight["executed"]
    assert len(looped) == 2
    for launch in looped:
        for unit, executed in launch["executed"].items():
            assert abs(launch["read"][unit] - executed) <= NEAR * executed, (launch["launch"], unit)
