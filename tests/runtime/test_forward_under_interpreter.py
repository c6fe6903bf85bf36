"""Whole small models whose functions are put off as in a captured forward, by Triton's interpreter, in fp32."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tolerances import WHOLE_FORWARD_IN_FP32

SCRIPT = Path(__file__).with_name("forward_under_interpreter.py")
ROOT = SCRIPT.parents[2]
MODELS = {
    "dinov3_vit": ("DINOv3ViTModel", 5),
    "clip": ("CLIPModel", 8),
    "mobilebert": ("MobileBertModel", 20),
    "convnext": ("ConvNextModel", 4),
    "beit": ("BeitModel", 3),
}
"""The class, and how many chains its forward has at least: rotations behind a prefix, activations and norms by hand,
turned images, scales of layers."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="Triton's interpreter needs numpy before 2.4, as [dev] has it",
)
@pytest.mark.parametrize("model", MODELS)
def test_a_whole_forward_gives_the_originals_outputs(model: str, tmp_path: Path, brief: bool) -> None:
    if brief and model != "dinov3_vit":
        pytest.skip("one model where time is short")
    name, fewest = MODELS[model]
    package = tmp_path / f"rewritten_{model}"
    rewrite = [sys.executable, "-c", "from rewrite.cli import main; main()", model, "--out", str(package)]
    subprocess.run([*rewrite, "--no-verify", "--quiet"], check=True, cwd=ROOT, capture_output=True)
    environment = os.environ | {"TRITON_INTERPRET": "1", "REWRITE_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(package), model, name]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    error, kernels = (float(word) for word in run.stdout.split()[1::2])
    assert error <= WHOLE_FORWARD_IN_FP32
    assert kernels >= fewest
