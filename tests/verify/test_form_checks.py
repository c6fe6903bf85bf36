"""What numbers do not show is checked: forms that are not taken, casts that are left out, steps that nobody reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rewrite.verify import Options, verify

from .copies import generated, plant, upstream

RUN, KEPT, JOINED = "methods that were added run", "keys and values are not repeated", "weights are joined once"
NORMS, BEYOND = "norms round as the original's do", "float16, base: beyond the largest number"
HEADS = "fp64 sdpa, heads of 264 columns"
BEHIND, ROUNDED = "decode loop, no steps behind the end", "decode loop, steps round as the original's"
STEPS = "decode loop, step by step, unused slots poisoned, base"

BUGS = {
    "a step is never taken": (
        "phi", "modeling_phi.py", "if is_decode_step(cache):", "if is_decode_step(None):", RUN,
    ),
    "keys are repeated": (
        "llama", "_runtime", "if interface is sdpa_attention_forward and is_intact(interface) else",
        "if False else", KEPT,
    ),
    "biases are joined in each call": (
        "llama", "_runtime", "as_one(present) if len(present) == len(biases)",
        "as_one(present) if len(present) != len(biases)", JOINED,
    ),
    "a norm rounds once": (
        "llama", "modeling_llama.py", "return rms_norm(hidden_states, self.weight, self.variance_epsilon)",
        "return rms_norm(hidden_states, self.weight, self.variance_epsilon, weight_in_fp32=True)", NORMS,
    ),
    "the norm behind a sum rounds once": (
        "llama", "_runtime", "offset=offset, weight_in_fp32=weight_in_fp32)\n\n\ndef _form",
        "offset=offset, weight_in_fp32=True)\n\n\ndef _form", NORMS,
    ),
    "wide heads see what follows": (
        "llama", "_runtime",
        "scale=scaling,\n        is_causal=causal,\n    )\n    return out.permute",
        "scale=scaling,\n    )\n    return out.permute", HEADS,
    ),
    "a step sees the first key alone": (
        "llama", "_runtime", "causal = length > 1 and mask is None",
        "causal = length >= 1 and mask is None", HEADS,
    ),
    "steps are made that nobody reads": (
        "llama", "_runtime", "progress.read()\n                continue", "progress.read()",
        BEHIND,
    ),
    "a step rotates in fp32": (
        "llama", "_runtime", "layer = past_key_values.layers[layer_idx]\n    rotation =",
        "layer = past_key_values.layers[layer_idx]\n    in_fp32 = True\n    rotation =", ROUNDED,
    ),
    "a step knows no layers": (
        "llama", "_runtime/decode/step_buffers.py", "DynamicCache(config=model.config.get_text_config(decoder=True))",
        "DynamicCache()", STEPS,
    ),
    "infinities stay": (
        "t5", "modeling_t5.py", "torch.finfo(hidden_states.dtype).max - 1000",
        "torch.finfo(hidden_states.dtype).max + 1000", BEYOND,
    ),
}  # fmt: skip
CHECKS = (RUN, KEPT, JOINED, NORMS, BEYOND, HEADS, BEHIND, ROUNDED, STEPS)
EACH = "decode loop, a step for each token"


def options(*checks: str) -> Options:
    return Options(clean_process=False, checks=checks, keep_going=True)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packages")
    return {model: generated(folder / model, model) for model in ("llama", "t5", "phi")}


@pytest.mark.parametrize("model", ["llama", "t5"])
def test_a_package_passes(model: str, packages: dict[str, Path]) -> None:
    verdict = verify(upstream(model), packages[model], options(*CHECKS))
    checks = {check.name: check.status for gate in verdict.gates[1:] for check in gate.checks}
    assert NORMS in checks
    assert (BEYOND in checks) == (model == "t5")
    assert set(checks.values()) <= {"passed", "not run"}
    assert not [name for name, status in checks.items() if status == "not run" and name in CHECKS and name != RUN]


def test_a_model_of_text_and_images_takes_its_steps(tmp_path: Path) -> None:
    """Its class is called no causal model, and every prompt leaves a tensor on it."""
    package = generated(tmp_path / "package", "qwen2_5_vl")
    verdict = verify(upstream("qwen2_5_vl"), package, options(RUN, EACH))
    checks = {check.name: check.status for gate in verdict.gates[1:] for check in gate.checks}
    assert checks == {RUN: "not run", EACH: "passed"}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name: str, packages: dict[str, Path], tmp_path: Path) -> None:
    model, file, old, new, check = BUGS[name]
    broken = tmp_path / f"{model}_{len(name)}_{len(check)}"
    shutil.copytree(packages[model], broken)
    plant(broken, file, old, new, -1)
    verdict = verify(upstream(model), broken, options(check))
    failed = {one.name for gate in verdict.gates for one in gate.checks if one.status == "failed"}
    assert check in failed
