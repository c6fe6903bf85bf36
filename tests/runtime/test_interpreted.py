"""Run the kernel tests on the CPU: Triton reads TRITON_INTERPRET when it is imported, so in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_rewrite_runtime.decode import eligibility

FOLDER = Path(__file__).parent
TESTS = [
    *(path.name for path in sorted(FOLDER.glob("test_*kernels.py"))),
    "test_integer_checkpoints.py",
    "test_rotary_rows.py",
]
WATCHED = "test_cross_attention_kernels.py"
HALF = ("test_kernels.py", "test_step_kernels.py")
"""Files that run in fp16 too, which takes the interpreter as long again; a GPU runs all of them in every dtype."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs numpy before 2.4, as [dev] has it",
)
@pytest.mark.parametrize("tests", TESTS)
def test_kernels_under_the_interpreter(tests: str, brief: bool) -> None:
    if tests == WATCHED and not eligibility.can_watch():
        pytest.skip("loops of this transformers cannot be watched")
    chosen = ["-k", "not float16"] if brief or tests not in HALF else []
    if tests == "test_rotary_rows.py":
        chosen = ["-k", "test_kernel_gathers_rows"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen, str(FOLDER / tests)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert " passed" in run.stdout
