"""What `explain` prints."""

from __future__ import annotations

from hf_rewrite_runtime.core.explain import Explanation


def test_modules_that_differ_in_numbers_share_a_line() -> None:
    modules = {f"layers.{index}.mlp": "rms_norm: dtype" for index in range(12)}
    said = Explanation("auto", {"rms_norm: dtype": 24}, {**modules, "layers.3.norm": "rms_norm: dtype", "": "x: y"})
    assert str(said).splitlines() == [
        "backend: auto",
        "      24 × rms_norm: dtype",
        "model: x: y",
        "layers.*.mlp (12): rms_norm: dtype",
        "layers.3.norm: rms_norm: dtype",
    ]
