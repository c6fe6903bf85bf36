"""A small model's steps, executed as MI300X's machine code launch by launch, give torch's tokens."""

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


def generated(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_HIP_LLD_PATH": "/usr/bin/true"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.emulator.whole_models", "llama", "--rows", "2", "--tokens", "3"]
    command += ["--json", str(folder / "ran.json"), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (folder / "ran.json").exists(), done.stderr[-3000:]
    return done.returncode, json.loads((folder / "ran.json").read_text("utf-8"))[0]


def test_a_llama_gives_the_same_tokens(tmp_path: Path) -> None:
    code, ran = generated(tmp_path)
    assert (code, ran["same"]) == (0, True)
    kernels = {name.split()[0] for name in ran["launches"]}
    assert {"qkv_rows", "decode_attention", "skinny_linear", "take_best"} <= kernels


def test_wrong_instructions_give_others(tmp_path: Path) -> None:
    """Exponentials are reciprocals: of softmax, and of the activation."""
    code, ran = generated(tmp_path, "--wrong")
    assert (code, ran["same"]) == (1, False)
