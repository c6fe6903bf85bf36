"""Sums over the memory of two cards, which a CPU cannot play."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA cards of one host")
def test_sums_of_two_cards_are_those_of_fp32_whoever_is_late() -> None:
    agent = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", *agent, str(Path(__file__).with_name("summing_rank.py"))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
