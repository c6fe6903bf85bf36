"""Every kernel, compiled for MI300, is executed by the emulator in a test of its own numbers.

Which test that is stands in `results.SAMPLE`, made by `python -m tests.emulator.results --choose` of a whole run;
which kernels there have to be says the catalogue. The tests are the kernels' own, for a GPU; the process believes to
be on the chip.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rewrite.kernels.kernel_run import known_kernels

from .results import NVIDIA, ROOT, SAMPLE, read

KERNELS = sorted(set(known_kernels()) - NVIDIA.keys())
RINGS = "tests/runtime/test_ring_turns.py"
pytest.importorskip("triton")


def emulate(chip: str, tests: Sequence[str], *options: str) -> tuple[list[dict[str, Any]], str]:
    """Run tests in a process of their own; return what became of each, and what the process said."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.jsonl")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--emulate", chip]
        command += [f"--emulate-results={results}", *options, *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Triton 3.4's wheel has no linker for AMD: what is run is the assembly
        environment.setdefault("TRITON_HIP_LLD_PATH", "/usr/bin/true")
        environment.pop("TRITON_INTERPRET", None)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        said = done.stdout[-6000:] + done.stderr[-3000:]
        assert results.exists(), said
        return read([results]), said


@functools.cache
def sample() -> tuple[dict[str, dict[str, Any]], str]:
    """Run the sample for MI300; return the results by their tests."""
    tests = sorted(set(json.loads(SAMPLE.read_text("utf-8")).values()))
    results, said = emulate("gfx942", tests)
    return {one["test"]: one for one in results}, said


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel: str) -> None:
    chosen = json.loads(SAMPLE.read_text("utf-8"))
    assert kernel in chosen, (
        "no test of it was recorded: pytest --emulate gfx942 --emulate-results FILE, then --choose"
    )
    results, said = sample()
    assert chosen[kernel] in results, said
    assert results[chosen[kernel]]["outcome"] == "passed", said
    assert kernel in results[chosen[kernel]]["kernels"]


def test_programs_that_count_themselves_in_the_weakest_memory() -> None:
    """Stores in flight and stale lines, as `device_memory.WeakMemory` has them, beside the kernels' references."""
    strong, _ = sample()
    tests = [one["test"] for one in strong.values() if one["counting"]]
    results, said = emulate("gfx942", tests, "--emulate-weak")
    assert {one["outcome"] for one in results} == {"passed"}, said
    counting = {kernel for one in results for kernel in one["counting"]}
    assert counting == {kernel for one in strong.values() for kernel in one["counting"]}
    assert len(counting) >= 8


def test_more_turns_than_a_ring_has_slots() -> None:
    """On MI350, for which Triton 3.8 let programs leave their LDS where a loop counted in int64."""
    results, said = emulate("gfx950", [RINGS])
    assert {one["outcome"] for one in results} == {"passed"}, said
    assert {kernel for one in results for kernel in one["kernels"]} >= {"decode_attention", "latent_attention"}
