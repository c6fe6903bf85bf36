"""What `rewrite bench --train` prints and exits with, and what it takes for a wrong gradient."""

from __future__ import annotations

import copy
import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch

from rewrite.benchmark import contenders, training_speed

RECORD: dict[str, Any] = {
    "cells": [
        {
            "batch": 4,
            "context": 2048,
            "parity": {"passed": True, "summary": "error 1.00 times the original's"},
            "sides": {
                "original": {
                    "step_ms": 163.0,
                    "peak_bytes": 32 * 2**30,
                    "losses": [11.8, 11.7],
                    "ours": {"value": 1.3, "low": 1.2, "high": 1.4},
                },
                "liger": {"error": "not installed"},
                "ours": {"step_ms": 125.0, "peak_bytes": 16 * 2**30, "losses": [11.8, 11.7]},
            },
        }
    ]
}


def test_a_table_says_all() -> None:
    (table,) = training_speed.tables(RECORD)
    assert table.title == "training step, 4 × 2048 tokens, AdamW"
    assert table.rows[0] == ("original, eager", "163", "32.00", "11.70000", "1.30× (1.20–1.40)")
    assert table.notes == (
        "original with Liger: not installed",
        "gradients agree: error 1.00 times the original's",
    )


def _slower(record: dict[str, Any]) -> None:
    record["cells"][0]["sides"]["original"]["ours"] = {"value": 0.9, "low": 0.85, "high": 0.95}


def _differs(record: dict[str, Any]) -> None:
    record["cells"][0]["parity"]["passed"] = False


def _failed(record: dict[str, Any]) -> None:
    record["cells"][0]["sides"]["ours"] = {"error": "RuntimeError"}


@pytest.mark.parametrize("change", [_slower, _differs, _failed])
def test_exit_code(change: Any) -> None:
    assert training_speed.exit_code(RECORD) == 0
    record = copy.deepcopy(RECORD)
    change(record)
    assert training_speed.exit_code(record) == 1


def test_sides_that_do_not_fit_together_are_said() -> None:
    record = copy.deepcopy(RECORD)
    record["cells"][0]["together"] = False
    (table,) = training_speed.tables(record)
    assert "one side after the other" in table.notes[1]


def test_what_is_known_so_far_is_said() -> None:
    figures = {"first_seconds": 12.34, "peak_bytes": 3 * 2**29}
    assert training_speed._so_far(figures, None) == "12.3 s for its first steps, 1.50 GiB"
    assert (
        training_speed._so_far({"first_seconds": 1.0}, [5.0, 4.0, 9.0]) == "1.0 s for its first steps, 5.0 ms a step"
    )


def test_distances_are_of_the_gradients_that_are_there() -> None:
    exact = {"w": torch.ones(4), "v": torch.ones(2)}
    assert training_speed.distances(exact, {"w": torch.full((4,), 1.5, dtype=torch.bfloat16)}) == {"w": 1.0}


class _Tuned:
    def __init__(self, count: int):
        self.configs = list(range(count))


def test_liger_tunes_its_experts_over_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it has 240, and minutes go by before the first step."""
    kernels = types.ModuleType("liger_kernel.ops.fused_moe_kernels")
    kernels.up, kernels.pinned = _Tuned(32), _Tuned(1)  # type: ignore[attr-defined]
    kernels.__spec__ = importlib.machinery.ModuleSpec(kernels.__name__, None)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setenv(contenders.SWITCH_OF_TUNING, "1")
    contenders.shorten_tuning()
    assert len(kernels.up.configs) == 32
    monkeypatch.delenv(contenders.SWITCH_OF_TUNING)
    contenders.shorten_tuning()
    assert kernels.up.configs == [24, 26, 28, 30]
    assert kernels.pinned.configs == [0]
